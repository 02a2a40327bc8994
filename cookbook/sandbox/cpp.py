"""C++ in the local sandbox: the compiler runs inside the sandbox, and binaries are cached by source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from cookbook.sandbox.base import NOT_STARTED, Limits
from cookbook.sandbox.protocol import ARTIFACT
from cookbook.sandbox.worker import Outcome, Worker, WorkerError, memory_file

COMPILER = "g++"
SOURCE_NAME = "main.cpp"
_ARGUMENTS = (COMPILER, "-O2", "-std=c++17", "-pipe", "-o", ARTIFACT, SOURCE_NAME)
_CANNOT_EXECUTE = re.compile(
    rb"g\+\+: fatal error: cannot execute [^:\n]++: [a-z]++: [^:\n]++\ncompilation terminated\.\n"
)
_CACHE_BYTES = 256 << 20
_CACHE_FILES = 128
_MEMORY_MB = 2048
_FILE_MB = 64


def compile(worker: Worker, code: str, limits: Limits, target: int) -> Outcome:
    """Compile `code` into the open file `target` in a worker, with limits that suit a compiler."""
    seconds = limits.compile_s
    within = Limits(wall_s=seconds, cpu_s=seconds, memory_mb=_MEMORY_MB, processes=16, file_mb=_FILE_MB, output_kb=256)
    outcome = worker.run({SOURCE_NAME: code}, "", within, arguments=_ARGUMENTS, artifact=target)
    if outcome.exit in NOT_STARTED or _misses_a_part(outcome):
        raise WorkerError(f"{COMPILER} does not work: {outcome.stderr[-200:].decode(errors='replace').strip()}")
    return outcome


def _misses_a_part(outcome: Outcome) -> bool:
    """Whether the compiler could not start one of its own programs (cc1plus, as, ld).

    The message must be exactly that: a `#line` directive can put any text before a message about the source.
    """
    return outcome.exit == 1 and _CANNOT_EXECUTE.fullmatch(outcome.stderr) is not None


class Binary:
    """A compiled program: the descriptor of a sealed in-memory file, or None and the outcome of the compiler."""

    def __init__(self, descriptor: int | None, outcome: Outcome) -> None:
        self.descriptor = descriptor
        self.outcome = outcome
        self.size = 0 if descriptor is None else os.fstat(descriptor).st_size

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


class BinaryCache:
    """Binaries by source, each an open file. Evicts the least recently used beyond 256 MB or 128 files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._binaries: OrderedDict[bytes, Future[Binary]] = OrderedDict()

    def get(self, code: str, compile_s: float, compile_into: Callable[[int], Outcome]) -> Binary:
        """The binary of `code`. Threads that ask for the same new binary wait for one compilation.

        Args:
            code: the source.
            compile_s: the time limit of the compiler; part of the key, since a failure may be due to it.
            compile_into: compiles `code` into an open file.
        """
        key = hashlib.sha256(f"{compile_s} {code}".encode(errors="replace")).digest()
        with self._lock:
            future = self._binaries.get(key)
            mine = future is None
            if future is None:
                future = self._binaries[key] = Future()
            self._binaries.move_to_end(key)
        if mine:
            try:
                future.set_result(_compile(compile_into))
            except BaseException as error:
                with self._lock:
                    self._binaries.pop(key, None)
                future.set_exception(error)
                raise
            self._shrink()
        return future.result()

    def clear(self) -> None:
        with self._lock:
            self._binaries.clear()

    def _shrink(self) -> None:
        with self._lock:
            sizes = {
                key: future.result().size + 4096
                for key, future in self._binaries.items()
                if future.done() and not future.exception()
            }
            excess, too_many = sum(sizes.values()) - _CACHE_BYTES, len(sizes) - _CACHE_FILES
            for key, size in sizes.items():
                if excess <= 0 and too_many <= 0:
                    break
                del self._binaries[key]
                excess, too_many = excess - size, too_many - 1


def _compile(compile_into: Callable[[int], Outcome]) -> Binary:
    descriptor = memory_file("program", sealable=True)
    try:
        outcome = compile_into(descriptor)
        if outcome.broken or outcome.exit != 0:
            os.close(descriptor)
            return Binary(None, outcome)
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        )
    except BaseException:
        os.close(descriptor)
        raise
    return Binary(descriptor, outcome)
