"""The published tinker SDK against a live server over a socket: the same numbers as the backend gives in this process."""

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cookbook.backends.local import LocalService
from cookbook.core import types as ours
from cookbook.serve.adapters.tinker import routes
from tests.serve.live_server import API_KEY, live_server

tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed: pip install -e '.[tinker]'")
types = tinker.types

RANK, ALPHA, SEED = 8, 32, 3
GREEDY, SEEDED = types.SamplingParams(max_tokens=6, temperature=0.0), types.SamplingParams(max_tokens=12, seed=11)
ADAM = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
PROMPT = [40, 41, 42, 43, 44]

TARGETS = {"target_tokens": [41, 42, 43, 44], "weights": [0.0, 1.0, 0.5, 2.0]}
POLICY = {
    "target_tokens": [41, 42, 43, 44],
    "logprobs": [0.0, -4.0, -6.0, -3.0],
    "advantages": [0.0, 1.0, -0.5, 0.7],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        pytest.MonkeyPatch.context() as patch,
        live_server(tmp_path_factory.mktemp("server"), max_queued=256) as running,
    ):
        patch.setenv("TINKER_TELEMETRY", "0")
        yield running


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY, user_metadata={"who": "test"}, display_name="named")
    yield service
    service.close("success").result(timeout=30)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalService]:
    service = LocalService()
    yield service
    service.stop()


@pytest.fixture
def pair(client, local: LocalService):
    """A model of the server and one of this process, of the same seed."""
    remote = client.create_lora_training_client("tiny", rank=RANK, seed=SEED).result(timeout=60)
    return remote, local.create_lora_training_client("tiny", RANK, ALPHA, SEED)


def theirs(inputs: dict, count: int = 2) -> list:
    return [
        types.Datum(model_input=types.ModelInput.from_ints(PROMPT[:4]), loss_fn_inputs=dict(inputs))
        for _ in range(count)
    ]


def mine(inputs: dict, count: int = 2) -> list[ours.Datum]:
    return [ours.Datum(ours.ModelInput.from_ints(PROMPT[:4]), inputs) for _ in range(count)]


def assert_same(remote, local, read=None) -> None:
    """Equal outputs; logprobs where the in-process backend computes them: it leaves 0.0 where no loss reads any."""
    assert remote.metrics == pytest.approx(local.metrics, rel=1e-5, abs=1e-5)
    for got, expected in zip(remote.loss_fn_outputs, local.loss_fn_outputs, strict=True):
        values, computed = got["logprobs"].to_numpy(), expected["logprobs"] != 0.0
        assert values.shape == expected["logprobs"].shape and computed.any()
        np.testing.assert_allclose(values[computed], expected["logprobs"][computed], atol=1e-4)
        assert (values < 0).all(), "the server computes all of them"


def step(pair) -> None:
    """One step of both, so that the adapters are no longer neutral."""
    remote, local = pair
    remote.forward_backward(theirs(TARGETS), "cross_entropy")
    ending = remote.optim_step(types.AdamParams(**ADAM))
    local.forward_backward(mine(TARGETS), "cross_entropy")
    expected = local.optim_step(ours.AdamParams(**ADAM)).result()
    assert ending.result(timeout=60).metrics == pytest.approx(expected.metrics, rel=1e-4)


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


def test_a_client_can_do_without_the_logprobs_that_no_loss_reads(client) -> None:
    metadata = {"sparse_logprobs": "true"}
    model = client.create_lora_training_client("tiny", rank=4, seed=SEED, user_metadata=metadata).result(timeout=60)
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


