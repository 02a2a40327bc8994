"""A bfloat16 base model: a policy that has not been trained is its own reference, and small steps are not lost."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cookbook.backends.local import LocalService
from cookbook.core.types import AdamParams, Datum, ModelInput
from cookbook.data.generated.courtesy import Courtesy
from cookbook.loops import preference
from cookbook.loops.config import CheckpointConfig, EvalConfig, LoraConfig, ModelConfig, RunConfig
from cookbook.losses.preference import DPO
from cookbook.tracking import NoLogger
from tests.backends.local_model import accumulated_gradient, gradient_gap, policy_data, random_tokens, trained_weights
from tests.loops.harness import metric_lines, summary


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    service = LocalService(device="cpu", dtype="bfloat16", state_dir=str(tmp_path / "state"))
    yield service
    service.stop()


@pytest.mark.parametrize("rank", [4, None])
def test_a_preference_run_begins_at_its_reference(tmp_path: Path, service: LocalService, rank: int | None) -> None:
    config = RunConfig(
        recipe="test",
        run_dir=str(tmp_path / "run"),
        model=ModelConfig(name="tiny"),
        lora=LoraConfig(rank=rank),
        optim=AdamParams(learning_rate=1e-3),
        loop=preference.PreferenceConfig(steps=1, batch_size=8, max_length=512),
        eval=EvalConfig(examples=12),
        checkpoint=CheckpointConfig(),
        backend={"_target_": "cookbook.backends.local.LocalService"},
        dataset={"_target_": "cookbook.data.generated.courtesy.Courtesy"},
        logger={},
    )
    preference.run(config, preference.Components(service, NoLogger(), Courtesy(train_size=8, test_size=12), DPO()))
    before = summary(tmp_path / "run")["eval"]["before"]
    assert (before["accuracy"], before["margin"], before["kl_reference"]) == (0.5, 0.0, 0.0)
    first = next(line for line in metric_lines(tmp_path / "run") if "accuracy/train" in line)
    assert (first["accuracy/train"], first["kl_reference/train"]) == (0.5, 0.0)


@pytest.mark.parametrize("rank", [4, None])
def test_forward_and_reference_agree(service: LocalService, random_model: str, rank: int | None) -> None:
    client = service.create_lora_training_client(random_model, rank=rank, alpha=8, seed=0)
    samplers = service.create_sampling_client(base_model=random_model), client.save_weights_and_get_sampling_client()
    prompts = [random_tokens(seed, length) for seed, length in enumerate([30, 12, 25])]
    data = [Datum(ModelInput.from_ints(prompt[:-1]), {"target_tokens": prompt[1:]}) for prompt in prompts]
    forward = client.forward(data, "cross_entropy").result().loss_fn_outputs
    for sampler in samplers:
        futures = [sampler.compute_logprobs(ModelInput.from_ints(prompt)) for prompt in prompts]
        for output, future in zip(forward, futures, strict=True):
            np.testing.assert_array_equal(output["logprobs"], np.array(future.result()[1:], np.float32))


def test_full_parameter_steps_add_up_in_float32(service: LocalService, random_model: str, tmp_path: Path) -> None:
    """Steps far below the resolution of bfloat16 add up, are saved in float32, and resume exactly."""
    client = service.create_lora_training_client(random_model, rank=None)
    before = trained_weights(client)
    for seed in range(3):
        client.forward_backward(policy_data(seed), "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-6)).result()
    after = trained_weights(client)
    moved = {key: (values - before[key]).abs() for key, values in after.items()}
    assert all(values.dtype == torch.float32 for values in after.values())
    assert max(float(values.max()) for values in moved.values()) < 1e-5
    assert float(torch.cat([(values > 0).flatten() for values in moved.values()]).float().mean()) > 0.9
    path = client.save_state("state").result().path
    saved = AutoModelForCausalLM.from_pretrained(path)
    for key, values in dict(saved.named_parameters()).items():
        assert torch.equal(values.detach(), after[key]), key
    resumed = service.create_training_client_from_state(path, with_optimizer=True)
    for each in (client, resumed):
        each.forward_backward(policy_data(5), "cross_entropy")
        each.optim_step(AdamParams(learning_rate=1e-3)).result()
    for key, values in trained_weights(client).items():
        assert torch.equal(values, trained_weights(resumed)[key]), key
    samplers = client.save_weights_and_get_sampling_client(), resumed.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(random_tokens(0, 20))
    assert samplers[0].compute_logprobs(prompt).result() == samplers[1].compute_logprobs(prompt).result()


def test_gradients_of_micro_batches_are_summed_in_float32(random_model: str) -> None:
    gradients = []
    for dtype, token_budget in (("float32", 4096), ("bfloat16", 4096), ("bfloat16", 1)):
        service = LocalService(device="cpu", dtype=dtype, token_budget=token_budget)
        client = service.create_lora_training_client(random_model, rank=None)
        client.forward_backward(policy_data(), "cross_entropy").result()
        gradients.append(accumulated_gradient(client))
        assert all(values.dtype == torch.float32 for values in gradients[-1].values())
        service.stop()
    assert gradient_gap(gradients[0], gradients[1]) < 0.1
    assert gradient_gap(gradients[0], gradients[2]) < 0.1
