"""The local sandbox: what programs can do, and which limit ends them. Hostile programs: test_hostile.py."""

import asyncio
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.core.errors import ConfigError
from cookbook.sandbox.base import ExecResult, Limits
from cookbook.sandbox.local import LocalSandbox
from tests.sandbox.local_runs import (
    BROKEN_LIMITS,
    SMALL,
    needs_linux,
    run,
)

pytestmark = needs_linux


PROGRAMS = {
    "input": ("print(int(input()) + int(input()))", "2\n40", 0, "42\n"),
    "buffer": ("import sys; print(len(sys.stdin.buffer.read()))", "żółw", 0, "7\n"),
    "open0": ("print(sum(map(int, open(0))))", "1\n2\n3\n", 0, "6\n"),
    "dev_stdin": ("print(open('/dev/stdin').read())", "x", 0, "x\n"),
    "main": (
        "if __name__ == '__main__': print(__file__.rpartition('/')[2], __import__('sys').argv[1:])",
        "",
        0,
        "main.py []\n",
    ),
    "unicode": ("print(input()[::-1])", "ąβ漢", 0, "漢βą\n"),
    "bytes": (r"import sys; sys.stdout.buffer.write(b'a\0\xff\n')", "", 0, "a\0�\n"),
    "exit": ("print('x', end=''); exit(7)", "", 7, "x"),
    "exit_none": ("import sys; sys.exit()", "", 0, ""),
    "os_exit": ("import os; print('lost'); os._exit(3)", "", 3, ""),
    "signal": ("import os; os.kill(os.getpid(), 15)", "", -15, ""),
    "unread": ("print(1)", "x\n" * 100_000, 0, "1\n"),
    "closed_stdin": ("import sys; sys.stdin.close(); print(2)", "x", 0, "2\n"),
    "thread": ("import threading; threading.Thread(target=lambda: print('t')).start()", "", 0, "t\n"),
    "atexit": ("import atexit; atexit.register(print, 'bye'); print('hi')", "", 0, "hi\nbye\n"),
    "recursion": ("import sys; print(sys.getrecursionlimit())", "", 0, "1000\n"),
    "pool": ("from multiprocessing import Pool; print(Pool(2).map(abs, [-1, -2]))", "", 0, "[1, 2]\n"),
    "child": ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(6)'])", "", 0, "6\n"),
    "temporary": ("import tempfile; print(tempfile.TemporaryFile().write(b'abc'))", "", 0, "3\n"),
    "hash": ("print(hash('a'))", "", 0, None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_python_programs_behave_as_under_a_fresh_interpreter(sandbox: LocalSandbox, name: str) -> None:
    code, stdin, status, stdout = PROGRAMS[name]
    result = run(sandbox, code, stdin)
    assert (result.exit, result.stderr) == (status, "")
    assert result.status == ("ok" if status == 0 else "runtime_error")
    if stdout is None:  # The same every time, by decision.
        stdout = run(sandbox, code, stdin).stdout
    assert result.stdout == stdout
    assert result.wall_s > 0 and 0 < result.memory_mb < 200


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return 1 / x\n\nf(0)\n",
        "print('before')\nx = = 1\n",
        "try:\n    {}['k']\nexcept KeyError as error:\n    raise ValueError('ż') from error\n",
        "import sys\nprint(1)\nsys.exit('message')\n",
        "import helper\nhelper.f()\n",
        "def f(n):\n    return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError as error:\n    print(error)\n",
        "import sys\nsys.stdout.write('no newline')\nraise SystemExit(3)\n",
        "assert False, 'no'\n",
    ],
)
def test_output_and_tracebacks_are_those_of_the_interpreter(sandbox: LocalSandbox, code: str, tmp_path: Path) -> None:
    helper = "def f():\n    raise OSError(5, 'x')\n"
    (tmp_path / "main.py").write_text(code)
    (tmp_path / "helper.py").write_text(helper)
    command = [sys._base_executable, "-s", "-B", str(tmp_path / "main.py")]  # pyright: ignore[reportAttributeAccessIssue]
    real = subprocess.run(command, capture_output=True, text=True, env={"LANG": "C.UTF-8"}, check=False)
    result = run(sandbox, code, files={"helper.py": helper})
    ours, theirs = (re.sub(r'"[^"]*/(main|helper)\.py"', r'"\1.py"', text) for text in (result.stderr, real.stderr))
    assert (result.stdout, ours, result.exit) == (real.stdout, theirs, real.returncode)


def test_files_are_given_and_large_input_and_output_pass(sandbox: LocalSandbox) -> None:
    code = """
        import sys
        text = sys.stdin.read()
        print(open('sub/a.txt').read(), len(text))
        sys.stdout.write('y' * 1_000_000)
    """
    result = run(sandbox, code, "x" * 8_000_000, files={"sub/a.txt": "given\r\n"})
    assert result.status == "ok" and result.stdout.startswith("given\n 8000000\n") and result.stdout.endswith("yyy")
    assert len(result.stdout) > 1_000_000
    for name in ("../x", "/x", "", "a/../../x"):
        with pytest.raises(ValueError, match="not a file name inside"):
            run(sandbox, "", files={name: ""})


@pytest.mark.parametrize("name", BROKEN_LIMITS)
def test_what_breaks_a_limit_ends_with_its_status(sandbox: LocalSandbox, name: str) -> None:
    if name == "files" and "NO namespaces" in sandbox.isolation:
        pytest.skip("only a file system of its own can count all files of a program")
    code, status = BROKEN_LIMITS[name]
    # Programs that wait for the end of the wall time; the other limits are met long before it.
    limits = replace(SMALL, wall_s=3.0) if name in ("wall", "processes") else SMALL
    result = run(sandbox, code, limits=limits)
    assert result.status == status, result
    assert len(result.stdout) <= 64 * 1024 and len(result.stderr) <= 64 * 1024
    if status == "memory" and name != "memory_refused":
        assert 90 < result.memory_mb < 400
    if name == "processes":
        assert "can't start new thread" in result.stderr


def test_the_time_in_the_queue_is_not_run_time(sandbox: LocalSandbox) -> None:
    async def many() -> list[ExecResult]:
        limits = Limits(wall_s=4.0)
        return await asyncio.gather(
            *[
                sandbox.run("import time; time.sleep(1.0); print(input())", "python", str(i), limits=limits)
                for i in range(10)
            ]
        )

    # Ten runs of a second, two at a time: the last ones wait for longer than the limit.
    results = asyncio.run(many())
    assert [(result.status, result.stdout) for result in results] == [("ok", f"{i}\n") for i in range(10)]


def test_a_language_that_is_not_there_is_refused(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot run rust"):
        run(sandbox, "fn main() {}", language="rust")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    poorer = LocalSandbox(workers=1)
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        run(poorer, "int main() {}", language="cpp")
    poorer.close()
