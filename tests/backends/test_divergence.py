"""Values that are not finite: gradients are skipped and counted, weights are never saved."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cookbook.backends.fake import FakeService
from cookbook.backends.local import LocalService
from cookbook.core.clients import ServiceClient, TrainingClient
from cookbook.core.errors import BackendError, CheckpointError, ConfigError
from cookbook.core.types import AdamParams, Datum, ModelInput

DATA = [Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8], "weights": np.ones(3)})]


@pytest.fixture(params=[FakeService, LocalService])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceClient]:
    made = request.param(state_dir=str(tmp_path / "states"))
    yield made
    made.stop()


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=0)


def logprobs(client: TrainingClient) -> list[float]:
    return client.forward(DATA, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()


def infinite(data, logprobs_D):
    """A loss of value zero with an infinite gradient."""
    values = torch.cat(list(logprobs_D))
    return ((values - values.detach()) * 1e38 * 1e38).sum(), {}


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(client: TrainingClient):
    before = logprobs(client)
    client.forward_backward_custom(DATA, infinite).result()
    assert client.optim_step(AdamParams()).result().metrics == {"grad_norm": 0.0, "skipped_steps": 1.0}
    assert logprobs(client) == before
    client.forward_backward(DATA, "cross_entropy").result()
    assert client.optim_step(AdamParams()).result().metrics["skipped_steps"] == 0.0
    assert logprobs(client) != before


def test_weights_that_are_not_finite_are_an_error_and_are_not_saved(client: TrainingClient, service: ServiceClient):
    saved = client.save_state("good").result().path
    before = logprobs(client)
    client.forward_backward(DATA, "cross_entropy").result()
    with pytest.raises(BackendError, match="the weights are no longer finite"):
        for _ in range(3):
            client.forward_backward(DATA, "cross_entropy")
            client.optim_step(AdamParams(learning_rate=1e308, weight_decay=1.0)).result()
    with pytest.raises(BackendError, match="save: the weights are no longer finite"):
        client.save_state("good").result()
    client.load_state(saved).result()
    assert logprobs(client) == before


def test_params_that_were_changed_after_their_check_are_checked_again(client: TrainingClient):
    params = AdamParams()
    params.learning_rate = float("inf")
    with pytest.raises(ConfigError, match=r"learning_rate=inf"):
        client.optim_step(params).result()


@pytest.mark.parametrize("other", [{"rank": 8}, {"rank": 4, "alpha": 8}, {"rank": 4, "role": "critic"}])
def test_a_save_of_another_kind_of_session_is_refused(client: TrainingClient, service: ServiceClient, other: dict):
    path = client.save_state("s").result().path
    with pytest.raises(CheckpointError, match="but this session has"):
        service.create_lora_training_client("tiny", seed=0, **other).load_state(path).result()


@pytest.mark.parametrize("kind", [FakeService, LocalService])
def test_saves_that_vanish_with_the_service_are_announced(kind: type):
    service = kind()
    with pytest.warns(UserWarning, match=r"which stop\(\) deletes; to keep them, give the service a state_dir"):
        service.create_lora_training_client("tiny", rank=4, seed=0).save_state("s").result()
    service.stop()
