"""Programs that attack the sandbox: each ends as it must, its neighbours come out right, and nothing of it is left.

The programs would harm the machine if nothing contained them, so all of this runs only where the sandbox isolates them.
"""

import asyncio
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.sandbox.base import ExecResult, Sandbox
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.problem import AssertTests, CallTests, CodeProblem
from rewards.code import CodeReward
from tests.sandbox.hostile_escapes import HOSTILE, PATCHES_EVERYTHING
from tests.sandbox.hostile_programs import MARKER, PATIENT, Hostile, contained
from tests.sandbox.hostile_watch import NO_ISOLATION, REPOSITORY, harmless_run, isolated_sandbox, nothing_left

PATIENCE_S = 120.0
"""A run that has not ended this long after its limit was not ended by it."""

pytestmark = pytest.mark.skipif(NO_ISOLATION is not None, reason=f"no isolation: {NO_ISOLATION}")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    sandbox = isolated_sandbox(4)
    yield sandbox
    sandbox.close()


async def attack(sandbox: Sandbox, program: Hostile) -> ExecResult:
    """Run the program beside neighbours, at least two during it and one after it; check all of them."""
    limits, runs = program.limits, 0
    async with asyncio.timeout(PATIENCE_S):
        running = asyncio.create_task(sandbox.run(program.source, program.language, program.stdin, None, limits))
        while not running.done() or runs < 2:
            await asyncio.gather(harmless_run(sandbox, runs), asyncio.sleep(0.05))
            runs += 1
    result = await running
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
