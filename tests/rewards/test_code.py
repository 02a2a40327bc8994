"""The code reward against the real local sandbox: statuses, and what the sandbox's own failures come to."""

import asyncio
import re
import threading

import pytest

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.sandbox.base import ExecResult
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.problem import AssertTests, CallTests, CodeProblem, StdinTests
from rewards.code import CodeReward
from tests.rewards.code_cases import PROBLEMS, example, judged, score

DOUBLE = CodeProblem(StdinTests((("1", "2"), ("2", "4"), ("3", "6"), ("4", "8"))))


@pytest.fixture(scope="module")
def sandbox():
    box = LocalSandbox()
    yield box
    box.close()


# --- Statuses


def time_limit_s(status: str) -> float:
    """Short where it is to be met; where another limit is, long enough for a busy machine to come to that."""
    return 0.5 if status == "timeout" else 5.0


ENDS = {
    "wrong": "print(int(input()) * 2 if i < 2 else 0)",
    "runtime_error": "print(int(input()) * 2 if i < 2 else 1 // 0)",
    "timeout": "print(int(input()) * 2)\nwhile i >= 2: pass",
    "memory": "print(int(input()) * 2)\nx = bytearray(2**30) if i >= 2 else 0",
    "output": "print(int(input()) * 2)\nwhile i >= 2: print('x' * 100000)",
}


@pytest.mark.parametrize("status", ENDS)
def test_status_of_tests_on_stdin(sandbox, status):
    program = "import io, sys\ni = int(sys.stdin.readline())\nsys.stdin = io.StringIO(str(i))\n" + ENDS[status]
    stopped = judged(sandbox, program, DOUBLE, time_limit_s=time_limit_s(status))
    assert (stopped.value, stopped.status) == (0.0, "wrong")
    assert (stopped.details["tests"], stopped.details["failed_test"]) == (["passed", status], 1)
    assert (stopped.metrics["tests/passed"], stopped.metrics["tests/run"], stopped.metrics[f"tests/{status}"]) == (
        0.25,
        2.0,
        1.0,
    )


CALLED = {
    "wrong": "return x * 2 if x < 2 else 0",
    "runtime_error": "return x * 2 if x < 2 else 1 // 0",
    "timeout": "while x >= 2: pass\n    return x * 2",
    "memory": "y = bytearray(2**30 if x >= 2 else 1)\n    y[::4096] = y[::4096]\n    return x * 2",
    "output": "while x >= 2: print('x' * 100000)\n    return x * 2",
}


@pytest.mark.parametrize("status", CALLED)
@pytest.mark.parametrize("kind", ["call", "assert"])
def test_status_of_tests_by_call(sandbox, status, kind):
    calls = CallTests("f", tuple(((i,), i * 2) for i in range(1, 4)))
    asserts = AssertTests(tuple(f"y = f({i})\nassert y == {i * 2}" for i in range(1, 4)), ("f",))
    problem = CodeProblem(calls if kind == "call" else asserts)
    result = judged(sandbox, f"def f(x):\n    {CALLED[status]}", problem, time_limit_s=time_limit_s(status))
    assert (result.value, result.details["tests"]) == (0.0, ["passed", status])
    if status == "wrong":
        assert judged(sandbox, f"def f(x):\n    {CALLED[status]}", problem, mode="fraction").value == pytest.approx(
            1 / 3
        )


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_program_that_is_not_python_fails_every_test(sandbox, kind):
    result = judged(sandbox, "def f(:", PROBLEMS[kind])
    assert (result.value, result.status) == (0.0, "wrong")
    assert result.details["tests"] == (["runtime_error"] if kind == "stdin" else ["compile_error"])
    assert "SyntaxError" in result.details["message"]


def test_a_compile_error_is_not_repeated_for_every_test(sandbox):
    if "cpp" not in sandbox.languages:
        pytest.skip("no g++")
    problem = CodeProblem(DOUBLE.tests, language="cpp")
    reward = CodeReward(sandbox=sandbox, mode="fraction")
    broken = asyncio.run(reward(Completion("```c++\nint main() { return }\n```", "eos", 1), example(problem)))
    assert (broken.value, broken.details["tests"]) == (0.0, ["compile_error"] * 4)
    right = "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x; }"
    assert asyncio.run(reward(Completion(f"```c++\n{right}\n```", "eos", 1), example(problem))).value == 1.0


