"""Speed of the local sandbox on correct tiny programs, compared with a new interpreter per test and SandboxFusion.

    python benchmarks/sandbox.py [--programs 2000] [--tests 5] [--repeats 3] [--peer-programs 100] [--fusion-url URL]

A run is one program on one test. The peers are slow, so they get fewer programs (`--peer-programs`); the unit of
comparison is runs per second. All keep the same number of runs in flight, take turns, and every output is checked.
(a) `subprocess.run([sys.executable, file])` in threads: a timeout is the only limit, there is no isolation.
(b) SandboxFusion's server at `--fusion-url`, through `cookbook.sandbox.fusion`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cookbook.data.generated.tiny_programs import TinyPrograms
from cookbook.sandbox.base import Sandbox
from cookbook.sandbox.local import LocalSandbox
from cookbook.sandbox.problem import CodeProblem, StdinTests


@dataclass(frozen=True)
class Run:
    code: str
    stdin: str
    expected: str


Contestant = Callable[[list[Run]], None]


def tiny_runs(programs: int, tests: int) -> list[Run]:
    """Gold programs with their first tests, program by program."""
    runs = []
    for example in TinyPrograms(train_size=programs).train:
        problem = example.extra["problem"]
        assert isinstance(problem, CodeProblem) and isinstance(problem.tests, StdinTests)
        runs += [Run(example.extra["solution"], stdin, expected) for stdin, expected in problem.tests.cases[:tests]]
    return runs


async def limited(work: Callable[[Run], Awaitable[str]], runs: list[Run], in_flight: int) -> None:
    """Do all runs, `in_flight` at a time, and check what they printed."""
    queue = iter(runs)

    async def worker() -> None:
        for run in queue:
            check(run, await work(run))

    await asyncio.gather(*(worker() for _ in range(in_flight)))


def check(run: Run, printed: str) -> None:
    if printed.split() != run.expected.split():
        raise SystemExit(f"wrong output {printed!r}, expected {run.expected!r} of\n{run.code}")


def through(sandbox: Sandbox, in_flight: int) -> Contestant:
    async def work(run: Run) -> str:
        result = await sandbox.run(run.code, "python", run.stdin)
        return result.stdout if result.status == "ok" else f"{result.status}: {result.stderr}"

    return lambda runs: asyncio.run(limited(work, runs, in_flight))


def new_interpreters(folder: str, in_flight: int) -> Contestant:
    def work(numbered: tuple[int, Run]) -> None:
        number, run = numbered
        file = Path(folder, f"program{number}.py")
        file.write_text(run.code)
        command = [sys.executable, str(file)]
        check(run, subprocess.run(command, input=run.stdin, capture_output=True, text=True, timeout=60).stdout)

    def all_of(runs: list[Run]) -> None:
        with ThreadPoolExecutor(in_flight) as threads:
            list(threads.map(work, enumerate(runs)))

    return all_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--tests", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-programs", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--fusion-url")
    args = parser.parse_args()
    runs = tiny_runs(args.programs, args.tests)
    peer_runs = runs[: args.peer_programs * args.tests]
    local = LocalSandbox()
    with tempfile.TemporaryDirectory() as folder:
        contestants: dict[str, tuple[Contestant, list[Run]]] = {
            "LocalSandbox": (through(local, args.in_flight), runs),
            "(a) subprocess.run": (new_interpreters(folder, args.in_flight), peer_runs),
        }
        if args.fusion_url:
            from cookbook.sandbox.fusion import FusionSandbox

            fusion = FusionSandbox(base_url=args.fusion_url)
            contestants["(b) SandboxFusion"] = (through(fusion, args.in_flight), peer_runs)
        print(f"{args.programs} programs x {args.tests} tests, {args.in_flight} runs in flight, {os.cpu_count()} cores")
        print(f"isolation: {local.isolation}")
        print(f"the peers run only the first {args.peer_programs} of the programs")
        for work, some in contestants.values():  # Warm-up: everything is started and on disk before timing.
            work(some[: 4 * args.in_flight])
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(args.repeats):
            for name, (work, some) in contestants.items():
                start = time.perf_counter()
                work(some)
                speeds[name].append(len(some) / (time.perf_counter() - start))
        print(f"{'':20}{'runs':>8}{'min':>9}{'median':>9}{'max':>9} runs/s   LocalSandbox is")
        for name, measured in speeds.items():
            # Ratios within a repeat, since other load on the machine slows both.
            ratio = statistics.median(
                ours / theirs for ours, theirs in zip(speeds["LocalSandbox"], measured, strict=True)
            )
            middle = f"{min(measured):9.1f}{statistics.median(measured):9.1f}{max(measured):9.1f}"
            print(f"{name:20}{len(contestants[name][1]):8}{middle}{ratio:16.1f}x as fast")
    local.close()


if __name__ == "__main__":
    main()
