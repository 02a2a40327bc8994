"""The local backend's critic: a value head that learns, is saved with its adapter, and leaves the policy alone."""

import numpy as np
import pytest

from cookbook.backends.local import LocalService
from cookbook.core.errors import CapabilityError, CookbookError
from cookbook.core.types import AdamParams, Datum, ModelInput

ADAM = AdamParams(learning_rate=3e-3)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    service = LocalService(device="cpu", dtype="float32", state_dir=str(tmp_path_factory.mktemp("states")))
    yield service
    service.stop()


def episode(tokens: list[int], reward: float, old_values: float = 0.0) -> Datum:
    length = len(tokens) - 1
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": np.array(tokens[1:]),
            "weights": np.array([0.0] * 2 + [1.0] * (length - 2)),
            "returns": np.full(length, reward),
            "old_values": np.full(length, old_values),
        },
    )


DATA = [episode([5, 6, 7, 8, 9, 10], 1.0), episode([5, 6, 17, 18, 19], 0.0)]


def values(critic, data=DATA):
    return [output["values"] for output in critic.forward(data, "value").result().loss_fn_outputs]


def train(critic, steps):
    for _ in range(steps):
        critic.forward_backward(DATA, "value", {"clip_range": 0.0})
        critic.optim_step(ADAM).result()


def test_it_starts_at_zero_and_learns_the_returns(service):
    critic = service.create_lora_training_client("tiny", rank=8, alpha=16, seed=0, role="critic")
    assert all((array == 0).all() for array in values(critic))
    loss = critic.forward(DATA, "value", {"clip_range": 0.0}).result().metrics["loss:sum"]
    assert loss == pytest.approx(3 * 1.0**2 / 2)  # three positions with weight, each off by one
    train(critic, 60)
    good, bad = values(critic)
    np.testing.assert_allclose(good[2:], 1.0, atol=0.15)
    np.testing.assert_allclose(bad[2:], 0.0, atol=0.15)


def test_the_gradient_does_not_depend_on_the_micro_batches(tmp_path):
    after = []
    for token_budget in (4096, 1):
        service = LocalService(device="cpu", dtype="float32", state_dir=str(tmp_path), token_budget=token_budget)
        critic = service.create_lora_training_client("tiny", rank=8, alpha=16, seed=0, role="critic")
        train(critic, 3)
        after.append(values(critic))
        service.stop()
    for whole, split in zip(*after, strict=True):
        np.testing.assert_allclose(whole, split, atol=1e-5)


def test_saved_and_loaded_it_goes_on_exactly(service):
    critic = service.create_lora_training_client("tiny", rank=8, alpha=16, seed=0, role="critic")
    train(critic, 2)
    path = critic.save_state("critic").result().path
    resumed = service.create_training_client_from_state(path, with_optimizer=True)
    train(critic, 2)
    train(resumed, 2)
    for one, other in zip(values(critic), values(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_leaves_the_policy_alone(service):
    policy = service.create_lora_training_client("tiny", rank=8, alpha=16, seed=0)
    data = [Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in DATA]
    before = policy.forward(data, "cross_entropy").result().metrics["loss:sum"]
    train(service.create_lora_training_client("tiny", rank=8, alpha=16, seed=1, role="critic"), 3)
    assert policy.forward(data, "cross_entropy").result().metrics["loss:sum"] == before


def test_what_it_cannot_do_is_said(service):
    critic = service.create_lora_training_client("tiny", rank=8, alpha=16, seed=0, role="critic")
    with pytest.raises(CookbookError, match="cross_entropy"):
        critic.forward(DATA, "cross_entropy").result()
    with pytest.raises(CapabilityError, match="cannot be sampled"):
        critic.save_weights_and_get_sampling_client()
    with pytest.raises(CapabilityError, match="value"):
        critic.forward_backward_custom(DATA, lambda data, logprobs: (logprobs[0].sum(), {})).result()