def test_fraction_runs_every_test_and_format_adds_to_it(sandbox):
    program = "x = int(input())\nprint(x * 2 if x != 2 else 0)"
    result = judged(sandbox, program, DOUBLE, mode="fraction", format_weight=0.125)
    assert (result.value, result.status) == (0.875, "partial")
    assert result.details == {"tests": ["passed", "wrong", "passed", "passed"], "failed_test": 1}
    assert judged(sandbox, program, DOUBLE, format_weight=0.125).value == 0.125
    reward = CodeReward(sandbox=sandbox, format_weight=0.125)
    bare = asyncio.run(reward(Completion("print(int(input()) * 2)", "eos", 1), example(DOUBLE)))
    assert (bare.value, bare.status) == (1.0, "correct")


def test_no_program_is_malformed(sandbox):
    result = asyncio.run(CodeReward(sandbox=sandbox)(Completion("I do not know.", "eos", 1), example(DOUBLE)))
    assert (result.value, result.status, result.details) == (0.0, "malformed", {})
    assert result.metrics["tests/passed"] == 0.0


# --- What programs may rely on


def test_prelude_and_future_imports(sandbox):
    program = "from __future__ import annotations\nprint(sqrt(float(input())))"
    for prelude, status in (("from math import *", "correct"), ("", "wrong")):
        problem = CodeProblem(StdinTests((("4", "2.0"),)), prelude=prelude)
        assert judged(sandbox, program, problem).status == status


SOLUTION = """
class Solution:
    def f(self, rows: List[int], name="x"):
        print("noise")
        return {len(rows): (sum(rows), name)}
if __name__ == "__main__":
    1 / 0
"""


def test_methods_of_solution_and_values_of_json(sandbox):
    problem = CodeProblem(CallTests("f", ((([1, 2],), {"2": [3, "x"]}),)), prelude="from typing import *")
    assert judged(sandbox, SOLUTION, problem).status == "correct"


def test_problems_have_limits_of_their_own(sandbox):
    slow = "import time\nwhile time.process_time() < 0.6: pass\nprint(int(input()) * 2)"
    problem = CodeProblem(StdinTests((("1", "2"),)), time_limit_s=3.0)
    assert judged(sandbox, slow, problem, time_limit_s=0.2).status == "correct"
    assert judged(sandbox, slow, CodeProblem(problem.tests), time_limit_s=0.2).details["tests"] == ["timeout"]


CHECKER = """
import sys
given, wanted, output = (open(name).read().split() for name in ("input.txt", "expected.txt", "output.txt"))
if output == ["crash"]:
    sys.exit(3)
sys.exit(0 if sorted(output) == sorted(wanted) and given == ["3"] else 1)
"""


@pytest.mark.parametrize(("output", "status"), [("b c a", "correct"), ("a b", "wrong"), ("crash", "wrong")])
def test_checker(sandbox, output, status):
    problem = CodeProblem(StdinTests((("3", "a b c"),), checker=CHECKER))
    assert judged(sandbox, f"print({output!r})", problem).status == status


FRAGILE = """
import sys
k = int(open("output.txt").read().split()[0])
sums = [0] * (k + 1)
sys.exit(0 if k == 3 else 1)
"""


@pytest.mark.parametrize("output", ["10**10", "'x'", "''", "-5", "10**8 * 2"])
def test_a_checker_that_fails_on_what_a_program_prints_refuses_it(sandbox, output):
    problem = CodeProblem(StdinTests((("3", "3"),), checker=FRAGILE))
    result = judged(sandbox, f"print({output})", problem)
    assert (result.value, result.status) == (0.0, "wrong")
    assert judged(sandbox, "print(3)", problem).status == "correct"


def test_a_checker_that_never_ends_on_an_output_refuses_it(sandbox):
    checker = "import sys\nwhile int(open('output.txt').read()) != 3: pass"
    problem = CodeProblem(StdinTests((("3", "3"),), checker=checker), time_limit_s=0.1)
    result = judged(sandbox, "print(4)", problem, wall_factor=3.0)
    assert (result.value, result.status) == (0.0, "wrong")
    assert "the checker ended with timeout" in result.details["message"]


