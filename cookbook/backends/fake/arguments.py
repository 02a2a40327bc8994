"""Arguments of the fake backend's operations: checks, and datums as flat arrays."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import numpy as np

from cookbook.backends.fake.tokenizer import VOCABULARY_SIZE
from cookbook.core.errors import BackendError, DataError
from cookbook.core.types import Datum, ModelInput


def suggest(name: str, choices: Iterable[str]) -> str:
    """What to use instead of an unknown name."""
    close = difflib.get_close_matches(name, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(sorted(choices)) or '(none)'}"


def check_tokens(tokens: ModelInput, what: str) -> None:
    """Raises DataError if there is no token, or one outside the vocabulary."""
    if not tokens.tokens:
        raise DataError(f"{what} is empty; it needs at least one token")
    if not 0 <= min(tokens.tokens) <= max(tokens.tokens) < VOCABULARY_SIZE:
        raise DataError(f"{what} holds a token id outside 0..{VOCABULARY_SIZE - 1}; use this backend's own tokenizer")


def flatten(data: Sequence[Datum], loss_fn: str, required: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The targets of all datums, one after the other: the input token before each, and the inputs of each.

    The inputs are the required ones, `weights` (default 1) and `datum` (its index). The soft targets of a position
    follow one another.
    """
    if not data:
        raise DataError(f"loss_fn {loss_fn!r}: data is empty; give at least one datum")
    columns: dict[str, list[np.ndarray]] = {key: [] for key in (*required, "weights")}
    for index, datum in enumerate(data):
        check_tokens(datum.model_input, f"datum {index}: model_input")
        for key in required:
            if key not in datum.loss_fn_inputs:
                present = sorted(datum.loss_fn_inputs)
                close = difflib.get_close_matches(key, present, n=1)
                hint = (
                    f"did you mean to write {key!r} for {close[0]!r}?"
                    if close
                    else f"it has {', '.join(present) or 'none'}"
                )
                raise DataError(f"datum {index}: loss_fn {loss_fn!r} needs loss_fn_inputs[{key!r}]; {hint}")
            columns[key].append(datum.loss_fn_inputs[key].ravel())
        targets = datum.loss_fn_inputs["target_tokens"]
        columns["weights"].append(datum.loss_fn_inputs.get("weights", np.ones(targets.shape, np.float32)).ravel())
        check_tokens(ModelInput.from_ints(targets.ravel().tolist()), f"datum {index}: target_tokens")
    sizes = [datum.loss_fn_inputs["target_tokens"].size for datum in data]
    previous = np.concatenate(
        [
            np.repeat(datum.model_input.tokens, size // datum.model_input.length)
            for datum, size in zip(data, sizes, strict=True)
        ]
    )
    inputs = {key: np.concatenate(arrays) for key, arrays in columns.items()}
    inputs["datum"] = np.repeat(np.arange(len(data)), sizes)
    return previous, inputs


def split(logprobs: np.ndarray, data: Sequence[Datum]) -> list[dict[str, np.ndarray]]:
    """Per datum its `logprobs`, in the shape of its targets, from those of `flatten`."""
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in data]
    parts = np.split(logprobs.astype(np.float32), np.cumsum([array.size for array in targets])[:-1])
    return [{"logprobs": part.reshape(array.shape)} for part, array in zip(parts, targets, strict=True)]


def check_room(prompt: ModelInput, max_tokens: int, context_length: int | None) -> None:
    """Raises BackendError where the prompt leaves less than `max_tokens` of the context."""
    if context_length is not None and prompt.length + max_tokens > context_length:
        raise BackendError(
            f"sample: the prompt's {prompt.length} tokens and max_tokens {max_tokens} exceed the context of "
            f"{context_length}; shorten the prompt or lower max_tokens"
        )