def sample_both(remote, local, params, stop: tuple = (), num_samples: int = 4):
    got = remote.sample(
        types.ModelInput.from_ints(PROMPT), num_samples, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    mine = ours.SamplingParams(params.max_tokens, params.temperature, params.top_p, params.top_k, stop, params.seed)
    expected = local.sample(ours.ModelInput.from_ints(PROMPT), num_samples, mine, True, 3).result()
    assert [s.tokens for s in got.sequences] == [s.tokens for s in expected.sequences]
    for sequence, other in zip(got.sequences, expected.sequences, strict=True):
        np.testing.assert_allclose(sequence.logprobs, other.logprobs, atol=1e-4)
        assert sequence.stop_reason == ("length" if other.stop_reason == "length" else "stop")
    assert got.prompt_logprobs[0] is None and got.prompt_logprobs[1:] == pytest.approx(
        expected.prompt_logprobs[1:], abs=1e-4
    )
    assert got.topk_prompt_logprobs[0] is None
    assert [[token for token, _ in row] for row in got.topk_prompt_logprobs[1:]] == [
        [token for token, _ in row] for row in expected.topk_prompt_logprobs[1:]
    ]
    assert len({s.sequence_id for s in got.sequences}) == num_samples
    return got


def test_samples_of_live_weights(pair) -> None:
    remote, local = pair
    step(pair)
    sampler, other = (
        remote.save_weights_and_get_sampling_client().result(),
        local.save_weights_and_get_sampling_client(),
    )
    assert sampler.get_base_model() == "tiny"
    plain = sample_both(sampler, other, SEEDED)
    assert sample_both(sampler, other, SEEDED).sequences[0].tokens == plain.sequences[0].tokens
    sample_both(sampler, other, types.SamplingParams(max_tokens=8, seed=5, temperature=0.7, top_k=20, top_p=0.9))
    sample_both(sampler, other, GREEDY, num_samples=1)
    fresh = [
        sampler.sample(types.ModelInput.from_ints(PROMPT), 8, types.SamplingParams(max_tokens=8)).result()
        for _ in range(2)
    ]
    assert [s.tokens for s in fresh[0].sequences] != [s.tokens for s in fresh[1].sequences]
    got = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    expected = other.compute_logprobs(ours.ModelInput.from_ints(PROMPT)).result()
    assert got[0] is None and got[1:] == pytest.approx(expected[1:], abs=1e-4)
    step(pair)
    sample_both(sampler, other, SEEDED)  # pinned: the step changed neither


@pytest.mark.parametrize("as_list", [True, False])
def test_stops(pair, as_list: bool) -> None:
    remote, local = pair
    sampler, other = (
        remote.save_weights_and_get_sampling_client().result(),
        local.save_weights_and_get_sampling_client(),
    )
    free = sample_both(sampler, other, SEEDED, num_samples=1).sequences[0].tokens
    text = local.get_tokenizer().decode(free[:2])[-1]
    stop = [text] if as_list else text
    got = sample_both(sampler, other, types.SamplingParams(max_tokens=12, seed=11, stop=stop), (text,), 1).sequences[0]
    assert got.stop_reason == "stop" and len(got.tokens) <= 2
    got = sample_both(
        sampler, other, types.SamplingParams(max_tokens=12, seed=11, stop=[free[1]]), (free[1],), 1
    ).sequences[0]
    assert got.stop_reason == "stop" and got.tokens == free[: free.index(free[1]) + 1]


def test_save_and_load_state(pair, client, local: LocalService) -> None:
    remote, other = pair
    step(pair)
    saved, saved_here = remote.save_state("one").result(), other.save_state("one").result()
    assert saved.path == f"tinker://{remote.model_id}/weights/one"
    step(pair)
    for with_optimizer in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if with_optimizer:
                remote.load_state_with_optimizer(saved.path).result()
                other.load_state_with_optimizer(saved_here.path).result()
            else:
                remote.load_state(saved.path).result()
                other.load_state(saved_here.path).result()
        step(pair)
        assert_same(
            remote.forward(theirs(TARGETS), "cross_entropy").result(),
            other.forward(mine(TARGETS), "cross_entropy").result(),
        )
    for with_optimizer in (False, True):
        suffix = "_with_optimizer" if with_optimizer else ""
        again = getattr(client, f"create_training_client_from_state{suffix}")(saved.path).result()
        assert again.get_info().lora_rank == RANK and again.get_info().model_data.model_name == "tiny"
        copy = (again, local.create_training_client_from_state(saved_here.path, with_optimizer))
        step(copy)
        got, expected = (
            copy[0].forward(theirs(TARGETS), "cross_entropy"),
            copy[1].forward(mine(TARGETS), "cross_entropy"),
        )
        assert_same(got.result(), expected.result())


def test_saved_names_are_kept_unless_overwritten(pair) -> None:
    remote, _ = pair
    remote.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="exists; save under another name"):
        remote.save_state("twice").result()
    remote.save_state("twice", overwrite=True).result()
    with pytest.raises(tinker.RequestFailedError, match="checkpoint name"):
        remote.save_state("../twice").result()
    remote.save_state("after", ttl_seconds=3600).result()  # refusals leave no gap in the order


def test_sampler_from_a_path_and_of_the_base_model(pair, client, local: LocalService) -> None:
    remote, other = pair
    step(pair)
    path, here = remote.save_weights_for_sampler("s").result().path, other.save_weights_for_sampler("s").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    assert sampler.get_base_model() == "tiny"
    sample_both(sampler, local.create_sampling_client(model_path=here), SEEDED)
    base, base_here = (
        client.create_sampling_client(base_model="tiny").result(),
        local.create_sampling_client(base_model="tiny"),
    )
    sample_both(base, base_here, SEEDED)
    for copy in (
        pickle.loads(pickle.dumps(sampler)),
        tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=API_KEY),
    ):
        assert copy._request_id_counter > 2**29, "copies number their requests far above the original's"
        sample_both(copy, local.create_sampling_client(model_path=here), SEEDED)