def test_a_checker_that_fails_on_the_expected_output_is_an_error_found_once():
    checker = "raise SystemExit(3)"

    class Counting(Scripted):
        checks = 0

        async def run(self, code, language, stdin="", files=None, limits=None) -> ExecResult:
            self.checks += bool(files)
            status, exit_status = ("runtime_error", 3) if code == checker else ("ok", 0)
            return ExecResult(status, "4\n", "", exit_status, 0.0, 0.0, 0.0)

    box = Counting("ok")
    reward = CodeReward(sandbox=box)
    problem = CodeProblem(StdinTests((("3", "3"),), checker=checker))
    for program, checks in (("print(4)", 2), ("print(5)", 3)):
        result = score(reward, program, problem)
        assert result.status == "error" and "does not accept the expected output" in result.details["message"]
        assert box.checks == checks


# --- Assertions by replay

CHECK = '''
import math, random
def helper(x): return x + 1
def f(x): """The head of the function, as in HumanEval's prompts."""
def check(candidate):
    for _ in range(50):
        x = random.randint(0, 10**6)
        got = candidate(x)
        assert math.isclose(got, helper(x))
    assert candidate(candidate(1)) == 3
    assert list(stream(3)) == [0, 1, 2]
    assert all(map(kind, [2, 3], [int, int]))
    assert kind(2, of=int)
    try:
        candidate("a")
    except TypeError as error:
        assert "str" in str(error)
    else:
        assert False
'''
RIGHT = "def f(x): return x + 1\ndef stream(n): return (i for i in range(n))\ndef kind(x, of): return isinstance(x, of)"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (("", ""), "passed"),
        (("return x + 1", "return x + 1 if x < 500000 else 0"), "wrong"),
        (("return x + 1", "return x + 1 if x != 2 else 0"), "wrong"),
        (("(i for i in range(n))", "[0, 1]"), "wrong"),
        (("return x + 1", "return str(x) + str(1) if type(x) is str else x + 1"), "wrong"),
        (("return x + 1", "return x + 1 if type(x) is int else {}['x']"), "runtime_error"),
        (("return isinstance(x, of)", "return x == 2 or next(iter(()))"), "runtime_error"),
    ],
)
def test_one_check_of_many_calls(sandbox, change, status):
    problem = CodeProblem(AssertTests(("check(f)",), ("f", "stream", "kind"), setup=CHECK))
    assert judged(sandbox, RIGHT.replace(*change), problem).details["tests"] == [status]


def test_a_limit_used_up_by_many_calls_together_is_not_broken(sandbox):
    slow = """
import time
def f(x):
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
    return x
"""
    problem = CodeProblem(AssertTests(tuple(f"assert f({i}) == {i}" for i in range(4)), ("f",)))
    assert judged(sandbox, slow, problem, time_limit_s=0.8).status == "correct"


def test_tests_that_never_stop_asking_end(sandbox):
    problem = CodeProblem(AssertTests(("x = 1\nwhile x < 10**9: x = f(x)",), ("f",)))
    assert judged(sandbox, "def f(x): return x + 1", problem).details["tests"] == ["timeout"]


@pytest.mark.parametrize(
    ("tests", "complaint"),
    [
        (AssertTests(("assert f(",), ("f",)), "SyntaxError"),
        (AssertTests(("assert f(1)",), ("f",), setup="Pair(1)"), "Pair"),
        (AssertTests(("assert g(1)",), ("f",)), "never call f"),
        (AssertTests(("assert f(print)",), ("f",)), "builtin_function_or_method"),
        (StdinTests(()), "no tests"),
    ],
)
def test_tests_that_do_not_work_are_a_data_error(sandbox, tests, complaint):
    with pytest.raises(DataError, match=f"x/.*{complaint}"):
        judged(sandbox, "def f(x): return x", CodeProblem(tests))


# --- Sandboxes that fail, and programs seen before


