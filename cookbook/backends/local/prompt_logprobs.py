"""Logprobs of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from cookbook.backends.local.model import (
    hidden_states,
    microbatches,
    output_layer,
    right_padded,
    token_logprobs,
)
from cookbook.backends.local.weights import PinnedWeights

_TOPK_POSITIONS = 512


@dataclass(eq=False)
class LogprobRequest:
    """One `compute_logprobs` call."""

    pinned: Future[PinnedWeights]
    prompt: tuple[int, ...]
    future: Future[list[float | None]] = field(default_factory=Future)


@torch.inference_mode()
def prompt_logprobs(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], token_budget: int
) -> list[list[float | None]]:
    """Per prompt, the logprob (temperature 1) of each token given those before it; the first is None."""
    answers: list[list[float | None]] = [[None] for _ in prompts]
    scored = [index for index, prompt in enumerate(prompts) if len(prompt) > 1]
    for batch in microbatches([len(prompts[index]) for index in scored], token_budget):
        chosen = [scored[item] for item in batch]
        input_ids = right_padded([prompts[index] for index in chosen], model.device)
        lengths = [len(prompts[index]) for index in chosen]
        starts = [row * input_ids.shape[1] for row in range(len(chosen))]
        predicting = [
            start + offset for start, length in zip(starts, lengths, strict=True) for offset in range(length - 1)
        ]
        positions = torch.tensor(predicting, device=model.device)
        targets = input_ids.flatten()[positions + 1]
        values = token_logprobs(model, input_ids, positions, targets).tolist()
        for index, length in zip(chosen, lengths, strict=True):
            answers[index].extend(values[: length - 1])
            values = values[length - 1 :]
    return answers


@torch.inference_mode()
def topk_prompt_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], k: int
) -> list[list[tuple[int, float]] | None]:
    """Per prompt token, the k likeliest tokens there with their logprobs, likeliest first; the first entry is None."""
    hidden = hidden_states(model, torch.tensor([prompt], device=model.device))[0, :-1]
    head = output_layer(model)
    answers: list[list[tuple[int, float]] | None] = [None]
    for part in hidden.split(_TOPK_POSITIONS):
        logprobs, tokens = head(part).float().log_softmax(-1).topk(k)
        answers.extend(
            list(zip(row, values, strict=True)) for row, values in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        )
    return answers
