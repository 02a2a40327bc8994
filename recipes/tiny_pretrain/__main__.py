"""Pretrains the bundled model (`python -m recipes.tiny_pretrain`): tokenizer, weights, evaluation and card."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.data.generated.tiny_programs import TinyPrograms
from cookbook.data.generated.word_problems import WordProblems
from cookbook.sandbox.local import LocalSandbox
from recipes.tiny_pretrain.card import Measured, write_card
from recipes.tiny_pretrain.measure import accuracy, all_pass
from recipes.tiny_pretrain.tokenizer import BOS, END, PAD, token_id
from recipes.tiny_pretrain.train import Settings, build_model, build_tokenizer, train
from rewards.code import CodeReward

THREADS = 1
"""Fixed, since the order of sums, and so the last bits of the weights, depend on it."""

MEASURED = 200
"""Held-out examples of each kind."""


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_pretrain", description="Pretrain the bundled model.")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (default %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, help="of the weights and of the data (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/tiny_pretrain"), help="folder to write (default %(default)s)"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(THREADS)
    settings = Settings(steps=arguments.steps, seed=arguments.seed)
    tokenizer = build_tokenizer(settings)
    model = build_model(settings, tokenizer)
    started = time.monotonic()
    for step, loss in enumerate(train(model, tokenizer, settings), start=1):
        if step % 50 == 0 or step == settings.steps:
            print(f"step {step:5d}/{settings.steps}  loss {loss:.3f}  {time.monotonic() - started:.0f} s", flush=True)

    words, programs = WordProblems().test[:MEASURED], TinyPrograms().test[:MEASURED]
    reward = CodeReward(sandbox=LocalSandbox())
    torch.manual_seed(0)
    measured = Measured(
        parameters=model.num_parameters(),
        examples=MEASURED,
        words_greedy=accuracy(model, tokenizer, words, temperature=0),
        words_sampled=accuracy(model, tokenizer, words, temperature=1),
        programs_greedy=all_pass(model, tokenizer, programs, temperature=0, reward=reward),
        programs_sampled=all_pass(model, tokenizer, programs, temperature=1, reward=reward),
    )
    save(model, tokenizer, arguments.out)
    write_card(arguments.out, settings, measured)
    print(f"word problems: greedy {measured.words_greedy:.3f}, temperature 1 {measured.words_sampled:.3f}")
    print(f"programs: greedy {measured.programs_greedy:.3f}, temperature 1 {measured.programs_sampled:.3f}")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
