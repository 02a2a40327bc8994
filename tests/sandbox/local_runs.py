"""Programs, limits and helpers that the tests of the local sandbox share."""

import asyncio
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cookbook.sandbox.base import ExecResult, Language, Limits
from cookbook.sandbox.local import LocalSandbox

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the local sandbox needs Linux")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def isolation() -> str:
    """What stands between a program and this machine."""
    if sys.platform != "linux":
        return "NO namespaces (not Linux)"
    sandbox = LocalSandbox(workers=1)
    sandbox.close()
    return sandbox.isolation


def run(
    sandbox: LocalSandbox,
    code: str,
    stdin: str = "",
    *,
    language: Language = "python",
    files: dict[str, str] | None = None,
    limits: Limits | None = None,
) -> ExecResult:
    return asyncio.run(sandbox.run(textwrap.dedent(code), language, stdin, files, limits))


def eventually(happened: Callable[[], bool], within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if happened():
            return True
        time.sleep(0.02)
    return False


def chain(pid: int) -> list[int]:
    """The process and its first child, that one's first child, and so on. One that ends meanwhile is not among them."""
    pids = []
    with suppress(FileNotFoundError, ProcessLookupError):
        children = [str(pid)]
        while children:
            below = Path(f"/proc/{children[0]}/task/{children[0]}/children").read_text().split()
            pids.append(int(children[0]))
            children = below
    return pids


def idle_zygotes(sandbox: LocalSandbox) -> list[int]:
    """The last process in line of each worker, none of which runs a program."""
    return [chain(worker._process.pid)[-1] for worker in sandbox._pool._all]


def num_running(sandbox: LocalSandbox) -> int:
    """How many workers have a run."""
    return sum(worker._busy.locked() for worker in list(sandbox._pool._all))


SMALL = Limits(wall_s=20.0, cpu_s=0.5, memory_mb=100, processes=8, file_mb=2, output_kb=64)

BROKEN_LIMITS = {
    "cpu": ("while True: pass", "timeout"),
    "cpu_of_children": ("import os\nfor _ in range(3): os.fork()\nwhile True: pass", "timeout"),
    "wall": ("import time; time.sleep(60)", "timeout"),
    "memory": (
        "x = bytearray(200 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(60)",
        "memory",
    ),
    "memory_of_children": (
        "import os, time\nos.fork(); os.fork()\nx = b'x' * (40 << 20)\ntime.sleep(60)",
        "memory",
    ),
    "memory_refused": ("bytearray(10 << 30)", "memory"),
    "stdout": ("while True: print('x' * 1000)", "output"),
    "stderr": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "file": ("open('f', 'wb').write(b'x' * (3 << 20))", "runtime_error"),
    "files": ("for i in range(9): open(str(i), 'wb').write(b'x' * (1 << 20))", "runtime_error"),
    "processes": (
        "import threading, time\nfor i in range(20): threading.Thread(target=time.sleep, args=(60,)).start()",
        "timeout",
    ),
    "descriptors": ("import os\nwhile True: os.dup(0)", "runtime_error"),
}
