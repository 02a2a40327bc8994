"""Runs the tests of a program in a sandbox and gives the outcome of each.

Expected values never enter the process in which the program runs: outputs and results are compared here, and assertions
run in another process (`rewards.code_replay`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cookbook.core.errors import DataError
from cookbook.sandbox.base import ExecResult, Limits, Sandbox
from cookbook.sandbox.problem import AssertTests, CallTests, CodeProblem, StdinTests
from rewards.code_cache import SharedResults
from rewards.code_compare import ForgedAnswerError, read_answer, same_output, same_value
from rewards.code_replay import NotPlain, call_request

TestStatus = Literal[
    "passed", "wrong", "timeout", "runtime_error", "memory", "output", "compile_error", "infrastructure_error"
]

MAX_ROUNDS = 20
"""How often tests may ask for further calls after they have seen the results of earlier ones."""

_SECTION = "\n# --- "
_SHARED, *_SECTIONS = Path(__file__).with_name("code_replay.py").read_text(encoding="utf-8").split(_SECTION)
# Each process gets only its half of the text: compiling takes a noticeable part of a run of milliseconds.
ANSWER_CALLS, JUDGE_TESTS = (
    _SECTION.join([_SHARED, section]) + f"\n\n{main}()\n"
    for section, main in zip(_SECTIONS, ("answer_calls", "judge_tests"), strict=True)
)

_ROOM = Limits(cpu_s=10.0, memory_mb=512, output_kb=16 * 1024)
"""Minimum limits of tests and checkers. Their output holds the calls that tests ask for."""

_FUTURE_IMPORT = re.compile(r"^from __future__ import [^\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test. `message` is a line about how the program failed, or ""."""

    status: TestStatus
    message: str = ""


@dataclass(frozen=True)
class _Answers:
    """Results of a program's functions by request, for `code_replay.Replay`; `failed` if the program did not load."""

    results: Mapping[str, Mapping[str, str]]
    failed: Outcome | None = None


class _SandboxFailureError(Exception):
    """The sandbox failed, so a run says nothing about the program."""


