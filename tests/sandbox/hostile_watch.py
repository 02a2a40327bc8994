"""Checks for the tests of hostile programs: a harmless program beside them, and what is left of them on the machine."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cookbook.core.errors import ConfigError
from cookbook.sandbox.base import Limits, Sandbox
from cookbook.sandbox.local import LocalSandbox
from tests.sandbox.hostile_programs import MARKER

REPOSITORY = Path(__file__).parents[2]

NEIGHBOUR = """
import builtins, json, math, os, random, re, signal, sys, time, types
for name in ("open", "int", "sum", "len", "input", "print", "__import__"):
    assert isinstance(getattr(builtins, name), (type, types.BuiltinFunctionType)), name
for function in (json.loads, math.sqrt, os.fork, random.random, re.compile, time.sleep):
    assert function.__name__ in ("loads", "sqrt", "fork", "random", "compile", "sleep"), function
assert sys.getrecursionlimit() == 1000 and sys.getswitchinterval() == 0.005
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
assert not [name for name in os.environ if name.startswith("hostile")]
assert [name for name in os.listdir() if not name.endswith('.py')] == ["data.txt"], os.listdir()
with open("made.txt", "w") as file:
    file.write("1")
assert open("made.txt").read() == open("data.txt").read() == "1"
assert not [name for name in globals() if name in ("attempt", "others", "shared")]
print(sum(map(int, input().split())), random.random())
"""
"""A harmless program that fails wherever another one left a trace in it."""

seen_random: set[str] = set()


def linux_isolation() -> str | None:
    """Why the programs cannot be contained on this machine; None where they can."""
    if sys.platform != "linux":
        return "the programs are written for Linux"
    try:
        sandbox = LocalSandbox(workers=1, require_isolation=True)
    except ConfigError as error:
        return str(error)
    sandbox.close()
    return None


NO_ISOLATION = linux_isolation()


def isolated_sandbox(workers: int) -> LocalSandbox:
    sandbox = LocalSandbox(workers=workers, require_isolation=True)
    # Never let the programs run where `kill(-1)` would reach this process.
    result = asyncio.run(sandbox.run("import os; print(os.readlink('/proc/self/ns/pid'))", "python"))
    assert result.status == "ok" and result.stdout.strip() != os.readlink("/proc/self/ns/pid"), result
    return sandbox


async def harmless_run(sandbox: Sandbox, number: int) -> None:
    """One run of the neighbour program, which must come out right."""
    result = await sandbox.run(NEIGHBOUR, "python", f"{number} 2 3", {"data.txt": "1"}, Limits(wall_s=20, cpu_s=10))
    assert (result.status, result.stdout.split()[:1]) == ("ok", [str(number + 5)]), result
    drawn = result.stdout.split()[1]
    assert drawn not in seen_random, "two programs drew the same random number"
    seen_random.add(drawn)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Whether the condition came true in time. The kernel takes a moment to reap what was killed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_named(marker: str) -> list[int]:
    """Processes of the machine that bear the marker as their name or in their arguments, zombies included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                named = (folder / "comm").read_text().strip() == marker or marker.encode() in (
                    folder / "cmdline"
                ).read_bytes()
            except OSError:
                continue
            if named:
                found.append(int(folder.name))
    return found


def descendants(ancestor: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name, in parentheses, may hold anything; the parent is the second field after it.
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found: set[int] = set()
    while grown := {child for child, parent in parents.items() if parent in found | {ancestor}} - found:
        found |= grown
    return found


def resident_mb(processes: set[int]) -> float:
    total = 0
    for process in processes:
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def marked_files() -> list[Path]:
    """Files with the marker in their name, wherever a program may have put one."""
    places = {
        REPOSITORY,
        Path("/"),
        Path("/tmp"),
        Path("/var/tmp"),
        Path("/dev/shm"),
        Path("/mnt"),
        Path.home(),
        Path(tempfile.gettempdir()),
    }
    return [path for place in places if place.is_dir() for path in place.iterdir() if MARKER in path.name]


def nothing_left() -> None:
    assert wait_until(lambda: not processes_named(MARKER)), "a process survived"
    assert not marked_files()
