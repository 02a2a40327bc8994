"""Programs that attack the sandbox: each ends as it must, its neighbours come out right, and nothing of it is left.

The programs would harm the machine if nothing contained them, so all of this runs only where the sandbox isolates them.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.core.errors import ConfigError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.sandbox.base import ExecResult, Sandbox
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.problem import AssertTests, CallTests, CodeProblem
from rewards.code import CodeReward
from tests.sandbox.hostile_escapes import HOSTILE, PATCHES_EVERYTHING
from tests.sandbox.hostile_programs import LIMITS, MARKER, NAME_PROCESS, PATIENT, Hostile, contained
from tests.sandbox.hostile_watch import (
    REPOSITORY,
    descendants,
    harmless_run,
    nothing_left,
    processes_named,
    resident_mb,
    wait_until,
)

MARGIN_S = 3.0
"""How much later than its wall limit a run may end on a busy machine."""


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


REASON = linux_isolation()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no isolation: {REASON}")


def isolated_sandbox(workers: int) -> LocalSandbox:
    sandbox = LocalSandbox(workers=workers, require_isolation=True)
    # Never let the programs run where `kill(-1)` would reach this process.
    result = asyncio.run(sandbox.run("import os; print(os.readlink('/proc/self/ns/pid'))", "python"))
    assert result.status == "ok" and result.stdout.strip() != os.readlink("/proc/self/ns/pid"), result
    return sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    sandbox = isolated_sandbox(4)
    yield sandbox
    sandbox.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty directory that every user may enter, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


async def attack(sandbox: Sandbox, program: Hostile) -> ExecResult:
    """Run the program beside neighbours, at least two during it and one after it; check all of them."""
    limits = program.limits
    start = time.monotonic()
    running = asyncio.create_task(sandbox.run(program.source, program.language, program.stdin, None, limits))
    runs = 0
    while not running.done() or runs < 2:
        await asyncio.gather(harmless_run(sandbox, runs), asyncio.sleep(0.05))
        runs += 1
    result = await running
    allowed = limits.wall_s + MARGIN_S + (limits.compile_s if program.language == "cpp" else 0)
    assert time.monotonic() - start < allowed, f"took {time.monotonic() - start:.1f} s"
    await harmless_run(sandbox, runs)
    return result


def check(program: Hostile, result: ExecResult) -> None:
    assert result.status == program.status, (program.name, result)
    assert program.stdout is None or result.stdout == program.stdout, (program.name, result)
    assert program.leak is None or program.leak not in result.stdout + result.stderr, program.name
    assert program.exit is None or result.exit == program.exit, (program.name, result)


@pytest.mark.parametrize("program", HOSTILE, ids=lambda program: program.name)
def test_is_contained(sandbox: LocalSandbox, program: Hostile):
    check(program, asyncio.run(attack(sandbox, program)))
    nothing_left()


def test_sees_no_secret_of_the_parent_or_of_an_earlier_program(monkeypatch: pytest.MonkeyPatch):
    # The pattern does not match itself, so what it finds in the program's own memory was there before.
    hunts = """
