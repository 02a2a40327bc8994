"""The GSM8K reward: the number after the last `####` of a completion against the gold number.

Numbers are compared as normalised text, never as floats, so `0.1` is exactly `0.1` and a number of a million digits costs
a million steps and no more. Every pattern here is possessive (no backtracking): scoring takes time linear in the completion.
docs/rewards.md lists what is read as which number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from cookbook.errors import DataError
from cookbook.types import Completion, Example, RewardResult
from rewards.validation import expect_score

ANSWER_MARKER = "####"

# Fullwidth forms are what models write among Chinese or Japanese text; the dashes are what they write for a minus sign.
_TO_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_TO_ASCII |= dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), ord("-"))

_NUMBER = re.compile(
    r"""
    [\s*_`\\$€£¥₹]*+                # white space, markdown emphasis, currency, an escaped \$
    (?P<sign>[+-])?+
    [\\$€£¥₹]*+                     # -$5
    (?P<integer>[0-9]++(?:,[0-9]++)*+)?+
    (?:\.(?P<fraction>[0-9]++))?+
    """,
    re.VERBOSE,
)

# What makes the digits just read a part of something else: 1.2.3, 12:30, 1e3, 5_000, 3/4, 10 - 3, 5 x 3, 1 000.
_CONTINUATION = re.compile(r"(?:[.,:'\u2019_]|[eE][+-]?|[^\S\r\n]*+(?:[-+*/^\u00d7\u00f7xX][^\S\r\n]*+)?+)\d")


def normalize_number(text: str) -> str | None:
    """The number that `text` begins with, in its one canonical spelling (`-1234.5`); None where there is none.

    Canonical: no `+`, no commas, no leading zeros, no trailing zeros after the point, no `-0`.
    """
    text = text.translate(_TO_ASCII)
    match = _NUMBER.match(text)
    if match is None or _CONTINUATION.match(text, match.end()):
        return None
    integer, fraction = match["integer"] or "", match["fraction"] or ""
    if not (integer or fraction) or not _commas_separate_thousands(integer):
        return None
    integer = integer.replace(",", "").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    number = f"{integer}.{fraction}" if fraction else integer
    return f"-{number}" if match["sign"] == "-" and number != "0" else number


def _commas_separate_thousands(integer: str) -> bool:
    """True for 1,234,567 and the Indian 12,34,567; False for 1,5 and 3,4,5, which mean something else."""
    first, *groups = integer.split(",")
    if not groups:
        return True
    return len(first) <= 3 and len(groups[-1]) == 3 and all(len(group) in (2, 3) for group in groups)


def extract_answer(text: str) -> str | None:
    """The number after the last `####` of `text`, normalised; None where no number follows it directly."""
    _, marker, tail = text.rpartition(ANSWER_MARKER)
    return normalize_number(tail) if marker else None


class GSM8K:
    """1.0 when the number after the last `####` equals `example.answer`, else 0.0 (Cobbe et al. 2021, arXiv:2110.14168).

    Status: correct, wrong, or malformed where no number follows the last `####`. A truncated completion is judged by the same rule.

    Raises:
        DataError: `example.answer` is not a number.
    """

    def __call__(self, completion: Completion, example: Example) -> RewardResult:
        gold = normalize_number(example.answer)
        if gold is None:
            raise DataError(f"rewards.math.GSM8K: gold answer {example.answer[:60]!r} of {example.id} is not a number; mend the dataset")
        answer = extract_answer(completion.text)
        if answer is None:
            return RewardResult(0.0, "malformed")
        return RewardResult(1.0, "correct") if answer == gold else RewardResult(0.0, "wrong")

    def validate(self, examples: Iterable[Example]) -> None:
        """Check that each worked answer (`example.extra["solution"]`, or `#### <answer>` where it has no marker) scores 1,
        and 0 with its number changed.

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
    """`solution` with the last digit of its answer raised by one (9 becomes 0)."""
    answer = extract_answer(solution)
    if answer is None:
        raise DataError(f"no number follows the last {ANSWER_MARKER} of {solution[-80:]!r}")
    worked, _, _ = solution.rpartition(ANSWER_MARKER)
    return f"{worked}{ANSWER_MARKER} {answer[:-1]}{(int(answer[-1]) + 1) % 10}"
