"""Evaluation of the bundled model: accuracy on word problems, and the share of programs that pass all tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.core.errors import RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from recipes.tiny_pretrain.train import render_prompt
from rewards.code import CodeReward

MAX_NEW_TOKENS = 96


@torch.no_grad()
def complete(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], temperature: float
) -> list[str]:
    """The completion of each example. Temperature 0 is greedy; others use torch's global random generator."""
    model.eval()
    prompts = [render_prompt(tokenizer, example) for example in examples]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    generate = cast(Any, model).generate  # its type expects attributes that only other architectures have
    output = generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        **sampling,
    )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], temperature: float
) -> float:
    """The share of word problems whose completion ends in "#### answer"."""
    answers = [text.rpartition("#### ")[2] for text in complete(model, tokenizer, examples, temperature)]
    return sum(answer == example.answer for answer, example in zip(answers, examples, strict=True)) / len(examples)


def all_pass(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    temperature: float,
    reward: CodeReward,
) -> float:
    """The share of programs that pass all tests of their example, by running them.

    Raises:
        RewardError: the sandbox failed.
    """
    completions = [Completion(text, "eos", num_tokens=0) for text in complete(model, tokenizer, examples, temperature)]

    async def judge() -> list[RewardResult]:
        return await asyncio.gather(*map(reward, completions, examples))

    statuses = [result.status for result in asyncio.run(judge())]
    if "error" in statuses:
        raise RewardError(
            f"the sandbox failed on {statuses.count('error')} of {len(statuses)} programs; fix it and evaluate again"
        )
    return statuses.count("correct") / len(statuses)