import glob, os, re
pattern = re.compile(rb"hostile-secre[t]-\\w+")
def search(path):
    with open(path, "rb") as file:
        found = pattern.search(file.read())
    if not found:
        raise LookupError
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/task/*/environ"):
    attempt(path, search, path)
searched = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in maps:
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if line.split()[1].startswith("r") and "[v" not in line:
            try:
                memory.seek(begin)
                found = pattern.search(memory.read(end - begin))
            except (OSError, OverflowError):
                continue
            searched += 1
            if found:
                print("escaped: memory at", line)
if searched < 10:
    print("could not search its own memory")
"""
    secret = f"hostile-secret-{secrets.token_hex(8)}"
    monkeypatch.setenv("HOSTILE_SECRET", secret)
    sandbox = isolated_sandbox(1)
    try:
        earlier = asyncio.run(sandbox.run(f"print(input())  # {secret}", "python", secret, {"data.txt": secret}))
        assert earlier.stdout == f"{secret}\n"
        program = contained("hunts_for_secrets", hunts)
        check(program, asyncio.run(attack(sandbox, program)))
    finally:
        sandbox.close()


def test_a_worker_is_clean_after_a_program_that_patched_everything():
    sandbox = isolated_sandbox(1)

    async def in_turn() -> None:
        for number in range(4):
            check(PATCHES_EVERYTHING, await sandbox.run(PATCHES_EVERYTHING.source, "python", limits=PATIENT))
            await harmless_run(sandbox, number)

    try:
        asyncio.run(in_turn())
    finally:
        sandbox.close()


def test_reaches_no_socket(sandbox: LocalSandbox):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        datagrams.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{MARKER}")
        abstract.listen()
        for server in (listener, datagrams, abstract):
            server.setblocking(False)
        program = contained(
            "opens_sockets",
            """
import socket
stream, datagram = map(int, input().split())
attempt("loopback", socket.create_connection, ("127.0.0.1", stream), 0.5)
attempt("loopback by name", socket.create_connection, ("localhost", stream), 0.5)
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0MARKER"))
attempt("external", socket.create_connection, ("192.0.2.1", 80), 0.2)
attempt("external datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)))
attempt("raw", socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", datagram))
except OSError:
    pass
""",
            stdin=f"{listener.getsockname()[1]} {datagrams.getsockname()[1]}",
        )
        check(program, asyncio.run(attack(sandbox, program)))
        for server in (listener, abstract):
            with pytest.raises(BlockingIOError):
                server.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)


def test_writes_nothing_outside_its_directory(sandbox: LocalSandbox, folder: Path):
    folder.chmod(0o777)
    victim, private = folder / "victim", folder / "private"
    victim.write_text("untouched")
    private.write_text("private")
    victim.chmod(0o666)
    private.chmod(0o600)
    places = f"{REPOSITORY}|{Path.home()}|{folder}|{tempfile.gettempdir()}|/|/tmp|/var/tmp|/dev/shm|/mnt|/proc"
    program = contained(
        "writes_outside",
        """
import os
*places, victim, private = input().split("|")
def write(path):
    with open(path, "a") as file:
        file.write("MARKER")
def read(path):
    with open(path) as file:
        file.read(1)
attempt(private, read, private)
def quietly(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        pass
for number, place in enumerate([*places, "..", "../.."]):
    quietly(write, os.path.join(place, "MARKER"))
    quietly(os.mkdir, os.path.join(place, "MARKER-folder"))
    quietly(os.symlink, place, f"link{number}")
    quietly(write, f"link{number}/MARKER-link")
    quietly(os.link, victim, f"hard{number}")
    quietly(write, f"hard{number}")
os.symlink(victim, "victim")
for path in (victim, "victim", "/proc/1/root" + victim, "/proc/self/cwd/../.." + victim):
    quietly(write, path)
    quietly(os.chmod, path, 0)
    quietly(os.unlink, path)
quietly(os.rename, os.path.dirname(victim), "/tmp/MARKER")
# What clears this directory away must not follow a link out of it.
quietly(os.symlink, os.path.dirname(victim), "out")
""",
        stdin=f"{places}|{victim}|{private}",
    )
    check(program, asyncio.run(attack(sandbox, program)))
    nothing_left()
    assert sorted(path.name for path in folder.iterdir()) == ["private", "victim"]
    assert victim.read_text() == "untouched" and victim.stat().st_mode & 0o777 == 0o666


def test_a_hundred_leave_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    short = replace(LIMITS, wall_s=0.6, cpu_s=0.4, compile_s=20)
    before = descendants(os.getpid())
    sandbox = isolated_sandbox(4)

    async def all_of(programs: list[Hostile]) -> None:
        places = asyncio.Semaphore(4)

        async def one(number: int, program: Hostile) -> None:
            async with places:
                # Whatever the status: on a busy machine a limit this short may be reached before the one that is meant.
                limits = replace(short, compile_s=0.6) if program.status == "compile_error" else short
                await sandbox.run(program.source, program.language, program.stdin, None, limits)
                if number % 10 == 0:
                    await harmless_run(sandbox, number)

        await asyncio.gather(*(one(number, program) for number, program in enumerate(programs)))

    def state() -> tuple[int, int, int, list[str]]:
        mounts = len(Path("/proc/self/mounts").read_text().splitlines())
        shared = len(Path("/proc/sysvipc/shm").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), mounts, shared, sorted(path.name for path in folder.iterdir())

    try:
        mixed = (list(HOSTILE) * 3)[:100]
        # Compiled programs are kept, so that these are compiled before anything is measured.
        asyncio.run(all_of(mixed[:10] + [program for program in HOSTILE if program.language == "cpp"]))
        state_before, memory_before = state(), resident_mb(descendants(os.getpid()) | {os.getpid()})
        asyncio.run(all_of(mixed))
        nothing_left()
        assert wait_until(lambda: state() == state_before), (state_before, state())
        assert resident_mb(descendants(os.getpid()) | {os.getpid()}) < memory_before + 32
        asyncio.run(harmless_run(sandbox, 1000))
    finally:
        sandbox.close()
    assert wait_until(lambda: descendants(os.getpid()) <= before)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_run_that_is_given_up_ends(end: str):
    sandbox = isolated_sandbox(2)
    before = {program.name: program for program in HOSTILE}

    async def give_up() -> None:
        # A run that is cancelled is held by its limits; one that is closed ends at once.
        limits = replace(LIMITS, wall_s=2) if end == "cancel" else replace(LIMITS, wall_s=60, cpu_s=60)
        runs = [
            asyncio.create_task(sandbox.run(before[name].source, "python", limits=limits))
            for name in ("sleep_forever", "fork_bomb")
        ]
        while len(processes_named(MARKER)) < 2:
            assert not any(run.done() for run in runs)
            await asyncio.sleep(0.05)
        if end == "cancel":
            for run in runs:
                run.cancel()
            await asyncio.wait(runs, timeout=5)
            assert all(run.cancelled() for run in runs)
            assert wait_until(lambda: not processes_named(MARKER))
            await harmless_run(sandbox, 1)
        else:
            await asyncio.to_thread(sandbox.close)
            results = await asyncio.wait_for(asyncio.gather(*runs), 5)
            assert [result.status for result in results] == ["infrastructure_error"] * 2

    try:
        asyncio.run(give_up())
        nothing_left()
    finally:
        sandbox.close()


HOST = """
import asyncio, json, sys
from cookbook.sandbox.base import Limits
from cookbook.sandbox.local import LocalSandbox

async def main():
    sandbox = LocalSandbox(workers=4, require_isolation=True)
    await asyncio.gather(*(sandbox.run(source, "python", limits=Limits(wall_s=60, cpu_s=60)) for source in json.load(sys.stdin)))

asyncio.run(main())
"""


def test_a_killed_host_takes_its_programs_along():
    marker = f"orphan{os.getpid()}"
    programs = {program.name: program for program in HOSTILE}
    sources = [
        programs[name].source.replace(MARKER, marker) for name in ("sleep_forever", "fork_bomb", "ignores_every_signal")
    ]
    sources.append(
        NAME_PROCESS["python"].replace(MARKER, marker)
        + "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(10**6)"
    )
    host = subprocess.Popen([sys.executable, "-c", HOST], cwd=REPOSITORY, stdin=subprocess.PIPE, text=True)
    assert host.stdin
    try:
        host.stdin.write(json.dumps(sources))
        host.stdin.close()
        started = wait_until(lambda: len(processes_named(marker)) >= 5, 20)
        family = descendants(host.pid)
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    assert started and family
    assert wait_until(lambda: not processes_named(marker)), "a program outlived the host"
    assert wait_until(lambda: not [process for process in family if Path(f"/proc/{process}").exists()]), (
        "a worker outlived the host"
    )


ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    "program",
    [
        """
import atexit, sys
for stream in (sys.stdout, sys.stderr, sys.__stdout__):
    print("passed", '{"status": "ok", "passed": true, "result": 3}', "[3]", 3, sep="\\n", file=stream, flush=True)
def add(a, b):
    return 0
""",
        "import os\nos._exit(0)\n",
        """
import builtins, inspect, json, os, sys, unittest
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
json.dumps = lambda *a, **k: "3"
builtins.AssertionError = type("Never", (BaseException,), {})
builtins.isinstance = lambda *a: True
for frame in inspect.stack():
    for name, value in frame.frame.f_globals.items():
        if callable(value) and "check" in name or "assert" in name or "judge" in name:
            frame.frame.f_globals[name] = lambda *a, **k: True
sys.exit = os._exit = lambda *a: None
def add(a, b):
    return Equal(7)
""",
    ],
    ids=["prints_a_passed_marker", "exits_before_the_tests", "patches_the_harness"],
)
def test_a_program_cannot_pass_its_own_tests(sandbox: LocalSandbox, program: str):
    kinds = (
        CodeProblem(AssertTests(("assert add(1, 2) == 3", "assert add(2, 2) == 4"), ("add",))),
        CodeProblem(CallTests("add", (((1, 2), 3), ((2, 2), 4)))),
    )
    reward = CodeReward(sandbox=sandbox)

    async def grade() -> list[RewardResult]:
        examples = [Example(f"x/{number}", (), "", {"problem": problem}) for number, problem in enumerate(kinds)]
        calls = [(text, example) for example in examples for text in (program, ADD)]
        return await asyncio.gather(
            *(reward(Completion(f"```python\n{text}```", "eos", 1), example) for text, example in calls)
        )

    hostile, honest, hostile_too, honest_too = asyncio.run(grade())
    assert [(result.value, result.status) for result in (hostile, hostile_too)] == [(0.0, "wrong")] * 2
    assert [(result.value, result.status) for result in (honest, honest_too)] == [(1.0, "correct")] * 2