class Judge:
    """Runs tests. The limits hold for each test, unless the problem has its own.

    `wall_factor` is the ratio of the limits of wall time and CPU time. The first test runs alone, the others
    `parallel_tests` at a time.
    """

    def __init__(
        self, sandbox: Sandbox, time_limit_s: float, memory_limit_mb: int, wall_factor: float, parallel_tests: int
    ) -> None:
        self._sandbox = sandbox
        self._time_limit_s = time_limit_s
        self._memory_limit_mb = memory_limit_mb
        self._wall_factor = wall_factor
        self._parallel_tests = parallel_tests
        self._first_calls: SharedResults[AssertTests, list[str]] = SharedResults(size=1024)
        self._checker_works: SharedResults[tuple[str, int], bool] = SharedResults(size=4096)

    async def judge(
        self, program: str, problem: CodeProblem, stop_at_first_failure: bool, name: str
    ) -> tuple[Outcome, ...]:
        """An outcome for each test in order; with `stop_at_first_failure`, up to the first that did not pass.

        Raises:
            DataError: the tests of the problem `name` are broken.
        """
        tests = problem.tests
        if isinstance(tests, AssertTests):
            outcomes = await self._judge_asserts(program, problem, tests, stop_at_first_failure, name)
        else:

            async def run_case(case: int) -> Outcome:
                try:
                    if isinstance(tests, StdinTests):
                        return await self._run_stdin_case(program, problem, tests, case, name)
                    return await self._run_call_case(program, problem, tests, case, name)
                except _SandboxFailureError as error:
                    return Outcome("infrastructure_error", str(error))

            outcomes = await self._run_cases(run_case, problem.num_tests, stop_at_first_failure)
        if stop_at_first_failure:
            passed = next(
                (index for index, outcome in enumerate(outcomes) if outcome.status != "passed"), len(outcomes)
            )
            return tuple(outcomes[: passed + 1])
        # If not all tests were judged, the last outcome holds for the others too.
        return (*outcomes, *[outcomes[-1]] * (problem.num_tests - len(outcomes)))

    async def _run_cases(
        self, run_case: Callable[[int], Awaitable[Outcome]], cases: int, stop_at_first_failure: bool
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while len(outcomes) < cases:
            # The first test runs alone: most wrong programs fail it, and it compiles the program for the others.
            end = min(cases, len(outcomes) + self._parallel_tests) if outcomes else 1
            outcomes += await asyncio.gather(*[run_case(case) for case in range(len(outcomes), end)])
            failures = {outcome.status for outcome in outcomes} - {"passed"}
            if "compile_error" in failures or (failures and stop_at_first_failure):
                break
        return outcomes

    # --- One run

    async def _run(
        self,
        problem: CodeProblem,
        code: str,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        output_kb: int = Limits.output_kb,
        trusted: bool = False,
    ) -> ExecResult:
        """One run within the limits of the problem. `trusted` Python of the dataset has at least the limits `_ROOM`.

        Raises:
            _SandboxFailureError: the sandbox failed.
        """
        cpu_s = problem.time_limit_s or self._time_limit_s
        memory_mb = problem.memory_limit_mb or self._memory_limit_mb
        if trusted:
            cpu_s, memory_mb, output_kb = (
                max(cpu_s, _ROOM.cpu_s),
                max(memory_mb, _ROOM.memory_mb),
                max(output_kb, _ROOM.output_kb),
            )
        limits = Limits(
            wall_s=cpu_s * self._wall_factor,
            cpu_s=cpu_s,
            memory_mb=memory_mb,
            output_kb=max(output_kb, Limits.output_kb),
        )
        result = await self._sandbox.run(code, "python" if trusted else problem.language, stdin, files, limits)
        if result.status == "infrastructure_error":
            raise _SandboxFailureError(_last_line(result.stderr) or "the sandbox failed")
        return result

    # --- Programs that read stdin

    async def _run_stdin_case(
        self, program: str, problem: CodeProblem, tests: StdinTests, case: int, name: str
    ) -> Outcome:
        text, expected = tests.cases[case]
        # Twice the length of the expected output, so that no correct output is too long.
        result = await self._run(problem, _with_prelude(problem, program), text, output_kb=2 * len(expected) // 1024)
        status = _status(result)
        if status is not None:
            return Outcome(status, _last_line(result.stderr))
        if tests.checker is None:
            return Outcome("passed" if same_output(result.stdout, expected, tests.float_tolerance) else "wrong")
        checked = await self._check(problem, tests, case, result.stdout)
        if checked.status == "ok":
            return Outcome("passed")
        if _refused(checked):
            return Outcome("wrong", _last_line(checked.stderr))
        # What the program has printed is the cause, if the checker works on what it should have printed.
        works = await self._checker_works.get((name, case), lambda: self._checker_accepts(problem, tests, case))
        ended = f"the checker ended with {checked.status} and exit status {checked.exit}: {_last_line(checked.stderr)}"
        if not works:
            raise _SandboxFailureError(f"{ended}; it does not accept the expected output of test {case} either")
        return Outcome("wrong", ended)

    async def _check(self, problem: CodeProblem, tests: StdinTests, case: int, output: str) -> ExecResult:
        text, expected = tests.cases[case]
        files = {"input.txt": text, "expected.txt": expected, "output.txt": output}
        return await self._run(problem, tests.checker or "", files=files, trusted=True)

    async def _checker_accepts(self, problem: CodeProblem, tests: StdinTests, case: int) -> bool:
        """Whether the checker accepts the expected output within its limits."""
        return (await self._check(problem, tests, case, tests.cases[case][1])).status == "ok"

    # --- Calls of functions

    async def _run_call_case(
        self, program: str, problem: CodeProblem, tests: CallTests, case: int, name: str
    ) -> Outcome:
        args, expected = tests.cases[case]
        try:
            request = call_request(tests.function_name, args, {})
        except NotPlain as error:
            raise DataError(
                f"{name}: the arguments of test {case} contain {error}, which is not a JSON value; fix the dataset"
            ) from error
        answers = await self._answer(program, problem, [request])
        if answers.failed is not None:
            return answers.failed
        result = answers.results[request]
        if "died" in result:
            return Outcome(_program_status(result["died"]))
        try:
            answer = read_answer(result["answer"])
            if answer.kind == "raised":
                return Outcome("runtime_error", _last_line(answer.content))
            return Outcome("passed" if same_value(answer.content, expected, tests.float_tolerance) else "wrong")
        except (ForgedAnswerError, RecursionError) as error:
            return Outcome("runtime_error", str(error))

    async def _answer(self, program: str, problem: CodeProblem, requests: Sequence[str]) -> _Answers:
        """Load the program in a new process and make the calls. Answers at least one of them, not always all."""
        job = {"prelude": problem.prelude, "program": program, "requests": requests}
        result = await self._run(problem, ANSWER_CALLS, json.dumps(job))
        # Complete lines. A hostile program can write lines too, but they are only taken as answers.
        state, *answers = result.stdout.split("\n")[:-1] or [""]
        # If answers are missing after exit status 0, the program has ended the process itself.
        status = _status(result) or "runtime_error"
        if state != "loaded":
            return _Answers(
                {}, Outcome("compile_error" if state == "compile_error" else status, _last_line(result.stderr))
            )
        if status == "output":
            # The kernel refuses further output before the program is killed: such an OSError is due to the limit.
            answers = [*itertools.takewhile(lambda answer: not answer.startswith('{"raised": "OSError"'), answers)]
        results: dict[str, Mapping[str, str]] = {
            request: {"answer": answer} for request, answer in zip(requests, answers, strict=False)
        }
        # A call is not blamed for a limit that earlier calls have used up: it is repeated in a new process.
        if len(answers) < len(requests) and (not answers or status == "runtime_error"):
            results[requests[len(answers)]] = {"died": status}
        return _Answers(results)

    # --- Assertions

    async def _judge_asserts(
        self, program: str, problem: CodeProblem, tests: AssertTests, stop_at_first_failure: bool, name: str
    ) -> list[Outcome]:
        try:
            requests = await self._first_calls.get(tests, lambda: self._find_first_calls(problem, tests, name))
            results: dict[str, Mapping[str, str]] = {}
            for _ in range(MAX_ROUNDS):
                answers = await self._answer(program, problem, requests)
                if answers.failed is not None:
                    return [answers.failed]
                results |= answers.results
                outcomes, requests = await self._run_asserts(problem, tests, results, stop_at_first_failure, name)
                if not requests:
                    return outcomes
            return [Outcome("timeout", f"the tests asked for further calls {MAX_ROUNDS} times")]
        except _SandboxFailureError as error:
            return [Outcome("infrastructure_error", str(error))]

    async def _find_first_calls(self, problem: CodeProblem, tests: AssertTests, name: str) -> list[str]:
        outcomes, requests = await self._run_asserts(problem, tests, {}, True, name)
        if requests:
            return requests
        if outcomes and outcomes[-1].status in ("timeout", "memory", "output"):
            raise _SandboxFailureError(
                f"the tests of {name} ended with {outcomes[-1].status} before they called the program"
            )
        raise DataError(
            f"{name}: its tests never call {', '.join(tests.functions) or 'a function'}; "
            "fix the dataset, or remove the example"
        )

    async def _run_asserts(
        self,
        problem: CodeProblem,
        tests: AssertTests,
        results: Mapping[str, Mapping[str, str]],
        stop_at_first_failure: bool,
        name: str,
    ) -> tuple[list[Outcome], list[str]]:
        """The outcomes, and the calls that must be answered first. If there are calls, the outcomes are not valid."""
        job = {
            "setup": tests.setup,
            "tests": tests.tests,
            "functions": tests.functions,
            "results": results,
            "stop_at_first_failure": stop_at_first_failure,
        }
        result = await self._run(problem, JUDGE_TESTS, json.dumps(job), trusted=True)
        try:
            lines = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
            outcomes = [Outcome(_program_status(line["verdict"])) for line in lines if "verdict" in line]
            end = lines[-1] if lines and "verdict" not in lines[-1] else None
        except (ValueError, TypeError, RecursionError):
            return [Outcome("runtime_error", "what the program returned has broken its tests")], []
        if end is None:
            # Results of the functions must be the cause: the tests have run without them before.
            if result.status not in ("timeout", "memory", "output"):
                raise _SandboxFailureError(
                    f"the tests of {name} ended with {result.status}: {_last_line(result.stderr)}"
                )
            return [*outcomes, Outcome(result.status, "in the tests, on what the program returned")], []
        if "broken" in end:
            raise DataError(
                f"{name}: its tests do not work: {_last_line(end['broken'])}; fix the dataset, or remove the example"
            )
        return outcomes, end.get("missing", [])


def _with_prelude(problem: CodeProblem, program: str) -> str:
    """The program with its prelude. Imports from __future__ move to the top, where Python requires them."""
    if not problem.prelude:
        return program
    imports = _FUTURE_IMPORT.findall(program) if problem.language == "python" else []
    return "\n".join([*imports, problem.prelude, _FUTURE_IMPORT.sub("", program) if imports else program])


def _status(result: ExecResult) -> TestStatus | None:
    """How a run failed; None if it did not."""
    return None if result.status == "ok" else result.status


def _program_status(status: str) -> TestStatus:
    match status:
        case "passed" | "wrong" | "timeout" | "memory" | "output" | "runtime_error":
            return status
    raise _SandboxFailureError(f"unknown status {status!r}")


def _refused(checked: ExecResult) -> bool:
    return checked.status == "runtime_error" and checked.exit == 1


def _last_line(text: str, limit: int = 200) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:limit] if lines else ""
