"""Training through the published tinker SDK over a socket: the same numbers as the backend gives in this process."""

import numpy as np
import pytest
import torch

from cookbook.backends.local import LocalService
from cookbook.core import types as ours
from cookbook.serve.adapters.tinker import routes
from tests.serve.sdk_models import ADAM, POLICY, SEED, TARGETS, assert_same, mine, step, theirs

tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed: pip install -e '.[tinker]'")
types = tinker.types


@pytest.mark.parametrize(
    ("loss_fn", "inputs", "config"),
    [
        ("cross_entropy", TARGETS, None),
        ("cross_entropy", {"target_tokens": TARGETS["target_tokens"]}, None),
        ("importance_sampling", POLICY, None),
        ("ppo", POLICY, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", POLICY, {"clip_high_threshold": 2.0}),
        ("dro", POLICY, {"beta": 0.1}),
    ],
)
def test_losses(pair, loss_fn: str, inputs: dict, config: dict | None) -> None:
    remote, local = pair
    step(pair)
    assert_same(
        remote.forward(theirs(inputs), loss_fn, config).result(), local.forward(mine(inputs), loss_fn, config).result()
    )
    got = remote.forward_backward(theirs(inputs), loss_fn, config)
    stepped = remote.optim_step(types.AdamParams(**ADAM))
    assert_same(got.result(), local.forward_backward(mine(inputs), loss_fn, config).result())
    assert stepped.result().metrics == pytest.approx(
        local.optim_step(ours.AdamParams(**ADAM)).result().metrics, rel=1e-4
    )
    assert_same(
        remote.forward(theirs(TARGETS), "cross_entropy").result(),
        local.forward(mine(TARGETS), "cross_entropy").result(),
    )


def test_a_client_can_do_without_the_logprobs_that_no_loss_reads(sdk_client) -> None:
    metadata = {"sparse_logprobs": "true"}
    model = sdk_client.create_lora_training_client("tiny", rank=4, seed=SEED, user_metadata=metadata).result(timeout=60)
    trained = (
        model.forward_backward(theirs(TARGETS), "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    )
    scored = model.forward(theirs(TARGETS), "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert trained[0] == 0.0 and scored[0] < 0.0
    np.testing.assert_allclose(trained[1:], scored[1:], atol=1e-4)


def test_soft_targets_dense_and_sparse(pair) -> None:
    remote, local = pair
    targets, weights = np.zeros((4, 8), np.int64), np.zeros((4, 8), np.float32)
    targets[:, :2], weights[:, :2] = [[41, 50], [42, 51], [43, 52], [44, 53]], [0.75, 0.25]
    expected = local.forward_backward(mine({"target_tokens": targets, "weights": weights}), "cross_entropy").result()
    sparse = theirs({"target_tokens": torch.from_numpy(targets), "weights": torch.from_numpy(weights)})
    assert sparse[0].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    for data in (theirs({"target_tokens": targets, "weights": weights}), sparse):
        assert_same(remote.forward_backward(data, "cross_entropy").result(), expected)


@pytest.mark.parametrize("inputs", [TARGETS, {"target_tokens": TARGETS["target_tokens"]}])
def test_custom_loss(pair, inputs: dict) -> None:
    remote, local = pair

    def loss(data, logprobs):
        return sum((lp.exp() - 0.1 * lp).sum() for lp in logprobs), {"mine": 1.0}

    got = remote.forward_backward_custom(theirs(inputs), loss)
    stepped = remote.optim_step(types.AdamParams(**ADAM))
    plain = {"target_tokens": inputs["target_tokens"]}  # in-process, weights of zero leave logprobs out
    expected = local.forward_backward_custom(mine(plain), loss).result()
    assert got.result().metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert got.result().metrics["mine"] == 1.0
    assert stepped.result().metrics == pytest.approx(
        local.optim_step(ours.AdamParams(**ADAM)).result().metrics, rel=1e-4
    )


def test_many_chunks_are_one_batch(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, local = pair
    for threshold in ("OFF_LOOP_BYTES", "METADATA_FIRST_BYTES"):  # what happens to large ones
        monkeypatch.setattr(routes, threshold, 1)
    # The SDK sends a batch's first chunk last.
    monkeypatch.setattr(
        remote.holder, "_client_config", remote.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 3})
    )
    got = remote.forward_backward(theirs(TARGETS, 10), "cross_entropy").result()
    assert_same(got, local.forward_backward(mine(TARGETS, 10), "cross_entropy").result())


@pytest.mark.parametrize(
    ("inputs", "loss_fn", "config", "message"),
    [
        ({"target_tokens": [1, 2]}, "cross_entropy", None, r"datum 0: .* has shape \(2,\)"),
        ({"target_tokens": [41, 42, 43, 10**6]}, "cross_entropy", None, "token"),
        (TARGETS, "ppo", None, "logprobs"),
        (TARGETS, "crossentropy", None, "did you mean"),
        (POLICY, "ppo", {"clip": 1.0}, "unknown setting"),
        (TARGETS, "cross_entropy", {"loss_id": "x"}, "numbers only"),
        ({**TARGETS, "weights": [0.0, float("nan"), 1.0, 1.0]}, "cross_entropy", None, "NaN"),
    ],
)
def test_a_bad_operation_fails_alone(pair, inputs, loss_fn, config, message) -> None:
    remote, local = pair
    bad = remote.forward_backward(theirs(inputs), loss_fn, config)
    good = remote.forward_backward(theirs(TARGETS), "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        bad.result(timeout=20)
    assert caught.value.category is tinker.types.RequestErrorCategory.User
    assert_same(good.result(timeout=20), local.forward_backward(mine(TARGETS), "cross_entropy").result())


def test_roles_alpha_and_full_parameters_by_metadata(sdk_client, local: LocalService) -> None:
    def loss_after_a_step(metadata: dict[str, str]) -> float:
        model = sdk_client.create_lora_training_client("tiny", rank=4, seed=1, user_metadata=metadata).result(
            timeout=60
        )
        assert model.get_info().is_lora == ("full_parameter" not in metadata)
        model.forward_backward(theirs(TARGETS), "cross_entropy")
        model.optim_step(types.AdamParams(**ADAM))
        return model.forward(theirs(TARGETS), "cross_entropy").result().metrics["loss:sum"]

    losses = [
        loss_after_a_step(metadata)
        for metadata in ({"lora_alpha": "32"}, {"lora_alpha": "8"}, {"full_parameter": "true"})
    ]
    assert len({round(loss, 3) for loss in losses}) == 3
    assert loss_after_a_step({}) == pytest.approx(losses[0], rel=1e-5)
    critic = sdk_client.create_lora_training_client("tiny", rank=4, user_metadata={"role": "critic"}).result(timeout=60)
    data = theirs({"target_tokens": TARGETS["target_tokens"]}, 1)
    returns = {
        "returns": np.ones(4, np.float32),
        "old_values": np.zeros(4, np.float32),
        "weights": np.ones(4, np.float32),
    }
    critic_data = [types.Datum(model_input=data[0].model_input, loss_fn_inputs={**data[0].loss_fn_inputs, **returns})]
    assert critic.forward_backward(critic_data, "value").result().loss_fn_outputs[0]["values"].shape == [4]
    with pytest.raises(tinker.BadRequestError, match="policy or critic"):
        sdk_client.create_lora_training_client("tiny", user_metadata={"role": "judge"}).result(timeout=20)
