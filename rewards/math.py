"""The GSM8K reward: the number after the last `####` of a completion against the gold number.

Numbers are compared as normalised text, never as floats, so comparison is exact and takes linear time for any number of
digits. All patterns are possessive (no backtracking), so scoring takes time linear in the length of the completion.
docs/rewards.md lists what is read as which number.
"""

from __future__ import annotations

from collections.abc import Iterable

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.core.numbers import ANSWER_MARKER, extract_answer, normalize_number
from cookbook.core.rollouts import Completion, RewardResult
from rewards.final_part import final_part
from rewards.validation import expect_score


class GSM8K:
    """1.0 if the number after the last `####` equals `example.answer`, else 0.0 (Cobbe et al. 2021, arXiv:2110.14168).

    Only the final part of a completion counts (`rewards.final_part`). Status: correct, wrong, or malformed if no number
    follows the last `####`. This holds for truncated completions too.

    Raises:
        DataError: `example.answer` is not a number.
    """

    def __call__(self, completion: Completion, example: Example) -> RewardResult:
        gold = self._gold(example)
        final = final_part(completion.text)
        answer = None if final is None else extract_answer(final)
        if answer is None:
            return RewardResult(0.0, "malformed")
        return RewardResult(1.0, "correct") if answer == gold else RewardResult(0.0, "wrong")

    def check_gold(self, example: Example) -> None:
        """Check that the gold answer is a number. Raises DataError."""
        self._gold(example)

    def _gold(self, example: Example) -> str:
        gold = normalize_number(example.answer)
        if gold is None:
            raise DataError(
                f"rewards.math.GSM8K: gold answer {example.answer[:60]!r} of {example.id} is not a number; "
                "fix the dataset"
            )
        return gold

    def validate(self, examples: Iterable[Example]) -> None:
        """Check that each worked answer scores 1, and 0 with its number changed.

        The worked answer is `example.extra["solution"]`, or `#### <answer>` if that has no marker.

        Raises:
            DataError: naming the first example that fails.
        """
        for example in examples:
            solution = str(example.extra.get("solution", ""))
            if ANSWER_MARKER not in solution:
                solution = f"{ANSWER_MARKER} {example.answer}"
            expect_score(self, solution, example, 1.0)
            expect_score(self, with_changed_number(solution), example, 0.0)


def with_changed_number(solution: str) -> str:
    """`solution` with the last digit of its answer increased by one (9 becomes 0)."""
    answer = extract_answer(solution)
    if answer is None:
        raise DataError(f"no number follows the last {ANSWER_MARKER} of {solution[-80:]!r}")
    worked, _, _ = solution.rpartition(ANSWER_MARKER)
    return f"{worked}{ANSWER_MARKER} {answer[:-1]}{(int(answer[-1]) + 1) % 10}"
