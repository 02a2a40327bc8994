"""The code reward: runs the program of a completion against the tests of its example, in a sandbox."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, Metrics, RewardResult
from cookbook.sandbox.base import Language, Sandbox
from cookbook.sandbox.problem import CodeProblem, StdinTests
from rewards.code_cache import SharedResults
from rewards.code_extract import extract_program, parse_python
from rewards.code_imports import missing_modules
from rewards.code_judge import Judge, Outcome, TestStatus

_SILENT: dict[Language, str] = {
    "python": "pass\n",
    "cpp": "int main() {}\n",
    "java": "public class Main { public static void main(String[] args) {} }\n",
    "go": "package main\n\nfunc main() {}\n",
    "rust": "fn main() {}\n",
    "javascript": "process.exitCode = 0\n",
}
"""Programs that print nothing."""


class CodeReward:
    """1.0 if the program in a completion passes all tests of its example, else 0.0; or the share passed.

    The example's `extra["problem"]` is a `cookbook.sandbox.problem.CodeProblem`. `format_weight` is added, whatever the
    tests say, if the program is in a closed code block that is tagged with the language. In mode "fraction" all tests
    run; in mode "all" they stop at the first failure unless `stop_at_first_failure` is false. `time_limit_s` (CPU time)
    and `memory_limit_mb` hold for one test, unless the problem has its own limits; the limit of wall time is
    `wall_factor` times that of CPU time. The first test runs alone, the others `parallel_tests` at a time.

    Status: correct, partial (some tests passed, mode "fraction"), wrong, malformed if there is no program, and error if
    the sandbox failed. `details` has the status of each test that ran, the index of the first failed test, and a line
    about it. The same program for the same example runs once; the last `remembered` results are kept.

    Raises:
        ConfigError: no sandbox, or a setting is out of range.
        DataError: an example has no problem, its tests are broken, or the sandbox does not support its language.
    """

    def __init__(
        self,
        *,
        sandbox: Sandbox | None,
        mode: Literal["all", "fraction"] = "all",
        format_weight: float = 0.0,
        stop_at_first_failure: bool = True,
        time_limit_s: float = 4.0,
        memory_limit_mb: int = 512,
        wall_factor: float = 3.0,
        parallel_tests: int = 4,
        remembered: int = 4096,
    ) -> None:
        if sandbox is None:
            raise ConfigError(
                "rewards.code.CodeReward: there is no sandbox to run programs; choose one, such as sandbox=local"
            )
        if mode not in ("all", "fraction"):
            raise ConfigError(f"rewards.code.CodeReward: mode={mode}: must be all or fraction")
        if not 0 <= format_weight <= 1:
            raise ConfigError(f"rewards.code.CodeReward: format_weight={format_weight}: must be between 0 and 1")
        for name, value in (("time_limit_s", time_limit_s), ("memory_limit_mb", memory_limit_mb)):
            if not value > 0:
                raise ConfigError(f"rewards.code.CodeReward: {name}={value}: must be more than 0")
        for name, value in (
            ("wall_factor", wall_factor),
            ("parallel_tests", parallel_tests),
            ("remembered", remembered),
        ):
            if not value >= 1:
                raise ConfigError(f"rewards.code.CodeReward: {name}={value}: must be 1 or more")
        self._mode = mode
        self._format_weight = format_weight
        self._stop_at_first_failure = stop_at_first_failure and mode == "all"
        self._languages, self._modules = sandbox.languages, sandbox.python_modules
        self._judge = Judge(sandbox, time_limit_s, memory_limit_mb, wall_factor, parallel_tests)
        self._verdicts: SharedResults[tuple[str, str], tuple[Outcome, ...]] = SharedResults(remembered)

    async def __call__(self, completion: Completion, example: Example) -> RewardResult:
        problem = self._problem(example)
        program = extract_program(completion.text, problem.language)
        if program is None:
            return RewardResult(0.0, "malformed", _metrics([], problem.num_tests))
        outcomes = await self._verdicts.get(
            (program.text, example.id),
            lambda: self._judge.judge(
                program.text, problem, self._stop_at_first_failure, f"rewards.code.CodeReward: {example.id}"
            ),
            keep=lambda outcomes: not _sandbox_failed(outcomes),
        )
        metrics, details = _metrics(outcomes, problem.num_tests), _details(outcomes)
        if _sandbox_failed(outcomes):
            return RewardResult(0.0, "error", metrics, details)
        share = metrics["tests/passed"]
        value = share if self._mode == "fraction" else float(share == 1)
        status = "correct" if value == 1 else "partial" if value > 0 else "wrong"
        return RewardResult(value + self._format_weight * program.fenced, status, metrics, details)

    def _problem(self, example: Example) -> CodeProblem:
        problem = example.extra.get("problem")
        where = f"rewards.code.CodeReward: {example.id}"
        if not isinstance(problem, CodeProblem):
            raise DataError(
                f"{where} is not a programming problem (it has no extra['problem']); "
                "choose a dataset of programming problems, such as dataset=tiny_programs"
            )
        if problem.num_tests == 0:
            raise DataError(f"{where} has no tests; fix the dataset, or remove the example")
        if not isinstance(problem.tests, StdinTests) and problem.language != "python":
            raise DataError(
                f"{where} calls functions of a {problem.language} program, but only Python functions can be called; "
                "use tests on stdin"
            )
        if problem.language not in self._languages:
            has = ", ".join(sorted(self._languages))
            raise DataError(
                f"{where} is a problem for {problem.language}, but the sandbox runs only {has}; "
                "choose another sandbox or dataset"
            )
        return problem

    def check_gold(self, example: Example) -> None:
        """Check, without running anything, that the sandbox can run the example's tests. Raises DataError."""
        problem = self._problem(example)
        missing = [] if self._modules is None else missing_modules(problem, self._modules)
        if missing:
            raise DataError(
                f"rewards.code.CodeReward: the tests of {example.id} import {', '.join(missing)}, which the sandbox "
                "does not have; remove the example, or choose another sandbox"
            )

    def validate(self, examples: Iterable[Example]) -> None:
        """Check that each gold program (`extra["solution"]`) passes all tests, and that an empty program fails.

        The empty program is the gold program with the body of every function replaced by `pass`; for tests on stdin, a
        program that prints nothing. Examples without a gold program that the sandbox can run are skipped.

        Raises:
            DataError: naming the first example that fails.
        """
        asyncio.run(self._validate(list(examples)))

    async def _validate(self, examples: Sequence[Example]) -> None:
        complaints = await asyncio.gather(
            *[self._complaint(example) for example in examples if "solution" in example.extra]
        )
        for complaint in filter(None, complaints):
            raise DataError(complaint)

    async def _complaint(self, example: Example) -> str | None:
        language: Language = example.extra.get("solution_language", "python")
        if language not in self._languages:
            return None
        problem = dataclasses.replace(self._problem(example), language=language)
        example = dataclasses.replace(example, extra={**example.extra, "problem": problem})
        gold = str(example.extra["solution"])
        idle = _SILENT[language] if isinstance(problem.tests, StdinTests) else without_bodies(gold)
        for program, accepted in ((gold, True), (idle, False)):
            result = await self(Completion(f"```{language}\n{program}\n```", "eos", num_tokens=0), example)
            if (result.status == "correct") is not accepted or result.status == "error":
                what = "its gold program" if accepted else "a program that does nothing"
                wanted = "correct" if accepted else "wrong"
                return (
                    f"rewards.code.CodeReward: {example.id}: {what} is {result.status} instead of {wanted} "
                    f"({result.details}); the tests of the dataset do not work with this reward"
                )
        return None


def without_bodies(program: str) -> str:
    """A Python program with the body of every function replaced by `pass`. Raises DataError if it is not Python."""
    tree = parse_python(program)
    if tree is None:
        raise DataError(f"the program {program[:80]!r} is not Python; fix the dataset")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def _sandbox_failed(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.status == "infrastructure_error" for outcome in outcomes)


def _metrics(outcomes: Sequence[Outcome], num_tests: int) -> Metrics:
    """The share of tests passed, the number that ran, and the number with each other status."""
    counts = Counter(outcome.status for outcome in outcomes)
    metrics = {"tests/passed": counts["passed"] / num_tests, "tests/run": float(len(outcomes))}
    return metrics | {f"tests/{status}": float(counts[status]) for status in get_args(TestStatus) if status != "passed"}


def _details(outcomes: Sequence[Outcome]) -> dict[str, object]:
    details: dict[str, object] = {"tests": [outcome.status for outcome in outcomes]}
    for index, outcome in enumerate(outcomes):
        if outcome.status != "passed":
            details["failed_test"] = index
            if outcome.message:
                details["message"] = outcome.message
            break
    return details
