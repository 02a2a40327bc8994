"""One matrix over architectures: what an adapter covers, and that sampler, trainer, batches, exports and resumed
sessions agree with one another and with plain transformers and peft.

Left out: models with layers other than attention (Mamba, linear attention, convolutions) or with chunked attention
(Llama 4), whose caches the sampler does not have; models with experts outside transformers' common interface (JetMoe,
LongCat-Flash), which have no adapter here; Laguna, of whose adapters peft renames some tensors when it loads them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from cookbook.backends.local import LocalService
from cookbook.backends.local.clients import LocalTrainingClient
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams
from tests.backends.architectures import ARCHITECTURES, save_architecture
from tests.backends.local_model import accumulated_gradient, gradient_gap, random_tokens, trained_weights

ROUTERS = ("router", ".gate.", "shared_expert_gate", "lm_head")
PROMPTS = [ModelInput.from_ints(random_tokens(seed, length)) for seed, length in enumerate([3, 17, 9])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save_architecture(name, tmp_path_factory.mktemp(name)) for name in ARCHITECTURES}


@pytest.fixture(params=list(ARCHITECTURES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    service = LocalService(device="cpu", dtype="float32", state_dir=str(tmp_path))
    yield service
    service.stop()


def data(seed: int) -> list[Datum]:
    generator = np.random.default_rng(seed)
    lengths = [5, 26, 17, 9]
    return [
        Datum(
            ModelInput.from_ints(generator.integers(2, 97, length).tolist()),
            {
                "target_tokens": generator.integers(2, 97, length),
                "weights": generator.uniform(0.5, 1.5, length) * (np.arange(length) >= length // 3),
            },
        )
        for length in lengths
    ]


def step(client: LocalTrainingClient, seed: int) -> None:
    client.forward_backward(data(seed), "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-2)).result()


def plain_logprobs(model: nn.Module, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].float() / temperature
    chosen = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    return chosen.numpy()


def test_an_adapter_covers_all_but_routers_and_the_output_layer(
    name: str, folders: dict[str, str], service: LocalService
) -> None:
    architecture = ARCHITECTURES[name]
    client = service.create_lora_training_client(folders[name], rank=4, alpha=8, seed=0)
    weights = trained_weights(client)
    adapted = {key.partition(".lora_")[0] for key in weights}
    plain = AutoModelForCausalLM.from_pretrained(folders[name])
    for key, module in plain.named_modules():
        full = f"base_model.model.{key}"
        if isinstance(module, nn.Linear):
            assert (full in adapted) != any(word in f"{full}." for word in ROUTERS), key
        elif key.endswith(".experts"):
            assert {full, f"{full}.base_layer"} <= adapted, key
    assert all(any(part in key for key in adapted) for part in architecture.shared)
    assert not any(word in f"{key}." for key in adapted for word in ROUTERS)
    summary = client.trainable
    assert summary.trained == sum(values.numel() for values in weights.values())
    assert summary.total == summary.trained + sum(values.numel() for values in plain.parameters())
    expected = {
        "attention",
        *(["experts"] if architecture.experts else ["mlp"]),
        *(["mlp"] * bool(architecture.shared)),
    }
    assert set(summary.kinds) == expected
    before = {key: values.clone() for key, values in weights.items()}
    for seed in range(2):
        step(client, seed)
    for key, values in trained_weights(client).items():
        assert values.isfinite().all() and not torch.equal(values, before[key]), key


def test_sampler_trainer_and_plain_peft_agree(name: str, folders: dict[str, str], service: LocalService) -> None:
    client = service.create_lora_training_client(folders[name], rank=4, alpha=8, seed=0)
    untrained = client.save_weights_and_get_sampling_client().compute_logprobs(PROMPTS[1]).result()
    for seed in range(2):
        step(client, seed)
    exported = client.save_weights_for_sampler("export").result().path
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32), exported
    )
    samplers = client.save_weights_and_get_sampling_client(), service.create_sampling_client(model_path=exported)
    settings = [SamplingParams(max_tokens=12, temperature=0.8, seed=seed) for seed in range(len(PROMPTS))]
    futures = [samplers[0].sample(prompt, 2, params) for prompt, params in zip(PROMPTS, settings, strict=True)]
    for prompt, future in zip(PROMPTS, futures, strict=True):
        for sequence in future.result().sequences:
            tokens = [*prompt.tokens, *sequence.tokens]
            datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
            forward = client.forward([datum], "cross_entropy", {"temperature": 0.8}).result()
            ours = forward.loss_fn_outputs[0]["logprobs"]
            np.testing.assert_allclose(plain_logprobs(plain, tokens, 0.8), ours, atol=1e-4)
            np.testing.assert_allclose(sequence.logprobs, ours[prompt.length - 1 :], atol=1e-4)
    for sampler in samplers:
        computed = np.array(sampler.compute_logprobs(PROMPTS[1]).result()[1:])
        np.testing.assert_allclose(computed, plain_logprobs(plain, list(PROMPTS[1].tokens)), atol=1e-4)
        assert np.abs(computed - np.array(untrained[1:])).max() > 1e-2


def test_gradients_do_not_depend_on_batches_and_sessions_resume_exactly(
    name: str, folders: dict[str, str], service: LocalService
) -> None:
    client = service.create_lora_training_client(folders[name], rank=4, alpha=8, seed=0)
    for seed in range(2):
        step(client, seed)
    path = client.save_state("state").result().path
    one_by_one = LocalService(device="cpu", dtype="float32", token_budget=1)
    other = one_by_one.create_training_client_from_state(path)
    gradients = []
    for each in (client, other):
        each.forward_backward(data(2), "cross_entropy").result()
        gradients.append(accumulated_gradient(each))
    assert gradient_gap(*gradients) < 1e-4
    one_by_one.stop()
    client.optim_step(AdamParams(learning_rate=1e-2)).result()
    resumed = service.create_training_client_from_state(path, with_optimizer=True)
    step(resumed, 2)
    for key, values in trained_weights(client).items():
        assert torch.equal(values, trained_weights(resumed)[key]), key
