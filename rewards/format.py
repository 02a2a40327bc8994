"""Rewards for the format of a completion, independent of its answer."""

from __future__ import annotations

from collections.abc import Iterable

import regex

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from rewards.validation import expect_score

_GOOD = RewardResult(1.0, "correct")
_BAD = RewardResult(0.0, "malformed")


class EndsProperly:
    """1.0 if the completion ended with a stop token or stop string, 0.0 if it was truncated at `max_tokens`."""

    def __call__(self, completion: Completion, example: Example) -> RewardResult:
        return _BAD if completion.stop_reason == "length" else _GOOD

    def validate(self, examples: Iterable[Example]) -> None:
        """Check that a complete answer scores 1 and a truncated one 0. Raises DataError."""
        for example in examples:
            expect_score(self, example.answer, example, 1.0, stop_reason="eos")
            expect_score(self, example.answer, example, 0.0, stop_reason="length")


class MatchesPattern:
    """1.0 if the whole completion, stripped of white space, matches the regular expression `pattern`, else 0.0.

    The syntax is that of the regex package, a superset of Python's `re`; `(?s:.*)` matches across lines. Matching stops
    with 0.0 after about `timeout_s` seconds of computing: a pattern with nested repeats can take exponential time on a
    hostile completion. Patterns that take linear time (possessive repeats such as `.*+`) never reach the limit.

    Raises:
        ConfigError: `pattern` is not a regular expression, or `timeout_s` is not positive.
    """

    def __init__(self, pattern: str, timeout_s: float = 1.0) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"rewards.format.MatchesPattern: timeout_s={timeout_s}: must be more than 0")
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(
                f"rewards.format.MatchesPattern: pattern={pattern!r} is not a regular expression: {error}"
            ) from error
        self._timeout_s = timeout_s

    def __call__(self, completion: Completion, example: Example) -> RewardResult:
        try:
            # concurrent=True releases the interpreter lock, so that a slow match does not block other threads.
            matches = self._pattern.fullmatch(completion.text.strip(), timeout=self._timeout_s, concurrent=True)
        except TimeoutError:
            return _BAD
        return _BAD if matches is None else _GOOD

    def validate(self, examples: Iterable[Example]) -> None:
        """Check that each worked answer (`extra["solution"]`) matches and an empty text does not. Raises DataError."""
        for example in examples:
            if "solution" not in example.extra:
                raise DataError(
                    f"rewards.format.MatchesPattern: {example.id} has no worked answer (extra['solution']) to check; "
                    "validate with a dataset that has worked answers"
                )
            expect_score(self, str(example.extra["solution"]), example, 1.0)
            expect_score(self, "", example, 0.0)
