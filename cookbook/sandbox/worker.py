"""The host's side of a worker process (see `zygote`): starts it, gives it runs, and ends it."""

from __future__ import annotations

import json
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cookbook.sandbox.base import Limits
from cookbook.sandbox.protocol import MAX_MESSAGE

_ROOT = str(Path(__file__).parents[2])
# Run by a Python that sees only its standard library; the modules of this package are imported from its directory.
_BOOTSTRAP = """
import sys
sys.path[0] = sys.argv[1]
from cookbook.sandbox import zygote
del sys.path[0]
zygote.main(sys.argv[2:]).run()
"""
_PYTHON: str = sys._base_executable  # pyright: ignore[reportAttributeAccessIssue]
_START_S = 60.0
_GRACE_S = 15.0
_END_S = 5.0


class WorkerError(Exception):
    """A worker died, does not answer, or cannot start a program."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `broken` is the limit that it exceeded, `exit` the status of a program that exited by itself."""

    broken: Literal["timeout", "memory", "output"] | None
    exit: int | None
    stdout: bytes
    stderr: bytes
    cpu_s: float
    wall_s: float
    memory_mb: float


class Worker:
    """One worker process. Used by one thread at a time, except for `end`, which any thread may call.

    Args:
        namespaces: False uses none, as on a machine that allows none.

    Attributes:
        isolation: one line; see `Isolation.describe`.
        missing: why there are no namespaces; "" if there are.

    Raises:
        WorkerError: the process did not start.
    """

    def __init__(self, *, namespaces: bool = True) -> None:
        with ExitStack() as stack:
            self._busy = threading.Lock()
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(theirs.close)
            host = os.pidfd_open(os.getpid())
            stack.callback(os.close, host)
            errors = memory_file("errors")
            stack.callback(os.close, errors)
            arguments = [theirs.fileno(), host, int(namespaces), os.getpid(), -os.getpgrp()]
            try:
                self._process = subprocess.Popen(
                    # The base interpreter, also in a virtual environment: workers show its prefix to programs.
                    [_PYTHON, "-s", "-S", "-B", "-c", _BOOTSTRAP, _ROOT, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=(theirs.fileno(), host),
                    env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                raise WorkerError(f"a sandbox worker did not start: {error}") from None
            theirs.close()
            try:
                hello = self._receive(_START_S)
                if "error" in hello:
                    raise WorkerError(str(hello["error"]))
            except WorkerError as error:
                self.end()
                last_line = read_file(errors, 10_000).decode(errors="replace").strip().rpartition("\n")[2]
                raise WorkerError(f"a sandbox worker did not start: {error} {last_line}".strip()) from None
        self.isolation = str(hello["isolation"])
        self.missing = str(hello["missing"])

    def run(
        self,
        files: Mapping[str, str],
        stdin: str,
        limits: Limits,
        *,
        arguments: Sequence[str] = (),
        executable: int | None = None,
        artifact: int | None = None,
    ) -> Outcome:
        """Run one program and wait for its end. Blocks.

        Args:
            files: the content of its directory.
            stdin: its input.
            limits: its limits; `compile_s` is ignored.
            arguments: argv of a binary; empty for the Python program `main.py` among `files`.
            executable: an open file to execute with `arguments`, instead of a program on the PATH.
            artifact: an open file that receives the file `ARTIFACT` if the program succeeds.

        Raises:
            WorkerError: the worker cannot be used any more, or could not start the program. Says nothing about the
                program.
        """
        contents = {name: text.encode(errors="replace") for name, text in files.items()}
        given = marshal.dumps({"files": contents, "arguments": tuple(arguments)})
        extra = executable if executable is not None else artifact
        given_mb = len(given) // (1 << 20) + 1
        with ExitStack() as stack:

            def memory(name: str, content: bytes = b"") -> int:
                descriptor = memory_file(name, content)
                stack.callback(os.close, descriptor)
                return descriptor

            stdout, stderr = memory("stdout"), memory("stderr")
            descriptors = [memory("request", given), memory("stdin", stdin.encode(errors="replace")), stdout, stderr]
            order = {
                "limits": {
                    "cpu_s": limits.cpu_s,
                    "memory_mb": limits.memory_mb,
                    "processes": limits.processes,
                    # The kernel's limit on files also holds for stdout and stderr.
                    "file_mb": max(limits.file_mb, limits.output_kb // 1024 + 1),
                },
                "wall_s": limits.wall_s,
                "output_kb": limits.output_kb,
                "directory_mb": limits.file_mb + given_mb,
                "extra": None if extra is None else "executable" if executable is not None else "artifact",
            }
            with self._busy:
                try:
                    socket.send_fds(
                        self._control,
                        [json.dumps(order).encode()],
                        descriptors if extra is None else [*descriptors, extra],
                    )
                except OSError as error:
                    raise WorkerError(f"a sandbox worker has died: {error}") from None
                answer = self._receive(limits.wall_s + _GRACE_S)
            if answer["error"]:
                raise WorkerError(f"a sandbox worker could not run a program: {answer['error']}")
            limit = limits.output_kb * 1024
            texts = read_file(stdout, limit), read_file(stderr, limit)
        return Outcome(answer["broken"], answer["exit"], *texts, answer["cpu_s"], answer["wall_s"], answer["memory_mb"])

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            self._control.settimeout(timeout_s)
            message = self._control.recv(MAX_MESSAGE)
        except TimeoutError:
            raise WorkerError(f"a sandbox worker has not answered within {timeout_s:.0f} s") from None
        except OSError as error:
            raise WorkerError(f"a sandbox worker has died: {error}") from None
        if not message:
            raise WorkerError("a sandbox worker has died")
        return json.loads(message)

    def end(self) -> None:
        """End the worker and everything that it runs, and wait until all have ended. May be called again."""
        with suppress(OSError):  # The worker may have ended already.
            self._control.shutdown(socket.SHUT_WR)  # The worker treats this as the end of the host.
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._busy:  # A run in another thread has failed by now.
            if self._control.fileno() != -1:
                with suppress(WorkerError):
                    while True:  # Until all descendants of the process have closed the socket.
                        self._receive(_END_S)
                self._control.close()


def memory_file(name: str, content: bytes = b"", *, sealable: bool = False) -> int:
    """Make an anonymous file in memory, positioned at its beginning."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0))
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(descriptor: int, limit: int) -> bytes:
    """The first `limit` bytes of an open file, whatever its position."""
    parts: list[bytes] = []
    offset = 0
    while offset < limit and (part := os.pread(descriptor, min(limit - offset, 1 << 20), offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
