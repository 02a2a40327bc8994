"""Positions that depend on a sequence's length: longrope stays within its original context, dynamic scaling within the
model's, whatever else is in the batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cookbook.backends.local import LocalService
from cookbook.core.errors import BackendError, DataError
from cookbook.core.types import Datum, ModelInput, SamplingParams
from tests.backends.architectures import save_architecture
from tests.backends.local_model import random_tokens, save_tokenizer


def save_dynamic(folder: Path) -> str:
    """A Llama with dynamic scaling of its rotary positions beyond 32."""
    save_tokenizer(folder)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["longrope", "dynamic"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save_dynamic(tmp_path) if request.param == "dynamic" else save_architecture("phi3-longrope", tmp_path)


def test_a_finished_row_does_not_change_the_others(folder: str) -> None:
    """A long prompt's row ends early and stays in the batch, where its positions would run past the context."""
    service = LocalService(device="cpu")
    sampler = service.create_sampling_client(base_model=folder)
    short, long = (ModelInput.from_ints(random_tokens(seed, length)) for seed, length in ((0, 3), (1, 30)))
    params = SamplingParams(max_tokens=29, seed=0)
    alone = sampler.sample(short, 7, params).result().sequences
    futures = sampler.sample(long, 1, SamplingParams(max_tokens=2, seed=0)), sampler.sample(short, 7, params)
    together = futures[1].result().sequences
    assert any(len(sequence.tokens) > 20 for sequence in alone)
    for first, second in zip(alone, together, strict=True):
        assert first.tokens == second.tokens
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence in together:
        tokens = [*short.tokens, *sequence.tokens]
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = logprobs[torch.arange(2, len(tokens) - 1), torch.tensor(sequence.tokens)]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)
    service.stop()


def test_what_is_longer_than_the_original_context_is_refused(folder: str) -> None:
    service = LocalService(device="cpu")
    client = service.create_lora_training_client(folder, rank=4, seed=0)
    sampler = client.save_weights_and_get_sampling_client()
    tokens = random_tokens(0, 34)
    note = r" is 32 \(of 64: .*longrope" if "longrope" in (Path(folder) / "config.json").read_text() else " is 32"
    with pytest.raises(DataError, match=f"has 33 tokens; the context of .*{note}"):
        client.forward(
            [Datum(ModelInput.from_ints(tokens[:33]), {"target_tokens": tokens[1:]})], "cross_entropy"
        ).result()
    with pytest.raises(BackendError, match=r"30 tokens and max_tokens 3 exceed the context of .*, 32.*to 2"):
        sampler.sample(ModelInput.from_ints(tokens[:30]), 1, SamplingParams(max_tokens=3)).result()
    assert len(sampler.compute_logprobs(ModelInput.from_ints(tokens[:32])).result()) == 32
    service.stop()
