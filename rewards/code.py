"""Programs, judged by running them against tests in a sandbox. What a completion can do about its own verdict: docs/rewards.md."""

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
    """1.0 when the program in a completion passes every test of its example, else 0.0; with mode "fraction" the share of tests passed.

    The example's `extra["problem"]` is a `cookbook.sandbox.problem.CodeProblem`. `format_weight` is added where the program stands
    between two code fences of which the first is tagged with the language, whatever the tests say. In mode "fraction" all tests run;
    in mode "all" they stop at the first failure unless `stop_at_first_failure` is false. `time_limit_s` (CPU time) and
    `memory_limit_mb` hold for one test, unless the problem has its own; wall time is `wall_factor` times as long. The first test runs
    alone, the others `parallel_tests` at a time.

    Status: correct, partial (some tests passed, mode "fraction"), wrong, malformed where there is no program, and error where the
    sandbox failed. `details` has the status of each test that ran, the index of the first that failed, and a line about it. The same
    program for the same example runs once, whoever asks; the last `remembered` verdicts are kept.

    Raises:
        ConfigError: no sandbox, or a setting is out of range.
        DataError: an example has no problem, or one whose tests do not work or are in a language that the sandbox lacks.
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
                "rewards.code.CodeReward: there is no sandbox to run programs in; choose one, such as sandbox=local"
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
        self._languages = sandbox.languages
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
                f"{where} is no programming problem (it has no extra['problem']); choose a dataset of them, dataset=tiny_programs"
            )
        if problem.num_tests == 0:
            raise DataError(f"{where} has no tests; mend the dataset, or leave the example out")
        if not isinstance(problem.tests, StdinTests) and problem.language != "python":
            raise DataError(
                f"{where} calls functions of a {problem.language} program; only Python's can be called, so use tests on stdin"
            )
        if problem.language not in self._languages:
            has = ", ".join(sorted(self._languages))
            raise DataError(
                f"{where} is a problem for {problem.language}; the sandbox runs {has} only, so choose another sandbox or dataset"
            )
        return problem

    def validate(self, examples: Iterable[Example]) -> None:
        """Check that each gold program (`extra["solution"]`) passes all tests, and that one which does nothing does not.

        The latter is the gold program with the body of every function replaced by `pass`, or for tests on stdin a program that
        prints nothing. Examples without a gold program, or with one that the sandbox cannot run, are left out.

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
                    f"rewards.code.CodeReward: {example.id}: {what} is {result.status} instead of {wanted} ({result.details}); "
                    "the dataset's tests and this reward do not fit together"
                )
        return None


def without_bodies(program: str) -> str:
    """A Python program with the body of every function replaced by `pass`. Raises DataError where it is no Python."""
    tree = parse_python(program)
    if tree is None:
        raise DataError(f"the program {program[:80]!r} is not Python; mend the dataset")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def _sandbox_failed(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.status == "infrastructure_error" for outcome in outcomes)


def _metrics(outcomes: Sequence[Outcome], num_tests: int) -> Metrics:
    """The share of tests passed, how many ran, and how many ended in each other way."""
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
