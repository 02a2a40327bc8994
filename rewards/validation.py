"""Validation of rewards: the gold answer must score 1 and a perturbed answer 0."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from cookbook.core.callables import callable_name
from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, Reward
from cookbook.core.scoring import as_result, call, is_async
from cookbook.core.types import StopReason


@runtime_checkable
class Validated(Protocol):
    """A reward that can be checked against a dataset."""

    def validate(self, examples: Iterable[Example]) -> None:
        """Raises DataError naming the first example with a rejected gold or an accepted perturbed answer."""
        ...


def expect_score(reward: Reward, text: str, example: Example, expected: float, stop_reason: StopReason = "eos") -> None:
    """Raise DataError unless the completion `text` scores exactly `expected`."""
    name = callable_name(reward)
    completion = Completion(text, stop_reason, num_tokens=0)
    # For thousands of plain calls, an event loop for each would take longer than the calls.
    raw = asyncio.run(call(reward, completion, example)) if is_async(reward) else reward(completion, example)
    result = as_result(raw, name)
    if result.value != expected:
        raise DataError(
            f"{name}: {example.id} (gold answer {example.answer[:80]!r}) scores {result.value:g} ({result.status}) "
            f"instead of {expected:g} for {text[-80:]!r}; the answers of the dataset do not work with this reward"
        )
