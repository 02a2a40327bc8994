"""Logprobs of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from cookbook.backends.local.model import (
    hidden_states,
    logits_function,
    microbatches,
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
    # Nothing is predicted from the last token: without it the batches are those of a forward pass over the same tokens.
    for batch in microbatches([len(prompts[index]) - 1 for index in scored], token_budget):
        chosen = [prompts[scored[item]] for item in batch]
        input_ids = right_padded([prompt[:-1] for prompt in chosen], model.device)
        width = input_ids.shape[1]
        positions = [row * width + offset for row, prompt in enumerate(chosen) for offset in range(len(prompt) - 1)]
        targets = [token for prompt in chosen for token in prompt[1:]]
        flat_positions, flat_targets = (torch.tensor(values, device=model.device) for values in (positions, targets))
        values = token_logprobs(model, input_ids, flat_positions, flat_targets).tolist()
        for item, prompt in zip(batch, chosen, strict=True):
            answers[scored[item]].extend(values[: len(prompt) - 1])
            values = values[len(prompt) - 1 :]
    return answers


@torch.inference_mode()
def topk_prompt_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], k: int
) -> list[list[tuple[int, float]] | None]:
    """Per prompt token, the k likeliest tokens there with their logprobs, likeliest first; the first entry is None."""
    if len(prompt) == 1:
        return [None]
    hidden = hidden_states(model, torch.tensor([prompt[:-1]], device=model.device))[0]
    logits = logits_function(model)
    answers: list[list[tuple[int, float]] | None] = [None]
    for part in hidden.split(_TOPK_POSITIONS):
        logprobs, tokens = logits(part).float().log_softmax(-1).topk(k)
        answers.extend(
            list(zip(row, values, strict=True)) for row, values in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        )
    return answers