def test_listings(url: str, pair, client) -> None:
    remote, _ = pair
    remote.save_weights_for_sampler("listed", ttl_seconds=7200).result()
    state = remote.save_state("listed").result().path
    rest = tinker.RestClient(base_url=url, api_key=API_KEY)
    assert [model.model_name for model in rest.get_server_capabilities().result().supported_models] == ["tiny"]
    run = rest.get_training_run_by_tinker_path(state).result()
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (remote.model_id, "tiny", True, RANK)
    assert run.last_checkpoint.tinker_path == state
    page = rest.list_training_runs(limit=1).result()
    assert page.training_runs[0].training_run_id == remote.model_id and page.cursor.total_count >= 1
    found = {c.checkpoint_id: c for c in rest.list_checkpoints(remote.model_id).result().checkpoints}
    assert {key: c.checkpoint_type for key, c in found.items()} == {
        "weights/listed": "training",
        "sampler_weights/listed": "sampler",
    }
    assert found["weights/listed"].expires_at is None and found["sampler_weights/listed"].expires_at is not None
    assert found["weights/listed"].size_bytes > 0
    assert state in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", True, RANK)
    session_id = client.holder.get_session_id()
    assert session_id in rest.list_sessions().result().sessions
    session = rest.get_session(session_id).result()
    assert remote.model_id in session.training_run_ids
    assert (session.user_metadata, session.display_name) == ({"who": "test"}, "named")
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    assert rest.get_training_run(remote.model_id).result().last_checkpoint.expires_at is not None
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [c.checkpoint_id for c in rest.list_checkpoints(remote.model_id).result().checkpoints] == [
        "sampler_weights/listed"
    ]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.get_weights_info_by_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError, match="publishing is not supported"):
        rest.publish_checkpoint_from_tinker_path(found["sampler_weights/listed"].tinker_path).result()
    with pytest.raises(tinker.NotFoundError, match="is not an endpoint"):
        rest.copy_weights(found["sampler_weights/listed"].tinker_path, destination_project_id="p").result()


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


def test_bad_samples_fail_at_once(client) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(PROMPT)
    for message, arguments in {
        "max_tokens is missing": {"sampling_params": types.SamplingParams()},
        "end-of-sequence": {"sampling_params": types.SamplingParams(max_tokens=4, stop=[])},
        "temperature is -1": {"sampling_params": types.SamplingParams(max_tokens=4, temperature=-1)},
        "num_samples is 0": {"sampling_params": GREEDY, "num_samples": 0},
        "topk_sample_logprobs is not supported": {"sampling_params": GREEDY, "topk_sample_logprobs": 2},
        "prompt_alt_tokens_k is not supported": {"sampling_params": GREEDY, "prompt_alt_tokens_k": 2},
        "exceed the context": {"sampling_params": types.SamplingParams(max_tokens=10**6)},
    }.items():
        with pytest.raises(tinker.RequestFailedError, match=message):
            sampler.sample(**{"prompt": prompt, "num_samples": 1, **arguments}).result(timeout=20)


def test_what_cannot_be_made_is_refused_at_once(client) -> None:
    with pytest.raises(tinker.BadRequestError, match="served are tiny"):
        client.create_lora_training_client("tinny").result(timeout=20)
    with pytest.raises(tinker.BadRequestError, match="train_mlp"):
        client.create_lora_training_client("tiny", train_mlp=False).result(timeout=20)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        client.create_training_client_from_state("tinker://x/weights/y").result(timeout=20)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        client.create_sampling_client(model_path="tinker://x/sampler_weights/y").result(timeout=20)


def test_roles_alpha_and_full_parameters_by_metadata(client, local: LocalService) -> None:
    def loss_after_a_step(metadata: dict[str, str]) -> float:
        model = client.create_lora_training_client("tiny", rank=4, seed=1, user_metadata=metadata).result(timeout=60)
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
    critic = client.create_lora_training_client("tiny", rank=4, user_metadata={"role": "critic"}).result(timeout=60)
    data = theirs({"target_tokens": TARGETS["target_tokens"]}, 1)
    returns = {
        "returns": np.ones(4, np.float32),
        "old_values": np.zeros(4, np.float32),
        "weights": np.ones(4, np.float32),
    }
    critic_data = [types.Datum(model_input=data[0].model_input, loss_fn_inputs={**data[0].loss_fn_inputs, **returns})]
    assert critic.forward_backward(critic_data, "value").result().loss_fn_outputs[0]["values"].shape == [4]
    with pytest.raises(tinker.BadRequestError, match="policy or critic"):
        client.create_lora_training_client("tiny", user_metadata={"role": "judge"}).result(timeout=20)


def test_a_closed_session_says_so(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    model = service.create_lora_training_client("tiny", rank=4).result(timeout=60)
    sampler = pickle.dumps(model.save_weights_and_get_sampling_client().result())
    path = model.save_state("last").result().path
    service.close("errored", detail="enough").result(timeout=30)
    with pytest.raises(tinker.APIStatusError, match=r"is Stopped \(errored: enough\); create a new session") as caught:
        pickle.loads(sampler).sample(types.ModelInput.from_ints(PROMPT), 1, GREEDY).result(timeout=20)
    assert caught.value.status_code == 410
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as another:
        another.create_training_client_from_state(path).result(timeout=60)