class Scripted:
    """Answers every run with the same result. The first `num_held` runs never end."""

    languages = frozenset({"python"})
    python_modules = None
    isolation = "none"

    def __init__(self, status: str, num_held: int = 0) -> None:
        self.status = status
        self.num_held = num_held
        self.runs = 0

    async def run(self, code, language, stdin="", files=None, limits=None) -> ExecResult:
        self.runs += 1
        # Long enough for several callers to meet; nothing depends on it.
        await asyncio.sleep(3600 if self.runs <= self.num_held else 0.05)
        return ExecResult(self.status, "2\n4\n", "first\nserver gone\n", 0, 0.0, 0.0, 0.0)  # pyright: ignore[reportArgumentType]

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_failing_sandbox_is_no_wrong_answer_and_not_remembered(kind):
    box = Scripted("infrastructure_error")
    reward = CodeReward(sandbox=box)
    for runs in (1, 2):
        result = score(reward, "print(1)", PROBLEMS[kind])
        assert (result.value, result.status) == (0.0, "error")
        assert result.details == {"tests": ["infrastructure_error"], "failed_test": 0, "message": "server gone"}
        assert box.runs == runs


def test_the_same_program_runs_once_also_across_threads_and_loops():
    box = Scripted("ok")
    reward = CodeReward(sandbox=box)
    problem = CodeProblem(StdinTests((("1", "2 4"),)))
    results: list[RewardResult] = []
    together = threading.Barrier(5)

    def one_of_five() -> None:
        together.wait()
        results.append(score(reward, "print(1)", problem))

    threads = [threading.Thread(target=one_of_five) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.append(score(reward, "print(1)", problem))
    assert ([result.status for result in results], box.runs) == (["correct"] * 6, 1)
    score(reward, "print(2)", problem)
    assert box.runs == 2


def test_who_waits_for_a_cancelled_run_runs_it():
    box = Scripted("ok", num_held=1)
    reward = CodeReward(sandbox=box)
    problem = CodeProblem(StdinTests((("1", "2 4"),)))

    async def both() -> RewardResult:
        completion, case = Completion("print(1)", "eos", 1), example(problem)
        first, second = (asyncio.create_task(reward(completion, case)) for _ in range(2))
        while box.runs < 1:
            await asyncio.sleep(0)
        first.cancel()
        return await second

    assert (asyncio.run(both()).status, box.runs) == ("correct", 2)


# --- Validation and mistakes


def test_validate(sandbox):
    reward = CodeReward(sandbox=sandbox, format_weight=0.1)
    double = "def double(x):\n    return x * 2\n"
    called = CodeProblem(CallTests("double", (((1,), 2),)))
    checked = CodeProblem(AssertTests(("assert double(1) == 2",), ("double",)))
    good = [
        example(DOUBLE, solution=f"{double}print(double(int(input())))"),
        example(called, solution=double),
        example(checked, solution=double),
    ]
    reward.validate([*good, example(CodeProblem(StdinTests((("", ""),))))])
    with pytest.raises(DataError, match="gold program is wrong"):
        reward.validate([*good, example(CodeProblem(StdinTests((("1", "3"),))), solution="print(2)")])
    with pytest.raises(DataError, match="does nothing is correct"):
        reward.validate([example(CodeProblem(StdinTests((("1", ""),))), solution="x = 1")])


def test_mistakes_are_named(sandbox):
    reward = CodeReward(sandbox=sandbox)
    with pytest.raises(DataError, match=re.escape("x/1 is not a programming problem")):
        asyncio.run(reward(Completion("", "eos", 1), Example("x/1", (), "5")))
    with pytest.raises(DataError, match=r"x/.* is a problem for java, but the sandbox runs"):
        score(reward, "x", CodeProblem(DOUBLE.tests, language="java"))
    with pytest.raises(DataError, match="only Python functions"):
        score(reward, "x", CodeProblem(PROBLEMS["call"].tests, language="cpp"))
    for settings in ({"mode": "some"}, {"format_weight": 2}, {"time_limit_s": 0}, {"parallel_tests": 0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            CodeReward(sandbox=sandbox, **settings)
    with pytest.raises(ConfigError, match="sandbox=local"):
        CodeReward(sandbox=None)
