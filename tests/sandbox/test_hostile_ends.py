"""Hostile programs leave nothing behind: after a hundred runs, an abandoned run, and a host that is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sandbox.hostile_escapes import HOSTILE
from tests.sandbox.hostile_programs import LIMITS, MARKER, NAME_PROCESS, Hostile
from tests.sandbox.hostile_watch import (
    NO_ISOLATION,
    REPOSITORY,
    descendants,
    harmless_run,
    isolated_sandbox,
    nothing_left,
    processes_named,
    resident_mb,
    wait_until,
)

pytestmark = pytest.mark.skipif(NO_ISOLATION is not None, reason=f"no isolation: {NO_ISOLATION}")


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
    programs = {program.name: program for program in HOSTILE}

    async def give_up() -> None:
        # A run that is cancelled is held by its limits; one that is closed ends at once.
        limits = replace(LIMITS, wall_s=2) if end == "cancel" else replace(LIMITS, wall_s=60, cpu_s=60)
        runs = [
            asyncio.create_task(sandbox.run(programs[name].source, "python", limits=limits))
            for name in ("sleep_forever", "fork_bomb")
        ]
        while len(processes_named(MARKER)) < 2:
            assert not any(run.done() for run in runs)
            await asyncio.sleep(0.05)
        if end == "cancel":
            for run in runs:
                run.cancel()
            await asyncio.wait(runs, timeout=30)
            assert all(run.cancelled() for run in runs)
            assert wait_until(lambda: not processes_named(MARKER))
            await harmless_run(sandbox, 1)
        else:
            await asyncio.to_thread(sandbox.close)
            results = await asyncio.wait_for(asyncio.gather(*runs), 30)
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
    limits = Limits(wall_s=600, cpu_s=600)
    await asyncio.gather(*(sandbox.run(source, "python", limits=limits) for source in json.load(sys.stdin)))

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
        started = wait_until(lambda: len(processes_named(marker)) >= 5, 60)
        family = descendants(host.pid)
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    assert started and family
    assert wait_until(lambda: not processes_named(marker)), "a program outlived the host"
    assert wait_until(lambda: not [process for process in family if Path(f"/proc/{process}").exists()]), (
        "a worker outlived the host"
    )
