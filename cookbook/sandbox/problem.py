"""What a programming problem is graded by. Datasets make these, `rewards.code` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cookbook.sandbox.base import Language


@dataclass(frozen=True)
class StdinTests:
    """Each case is the text on stdin and the expected stdout.

    Lines are compared without trailing whitespace, then token by token; tokens that are numbers may differ by
    `float_tolerance` (absolute or relative) where it is given. A `checker` replaces the comparison: a Python program that reads the
    files `input.txt`, `expected.txt` and `output.txt`, and exits with status 0 to accept, 1 to refuse.
    """

    cases: tuple[tuple[str, str], ...]
    float_tolerance: float | None = None
    checker: str | None = None


@dataclass(frozen=True)
class CallTests:
    """Each case is the arguments for a function, or for a method of class `Solution`, and the value expected of it: JSON values all."""

    function_name: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]
    float_tolerance: float | None = None


@dataclass(frozen=True)
class AssertTests:
    """Python statements that raise unless the program is right (MBPP, HumanEval).

    `functions` are the program's; every call of one is answered by the program's own process. `setup` and the tests run apart from it.
    """

    tests: tuple[str, ...]
    functions: tuple[str, ...]
    setup: str = ""


@dataclass(frozen=True)
class CodeProblem:
    """How the programs for an example are run and judged; it is `example.extra["problem"]`.

    `time_limit_s` is CPU time per test, `memory_limit_mb` resident memory; None leaves both to the reward's own limits.
    `prelude` stands before the program (imports that the problem promises). An example's gold program, where known, is
    `example.extra["solution"]`, and its language `example.extra["solution_language"]` (default python).
    """

    tests: StdinTests | CallTests | AssertTests
    language: Language = "python"
    prelude: str = ""
    time_limit_s: float | None = None
    memory_limit_mb: int | None = None

    @property
    def num_tests(self) -> int:
        return len(self.tests.tests if isinstance(self.tests, AssertTests) else self.tests.cases)
