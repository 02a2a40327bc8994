"""The local backend against plain Hugging Face code on the same model, processor and work.

    python benchmarks/local_engine.py [--model NAME] [--prompts 40] [--samples 8] [--max-tokens 80] [--repeats 2]

Sampling peer: `generate(num_return_sequences=...)` on the left-padded prompts, in one call. Training peer: one
right-padded forward of the causal LM over all sequences, logits everywhere, and its backward pass. Both run a LoRA
adapter of rank 32 in float32. Without `--model`, a random Llama of 1.7M parameters with 97 tokens is made.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.backends.base_models import base_model_source
from cookbook.backends.local import LocalService
from cookbook.core.types import Datum, ModelInput, SamplingParams

RANK = 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Peer:
    """Plain transformers + peft on the same model: `generate` and one padded forward and backward pass."""

    def __init__(self, name: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(base_model_source(name), dtype=torch.float32)
        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(model, adapter).eval().to(DEVICE)

    def sample(self, prompts: list[list[int]], num_samples: int, max_tokens: int) -> None:
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=DEVICE)
        settings = {
            "do_sample": True,
            "top_k": 0,
            "num_return_sequences": num_samples,
            "max_new_tokens": max_tokens,
            "pad_token_id": 0,
        }
        with torch.inference_mode():
            self.model.generate(input_ids=input_ids, attention_mask=(input_ids != 0).long(), **settings)

    def forward_backward(self, rows: list[list[int]], starts: list[int]) -> None:
        width = max(map(len, rows))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=DEVICE)
        trained = torch.tensor(
            [[start <= i < len(row) for i in range(width)] for row, start in zip(rows, starts, strict=True)],
            device=DEVICE,
        )
        logits = self.model(input_ids=padded, attention_mask=(padded != 0).long()).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, padded[:, 1:, None])[..., 0]
        (-(logprobs * trained[:, 1:]).sum()).backward()
        self.model.zero_grad(set_to_none=True)


def random_model(folder: str) -> str:
    """Save a random Llama of 1.7M parameters with a character tokenizer."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(code): code - 30 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 6}
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(vocabulary), max_position_embeddings=512, tie_word_embeddings=True, **shape, **special
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def policy_datum(tokens: list[int], start: int) -> Datum:
    """A datum whose tokens from `start` on are trained."""
    trained = np.zeros(len(tokens) - 1, np.float32)
    trained[start - 1 :] = 1
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "weights": trained,
        "advantages": trained,
        "logprobs": -4 * trained,
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def report(what: str, repeats: int, ours: Callable[[], object], peer: Callable[[], object]) -> None:
    """Print the seconds of the fastest repetition of each, and their ratio. The first repetition is not counted."""
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for work, taken in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            work()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    fastest = [min(taken[1:]) for taken in times]
    print(f"{what}: ours {fastest[0]:.2f} s, peer {fastest[1]:.2f} s, {fastest[1] / fastest[0]:.1f}x")


def compare(args: argparse.Namespace, name: str) -> None:
    service = LocalService(device=DEVICE, dtype="float32")
    trainer = service.create_lora_training_client(name, rank=RANK, alpha=2 * RANK, seed=0)
    peer = Peer(name)
    generator = np.random.default_rng(0)
    vocabulary = len(trainer.get_tokenizer())
    prompts = [
        generator.integers(2, vocabulary, length).tolist() for length in generator.integers(40, 120, args.prompts)
    ]
    sampler = trainer.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=args.max_tokens, seed=1)

    def sample() -> list[list[list[int]]]:
        futures = [sampler.sample(ModelInput.from_ints(prompt), args.samples, params) for prompt in prompts]
        return [[sequence.tokens for sequence in future.result().sequences] for future in futures]

    completions = sample()
    rows = [prompt + tokens for prompt, group in zip(prompts, completions, strict=True) for tokens in group]
    starts = [len(prompt) for prompt in prompts for _ in range(args.samples)]
    data = [policy_datum(row, start) for row, start in zip(rows, starts, strict=True)]
    sampled = sum(len(row) - start for row, start in zip(rows, starts, strict=True))
    report(
        f"sampling, {len(rows)} sequences of {sampled} tokens in all",
        args.repeats,
        sample,
        lambda: peer.sample(prompts, args.samples, args.max_tokens),
    )
    report(
        f"forward and backward, {len(rows)} sequences of {sum(map(len, rows))} tokens in all",
        args.repeats,
        lambda: trainer.forward_backward(data, "importance_sampling").result(),
        lambda: peer.forward_backward(rows, starts),
    )
    service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(args, args.model or random_model(folder))


if __name__ == "__main__":
    main()
