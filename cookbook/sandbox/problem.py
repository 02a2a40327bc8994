"""Programming problems: the tests by which a program is judged. Datasets build them, `rewards.code` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cookbook.sandbox.base import Language


@dataclass(frozen=True)
class StdinTests:
    """Each case is the text on stdin and the expected stdout.

    Outputs are compared token by token; tokens that are numbers may differ by `float_tolerance` (absolute or relative)
    if it is set. A `checker` replaces the comparison: a Python program that reads the files `input.txt`, `expected.txt`
    and `output.txt`, and exits with status 0 to accept, 1 to reject.
    """

    cases: tuple[tuple[str, str], ...]
    float_tolerance: float | None = None
    checker: str | None = None


@dataclass(frozen=True)
class CallTests:
    """Each case is the arguments of a function, or a method of class `Solution`, and the expected value; all JSON."""

    function_name: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]
    float_tolerance: float | None = None


@dataclass(frozen=True)
class AssertTests:
    """Python statements that raise unless the program is correct (MBPP, HumanEval).

    `functions` are those of the program; its own process answers every call of one. `setup` and the tests run in
    another process.
    """

    tests: tuple[str, ...]
    functions: tuple[str, ...]
    setup: str = ""


@dataclass(frozen=True)
class CodeProblem:
    """How the programs for an example are run and judged; stored in `example.extra["problem"]`.

    `time_limit_s` is CPU time per test, `memory_limit_mb` resident memory; None means the limits of the reward.
    `prelude` is inserted before the program (imports that the problem promises). The gold program of an example, if
    known, is `example.extra["solution"]`, and its language `example.extra["solution_language"]` (default python).
    """

    tests: StdinTests | CallTests | AssertTests
    language: Language = "python"
    prelude: str = ""
    time_limit_s: float | None = None
    memory_limit_mb: int | None = None

    @property
    def num_tests(self) -> int:
        return len(self.tests.tests if isinstance(self.tests, AssertTests) else self.tests.cases)
