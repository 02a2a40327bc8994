"""Helpers of the local backend's tests: a small random model with a character tokenizer, datums, and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.backends.local.clients import LocalTrainingClient
from cookbook.core.types import AdamParams, Datum, ModelInput

EOS = 1
CONTEXT = 192


def save_tokenizer(folder: Path) -> int:
    """A tokenizer of characters. Returns the size of its vocabulary."""
    vocabulary = {"<pad>": 0, "<eos>": EOS} | {chr(code): code - 30 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return len(vocabulary)


def save_random_model(folder: Path) -> str:
    """A Llama with grouped-query attention and weights large enough for sharp distributions. Returns the folder."""
    shape = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    special = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=save_tokenizer(folder),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.25,
        **shape,
        **special,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def random_tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 97, length).tolist()


def policy_data(seed: int = 0) -> list[Datum]:
    """Nine datums of different lengths with prompts of weight zero; datum 3 has advantage zero, datum 5 only weight
    zero."""
    generator = np.random.default_rng(seed)
    data = []
    for index, length in enumerate([7, 31, 18, 12, 5, 9, 40, 23, 2]):
        weights = generator.uniform(0.5, 1.5, length) * (np.arange(length) >= length // 3) * (index != 5)
        inputs = {
            "target_tokens": generator.integers(2, 97, length),
            "weights": weights,
            "advantages": np.full(length, generator.normal() * (index != 3)),
            "logprobs": -generator.exponential(4, length),
        }
        data.append(Datum(ModelInput.from_ints(generator.integers(2, 97, length).tolist()), inputs))
    return data


def soft_data() -> list[Datum]:
    """Seven datums, every second with soft targets, of 1 to 6 per position: weights of both signs, whole positions and
    the last targets of others of weight zero, one datum with only weight zero, one without weights."""
    generator = np.random.default_rng(0)
    data = []
    for length, shape in [(7, (3,)), (31, ()), (18, (6,)), (12, ()), (5, (4,)), (9, ()), (40, (1,))]:
        weights = generator.normal(0.2, 1, (length, *shape)).astype(np.float32)
        weights[::3] = 0
        if shape == (6,):
            weights[:, 4:] = 0
            weights[5, :3] = 0
        inputs = {"target_tokens": generator.integers(2, 97, (length, *shape)), "weights": weights * (length != 9)}
        if length == 5:
            del inputs["weights"]
        data.append(Datum(ModelInput.from_ints(generator.integers(2, 97, length).tolist()), inputs))
    return data


def trained_weights(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    """The trained parameters, by name."""
    assert client._session is not None
    return {name: values.detach().clone() for name, values in client._session.weights.parameters.items()}


def accumulated_gradient(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    """What has accumulated since the last step, by parameter name."""
    session = client._session
    assert session is not None and session._gradient is not None
    return dict(zip(session.weights.parameters, session._gradient, strict=True))


def gradient_gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm."""
    flat = [torch.cat([values.flatten().double() for values in gradient.values()]) for gradient in (first, second)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


def disturb(client: LocalTrainingClient, seed: int = 5, steps: int = 2) -> None:
    """Move a new adapter away from the base model: its B matrices start at zero."""
    for step in range(steps):
        client.forward_backward(policy_data(seed + step), "cross_entropy")
        client.optim_step(AdamParams(learning_rate=2e-2)).result()
