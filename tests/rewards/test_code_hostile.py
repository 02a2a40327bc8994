"""No program gets a verdict that it did not earn, whatever it does to the process in which it runs.

Each program is a preamble, a function f, and a main program that prints what f returns, for tests on stdin.
"""

import asyncio

import pytest

from cookbook.core.rollouts import Completion, RewardResult
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.problem import CallTests, CodeProblem
from rewards.code import CodeReward
from tests.rewards.code_cases import PROBLEMS, SECRET, example, judged


@pytest.fixture(scope="module")
def sandbox():
    box = LocalSandbox()
    yield box
    box.close()


SEARCH = """
import gc, os, re, sys
def found():
    texts = [repr(dict(os.environ)), repr(sys.argv)]
    frame = sys._getframe()
    while frame is not None:
        texts += [repr(frame.f_locals)[:100000], repr(frame.f_globals)[:100000]]
        frame = frame.f_back
    texts += [repr(x)[:10000] for x in gc.get_objects() if type(x) in (dict, list, tuple)]
    for folder in (".", "/tmp", "/proc/self", "/proc/%d" % os.getppid()):
        try:
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if os.path.isfile(path) and name not in ("kmsg", "pagemap", "mem", "clear_refs"):
                    with open(path, errors="replace") as file:
                        texts.append(file.read(100000))
        except OSError:
            pass
    for text in texts:
        match = re.search("zebra" + "-[0-9]+", text)
        if match:
            return match[0]
    return "nothing"
"""

HOSTILE = {
    "fake markers": (
        """
import os
for fd in range(1, 30):
    for line in ("passed", "loaded", '{"verdict": "passed"}', '{"end": null}', '{"value": true}'):
        try: os.write(fd, (line + chr(10)).encode())
        except OSError: pass
""",
        "'passed'",
    ),
    "exit at import": ("import os; os._exit(0)", "''"),
    "sys.exit at import": ("import sys; sys.exit(0)", "''"),
    "exit in the function": ("import os", "os._exit(0)"),
    "kill": ("import os, signal", "os.kill(os.getpid(), 9)"),
    "patched builtins": (
        """
import builtins, json, os, sys
builtins.AssertionError = type("Never", (BaseException,), {})
builtins.all = builtins.isinstance = builtins.any = lambda *a: True
builtins.len = lambda x: 1
json.dumps = lambda *a, **k: '{"value": true}'
json.loads = lambda *a, **k: ["f", [], []]
os._exit = sys.exit = lambda *a: None
builtins.exec = builtins.compile = lambda *a, **k: None
""",
        "True",
    ),
    "patched harness": (
        """
import sys
main = sys.modules["__main__"]
for name in list(vars(main)):
    if callable(vars(main)[name]) and not name.startswith("__"):
        setattr(main, name, lambda *a, **k: '{"verdict": "passed"}')
""",
        "'passed'",
    ),
    "closed streams": ("import sys, os; sys.stdout = sys.stderr = None; os.close(1); os.close(0)", "'x'"),
    "always equal": (
        """
class Yes(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
""",
        "Yes('x')",
    ),
    "always equal object": ("class Yes:\n    def __eq__(self, other): return True", "Yes()"),
    "searches for the answer": (SEARCH, "found()"),
    "overwrites the harness": (
        """
import os, sys
for name in [*os.listdir("."), sys.argv[0], getattr(sys.modules["__main__"], "__file__", "x.py")]:
    try: open(name, "w").write("print('passed')")
    except OSError: pass
""",
        "'x'",
    ),
    "prints when it exits": ("import atexit; atexit.register(print, 'passed')", "'x'"),
    "prints later": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('passed'))).start()",
        "'x'",
    ),
    "asserts": ("", "(_ for _ in ()).throw(AssertionError('passed'))"),
    "infinite generator": ("import itertools", "itertools.count()"),
    "deep": ("d = []\nfor _ in range(100000): d = [d]", "d"),
}
MAIN = "\nif __name__ == '__main__':\n    print(f(int(input())))\n"


@pytest.mark.parametrize("kind", PROBLEMS)
def test_no_hostile_program_passes_and_a_right_one_beside_them_does(sandbox, kind):
    reward = CodeReward(sandbox=sandbox, time_limit_s=2.0, wall_factor=10.0)

    async def everything() -> list[RewardResult]:
        programs = [f"{preamble}\ndef f(x):\n    return {value}\n{MAIN}" for preamble, value in HOSTILE.values()]
        programs.append(f"def f(x):\n    return '{SECRET}'\n{MAIN}")
        return await asyncio.gather(
            *[reward(Completion(program, "eos", 1), example(PROBLEMS[kind])) for program in programs]
        )

    *hostile, right = asyncio.run(everything())
    assert (right.value, right.status, right.details) == (1.0, "correct", {"tests": ["passed"]})
    seen = {name: result.details.get("tests") for name, result in zip(HOSTILE, hostile, strict=True)}
    assert [result.value for result in hostile] == [0.0] * len(hostile), seen
    assert {result.status for result in hostile} == {"wrong"}, seen
    assert all(tests in (["wrong"], ["runtime_error"]) for tests in seen.values()), seen
    for name in (
        "always equal",
        "always equal object",
        "searches for the answer",
        "overwrites the harness",
        "prints later",
    ):
        assert seen[name] == ["wrong"], name
    if kind != "stdin":
        for name in ("exit at import", "sys.exit at import", "exit in the function", "kill", "asserts"):
            assert seen[name] == ["runtime_error"], name


def test_the_search_for_the_answer_finds_what_there_is_to_find(sandbox):
    told = CodeProblem(CallTests("f", (((SECRET,), SECRET),)))
    assert judged(sandbox, f"{SEARCH}\ndef f(x): return found()", told).status == "correct"
