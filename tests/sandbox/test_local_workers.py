"""Workers of the local sandbox: they are replaced when they die, and nothing outlives the sandbox or its host."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cookbook.core.errors import ConfigError
from cookbook.sandbox.base import ExecResult, Limits
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.worker import Worker, WorkerError
from tests.sandbox.local_runs import (
    chain,
    eventually,
    idle_zygotes,
    isolation,
    needs_linux,
    num_running,
    run,
)

pytestmark = needs_linux


def test_a_worker_that_dies_is_replaced_and_its_run_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = LocalSandbox(workers=1)
    for number in (signal.SIGKILL, signal.SIGKILL):
        os.kill(idle_zygotes(sandbox)[0], number)
        assert run(sandbox, "print(1)").stdout == "1\n"
    # In the middle of a run.
    results: list[ExecResult] = []
    thread = threading.Thread(target=lambda: results.append(run(sandbox, "import time; time.sleep(1.0); print(2)")))
    zygote = idle_zygotes(sandbox)[0]
    thread.start()
    assert eventually(lambda: num_running(sandbox) == 1)
    os.kill(next(iter(sandbox._pool._all))._process.pid, signal.SIGKILL)
    thread.join()
    assert results[0].stdout == "2\n" and eventually(lambda: not os.path.exists(f"/proc/{zygote}"))

    def broken(*_: object, **__: object) -> None:
        raise WorkerError("a sandbox worker has died")

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", broken)
        failed = run(sandbox, "print(1)")
    assert (failed.status, failed.exit) == ("infrastructure_error", None) and "died" in failed.stderr
    assert run(sandbox, "print(3)").stdout == "3\n"
    sandbox.close()


def test_closing_ends_everything_and_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    sandbox = LocalSandbox(workers=2)

    async def closed_while_running() -> list[ExecResult | BaseException]:
        patient = Limits(wall_s=600)
        runs = [
            asyncio.ensure_future(sandbox.run("import time; time.sleep(600)", "python", limits=patient))
            for _ in range(3)
        ]
        while num_running(sandbox) < 2:
            await asyncio.sleep(0.02)
        sandbox.close()
        return await asyncio.gather(*runs, return_exceptions=True)

    pids = idle_zygotes(sandbox)
    results = asyncio.run(closed_while_running())
    assert {result.status if isinstance(result, ExecResult) else "cancelled" for result in results} == {
        "infrastructure_error",
        "cancelled",
    }
    sandbox.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    with pytest.raises(ConfigError, match="closed"):
        run(sandbox, "")
    assert eventually(lambda: set(os.listdir("/proc/self/fd")) <= before)


def test_a_sandbox_that_is_forgotten_is_closed() -> None:
    sandbox = LocalSandbox(workers=1)
    run(sandbox, "")
    pids = idle_zygotes(sandbox)
    del sandbox
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


@pytest.mark.parametrize("namespaces", [True, False])
def test_workers_and_programs_die_with_a_killed_host(namespaces: bool) -> None:
    code = f"""
import asyncio, threading
from cookbook.sandbox import local
from cookbook.sandbox.base import Limits
local.USE_NAMESPACES = {namespaces}
sandbox = local.LocalSandbox(workers=1)
sleep = "import time; time.sleep(600)"
runs = threading.Thread(target=lambda: asyncio.run(sandbox.run(sleep, "python", limits=Limits(wall_s=600))))
runs.start()
print(next(iter(sandbox._pool._all))._process.pid, flush=True)
runs.join()  # an interpreter that ends refuses new work
"""
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as host:
        assert host.stdout is not None
        worker = int(host.stdout.readline())
        # With namespaces a process waits for the zygote; the last one is the program.
        length = 3 if namespaces and "NO namespaces" not in isolation() else 2
        assert eventually(lambda: len(chain(worker)) == length)
        pids = chain(worker)
        host.kill()
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
