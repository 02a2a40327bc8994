"""Saves of the local backend: exact, complete, atomic, and readable by plain peft and transformers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from cookbook.backends.local import LocalService
from cookbook.backends.local.clients import LocalTrainingClient
from cookbook.core.errors import BackendError, CheckpointError, ConfigError
from cookbook.core.types import AdamParams, ModelInput, SamplingParams
from tests.backends.local_model import disturb, policy_data, random_tokens

ADAM = AdamParams(learning_rate=1e-2)
PROMPT = ModelInput.from_ints(random_tokens(0, 20))


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def service(state_dir: Path) -> Iterator[LocalService]:
    service = LocalService(device="cpu", state_dir=str(state_dir))
    yield service
    service.stop()


def step(client: LocalTrainingClient, seed: int = 9) -> None:
    client.forward_backward(policy_data(seed), "cross_entropy")
    client.optim_step(ADAM).result()


def weights(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    assert client._session is not None
    return {name: values.detach().clone() for name, values in client._session.weights.parameters.items()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert torch.equal(values, second[name]), name


@pytest.mark.parametrize("rank", [4, None])
def test_round_trip_is_exact_with_and_without_optimizer(
    service: LocalService, random_model: str, rank: int | None
) -> None:
    client = service.create_lora_training_client(random_model, rank=rank, alpha=8, seed=0)
    disturb(client)
    path = client.save_state(f"round-trip/{rank}").result().path
    saved = weights(client)
    step(client)
    continued = weights(client)
    client.load_state_with_optimizer(path).result()
    assert_equal(weights(client), saved)
    step(client)
    assert_equal(weights(client), continued)
    client.load_state(path).result()
    assert_equal(weights(client), saved)
    step(client)
    restarted = weights(client)
    assert not all(torch.equal(values, continued[name]) for name, values in restarted.items())
    for with_optimizer, expected in ((True, continued), (False, restarted)):
        with service.create_training_client_from_state(path, with_optimizer=with_optimizer) as other:
            assert_equal(weights(other), saved)
            step(other)
            assert_equal(weights(other), expected)


def test_a_fresh_session_round_trips(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    path = client.save_state("fresh").result().path
    step(client)
    continued = weights(client)
    client.load_state_with_optimizer(path).result()
    step(client)
    assert_equal(weights(client), continued)


def test_plain_peft_loads_the_adapter_with_equal_logits(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=4, alpha=12, seed=0)
    disturb(client)
    path = client.save_weights_for_sampler("adapter").result().path
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32), path)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT.tokens])).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(PROMPT.length - 1), torch.tensor(PROMPT.tokens[1:])]
    for sampler in (client.save_weights_and_get_sampling_client(), service.create_sampling_client(model_path=path)):
        np.testing.assert_allclose(np.array(sampler.compute_logprobs(PROMPT).result()[1:]), expected, atol=1e-4)
    config = json.loads((Path(path) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 12, random_model)
    assert config["target_modules"] == sorted(config["target_modules"]) and "lm_head" not in config["target_modules"]


def test_plain_transformers_loads_full_parameter_weights(service: LocalService, random_model: str) -> None:
    client = service.create_lora_training_client(random_model, rank=None)
    disturb(client)
    path = client.save_weights_for_sampler("full").result().path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    AutoTokenizer.from_pretrained(path)
    theirs = dict(model.named_parameters())
    assert_equal(weights(client), {name: theirs[name].detach() for name in theirs})
    pinned, loaded = client.save_weights_and_get_sampling_client(), service.create_sampling_client(model_path=path)
    params = SamplingParams(max_tokens=10, seed=0)
    assert pinned.sample(PROMPT, 2, params).result() == loaded.sample(PROMPT, 2, params).result()


def test_a_save_replaces_its_namesake_and_leaves_nothing_else(
    service: LocalService, random_model: str, state_dir: Path
) -> None:
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    client.save_state("again").result()
    step(client)
    path = client.save_state("again").result().path
    assert Path(path) == state_dir / "again"
    files = {file.name for file in Path(path).iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "session.json"}
    assert not [file for file in state_dir.iterdir() if file.name.startswith(".")]
    saved = weights(client)
    step(client)
    client.load_state(path).result()
    assert_equal(weights(client), saved)


def test_saves_that_do_not_fit_are_refused(service: LocalService, random_model: str, tmp_path: Path) -> None:
    client = service.create_lora_training_client(random_model, rank=4, alpha=8, seed=0)
    before = weights(client)
    other = service.create_lora_training_client(random_model, rank=8, alpha=8, seed=0)
    other_rank = other.save_state("rank-8").result().path
    alone = client.save_weights_for_sampler("alone").result().path
    damaged = Path(client.save_state("damaged").result().path)
    (damaged / "session.json").write_text("{")
    for load, message in [
        (lambda: client.load_state(other_rank).result(), "rank is 8, but this session has 4"),
        (lambda: client.load_state_with_optimizer(alone).result(), "no optimizer.safetensors"),
        (lambda: client.load_state(str(tmp_path / "nowhere")).result(), "does not exist"),
        (lambda: client.load_state(str(tmp_path)).result(), "holds no session.json"),
        (lambda: client.load_state(str(damaged)).result(), "session.json cannot be read"),
        (lambda: service.create_training_client_from_state(str(tmp_path)), "holds no session.json"),
        (lambda: service.create_sampling_client(model_path=str(tmp_path)), "holds no session.json"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load()
    assert_equal(weights(client), before)
    for name in ("/absolute", "../outside", "sampler/x", ""):
        with pytest.raises(ConfigError, match="must be a relative path"):
            client.save_state(name)
    with pytest.raises(ConfigError, match="exactly one"):
        service.create_sampling_client(random_model, alone)


def test_stopping_ends_clients_and_removes_the_temporary_folder(random_model: str) -> None:
    service = LocalService(device="cpu")
    client = service.create_lora_training_client(random_model, rank=4, seed=0)
    sampler = client.save_weights_and_get_sampling_client()
    path = Path(client.save_state("x").result().path)
    waiting = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=5))
    service.stop()
    service.stop()
    assert not path.exists()
    with pytest.raises(BackendError, match="stopped"):
        waiting.result(timeout=10)
    for call in (
        lambda: client.optim_step(ADAM),
        lambda: sampler.compute_logprobs(PROMPT),
        lambda: service.create_sampling_client(random_model),
    ):
        with pytest.raises(BackendError, match="stopped"):
            call()
