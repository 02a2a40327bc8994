"""The local sandbox: runs Python and C++ programs on this machine, isolated by Linux (see docs/sandbox.md)."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath

from cookbook.core.errors import ConfigError
from cookbook.core.notices import notice
from cookbook.sandbox import cpp
from cookbook.sandbox.base import ExecResult, ExecStatus, Language, Limits
from cookbook.sandbox.protocol import INTERPRETED_NAME
from cookbook.sandbox.worker import Outcome, Worker, WorkerError

_ATTEMPTS = 2
_SIGABRT = -6


class LocalSandbox:
    """A `Sandbox` of worker processes on this machine (Linux), each of which runs one program at a time.

    It runs Python of this interpreter's version with only the standard library, and C++ if `g++` is installed.

    Args:
        workers: number of programs that run at the same time; None is one per processor that this process may use.
        require_isolation: refuse to work without namespaces.
        wall_s, cpu_s, memory_mb, processes, file_mb, output_kb, compile_s: the `Limits` of runs that set none.

    Raises:
        ConfigError: not Linux, no namespaces although they are required, or workers do not start.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        require_isolation: bool = False,
        wall_s: float = Limits.wall_s,
        cpu_s: float = Limits.cpu_s,
        memory_mb: int = Limits.memory_mb,
        processes: int = Limits.processes,
        file_mb: int = Limits.file_mb,
        output_kb: int = Limits.output_kb,
        compile_s: float = Limits.compile_s,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                f"sandbox: the local sandbox needs Linux, but this is {sys.platform}; use sandbox=sandbox_fusion"
            )
        if workers is not None and workers < 1:
            raise ConfigError(
                f"sandbox.workers: {workers} is not a number of workers; set 1 or more, or null for one per processor"
            )
        self._limits = Limits(
            wall_s=wall_s,
            cpu_s=cpu_s,
            memory_mb=memory_mb,
            processes=processes,
            file_mb=file_mb,
            output_kb=output_kb,
            compile_s=compile_s,
        )
        languages: set[Language] = {"python"}
        if shutil.which(cpp.COMPILER, path="/usr/local/bin:/usr/bin:/bin"):
            languages.add("cpp")
        self._languages = frozenset(languages)
        self._pool = _Pool(workers or len(os.sched_getaffinity(0)))
        self._finalizer = weakref.finalize(self, self._pool.close)
        try:
            self._isolation, missing = self._pool.probe()
        except WorkerError as error:
            self.close()
            raise ConfigError(f"sandbox: {error}") from None
        if missing and require_isolation:
            self.close()
            raise ConfigError(
                f"sandbox.require_isolation: this machine has no namespaces for programs ({missing}); allow "
                "unprivileged user namespaces, run as root with CAP_SYS_ADMIN, use sandbox=sandbox_fusion, "
                "or set it to false"
            )
        notice(f"sandbox: {self._isolation}")

    @property
    def languages(self) -> frozenset[Language]:
        return self._languages

    @property
    def python_modules(self) -> frozenset[str]:
        """Those of the standard library."""
        return sys.stdlib_module_names

    @property
    def isolation(self) -> str:
        return self._isolation

    async def run(
        self,
        code: str,
        language: Language,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """See `Sandbox.run`. A cancelled run that waits for a worker never starts; a running one ends by its limits.

        Raises:
            ConfigError: the sandbox does not support the language, or is closed.
            ValueError: a name in `files` is outside the program's directory.
        """
        if language not in self._languages:
            hint = f"install {cpp.COMPILER}" if language == "cpp" else "use sandbox=sandbox_fusion"
            raise ConfigError(f"sandbox: the local sandbox cannot run {language}; {hint}")
        given = dict(files or {})
        for name in given:
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts or "\0" in name:
                raise ValueError(f"{name!r} is not a file name inside the program's directory")
        work = partial(_run_program, self._pool, code, language, stdin, given, limits or self._limits)
        return await asyncio.wrap_future(self._pool.submit(work))

    def close(self) -> None:
        self._finalizer()


class _Pool:
    """Workers and the threads that use them. Does not refer to its sandbox, so that the sandbox can be collected."""

    def __init__(self, size: int) -> None:
        self._executor = ThreadPoolExecutor(size, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False
        self.binaries = cpp.BinaryCache()

    def probe(self) -> tuple[str, str]:
        """Start the first worker and test it. Returns its isolation, and why it has no namespaces ("" if it has)."""
        worker = self._take()
        outcome = worker.run({INTERPRETED_NAME: ""}, "", Limits())
        if outcome.exit != 0:
            raise WorkerError(f"a sandbox worker could not run an empty program: {outcome}")
        self._idle.append(worker)
        return worker.isolation, worker.missing

    def submit(self, work: Callable[[], ExecResult]) -> Future[ExecResult]:
        if self._closed:
            raise ConfigError("sandbox: the local sandbox is closed; create a new one")
        return self._executor.submit(work)

    def run(self, work: Callable[[Worker], Outcome]) -> Outcome:
        """Do `work` on a free worker, and on another one if the first fails.

        Raises:
            WorkerError: the second one failed too.
        """
        attempt = 1
        while True:
            worker = self._take()
            try:
                outcome = work(worker)
            except BaseException as error:
                self._discard(worker)
                if not isinstance(error, WorkerError) or self._closed or attempt == _ATTEMPTS:
                    raise
                attempt += 1
                continue
            with self._lock:
                self._idle.append(worker)
            return outcome

    def _take(self) -> Worker:
        """A free worker, or a new one. There are never more workers than threads."""
        with self._lock:
            if self._closed:
                raise WorkerError("the sandbox was closed")
            if self._idle:
                return self._idle.pop()
        worker = Worker(namespaces=USE_NAMESPACES)
        with self._lock:
            self._all.add(worker)
            closed = self._closed
        if closed:
            self._discard(worker)
            raise WorkerError("the sandbox was closed")
        return worker

    def _discard(self, worker: Worker) -> None:
        worker.end()
        with self._lock:
            self._all.discard(worker)

    def close(self) -> None:
        """End all workers. Waiting runs are cancelled; current runs end as infrastructure errors."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
            self._idle.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            self._discard(worker)
        self.binaries.clear()


USE_NAMESPACES = True
"""Tests set this to False to emulate a machine without namespaces."""


def _run_program(
    pool: _Pool, code: str, language: Language, stdin: str, files: dict[str, str], limits: Limits
) -> ExecResult:
    """Blocks until the program has ended."""
    try:
        if language == "python":
            sources = {**files, INTERPRETED_NAME: code}
            return _result(pool.run(lambda worker: worker.run(sources, stdin, limits)))
        binary = pool.binaries.get(
            code, limits.compile_s, lambda target: pool.run(lambda worker: cpp.compile(worker, code, limits, target))
        )
        if binary.descriptor is None:
            return _result(binary.outcome, "compile_error")
        return _result(
            pool.run(
                lambda worker: worker.run(files, stdin, limits, arguments=("./program",), executable=binary.descriptor)
            )
        )
    except WorkerError as error:
        return ExecResult("infrastructure_error", "", str(error), None, 0.0, 0.0, 0.0)
    except OSError as error:  # The host is short of descriptors, memory or processes.
        return ExecResult(
            "infrastructure_error", "", f"the sandbox could not run a program: {error}", None, 0.0, 0.0, 0.0
        )


def _result(outcome: Outcome, status: ExecStatus | None = None) -> ExecResult:
    stdout, stderr = (stream.decode("utf-8", errors="replace") for stream in (outcome.stdout, outcome.stderr))
    if status == "compile_error" and outcome.broken:
        stderr += f"\nthe compiler was killed at its limit: {outcome.broken}"
    status = status or outcome.broken or ("ok" if outcome.exit == 0 else "runtime_error")
    if status == "runtime_error" and _ran_out_of_memory(outcome.exit, stderr):
        status = "memory"
    return ExecResult(status, stdout, stderr, outcome.exit, outcome.cpu_s, outcome.wall_s, outcome.memory_mb)


def _ran_out_of_memory(status: int | None, stderr: str) -> bool:
    """Whether the program says that it got no memory. Believing it is harmless, since the program failed anyway."""
    last_line = stderr.rstrip().rpartition("\n")[2]
    return (status == 1 and last_line.startswith("MemoryError")) or (status == _SIGABRT and "std::bad_alloc" in stderr)
