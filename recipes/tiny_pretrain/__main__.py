"""`python -m recipes.tiny_pretrain`: tokenizer, weights, measurement and card of the bundled model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.data.word_problems import WordProblems
from recipes.tiny_pretrain.card import Measured, write_card
from recipes.tiny_pretrain.tokenizer import BOS, END, PAD, token_id
from recipes.tiny_pretrain.train import Settings, accuracy, build_model, build_tokenizer, train

THREADS = 1
"""Fixed, since the order of a sum depends on it, and with that the last bits of the weights."""


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=token_id(tokenizer, BOS), eos_token_id=token_id(tokenizer, END), pad_token_id=token_id(tokenizer, PAD)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_pretrain", description="Pretrain the bundled model.")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the weights and of the data (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny_pretrain"), help="folder to write (default %(default)s)")
    arguments = parser.parse_args()

    torch.set_num_threads(THREADS)
    settings = Settings(steps=arguments.steps, seed=arguments.seed)
    tokenizer = build_tokenizer(settings)
    model = build_model(settings, tokenizer)
    started = time.monotonic()
    for step, loss in enumerate(train(model, tokenizer, settings), start=1):
        if step % 50 == 0 or step == settings.steps:
            print(f"step {step:5d}/{settings.steps}  loss {loss:.3f}  {time.monotonic() - started:.0f} s", flush=True)

    held_out = WordProblems().test[:200]
    torch.manual_seed(0)
    measured = Measured(
        parameters=model.num_parameters(),
        examples=len(held_out),
        greedy=accuracy(model, tokenizer, held_out, temperature=0),
        sampled=accuracy(model, tokenizer, held_out, temperature=1),
    )
    save(model, tokenizer, arguments.out)
    write_card(arguments.out, settings, measured)
    print(f"held-out accuracy: greedy {measured.greedy:.3f}, temperature 1 {measured.sampled:.3f}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
