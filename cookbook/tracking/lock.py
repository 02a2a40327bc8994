"""The lock of a run folder: the file `run.lock` names the process that writes there."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from cookbook.core.errors import CheckpointError

LOCK_FILE = "run.lock"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    `started` tells it from a later process with the same number, where the system says when a process started. `inode`
    is that of the lock file: a copy of the folder is not locked.
    """

    pid: int
    host: str
    since: str
    started: int | None
    inode: int

    def is_alive(self) -> bool:
        """Whether it runs. Of a process on another host this cannot be known; it is taken to run."""
        if self.host != socket.gethostname():
            return True
        started = _start_of(self.pid)
        if started is not None or self.started is not None:
            return started is not None and started == self.started
        return _exists(self.pid)


def holder(folder: Path) -> Holder | None:
    """The process that runs in a folder; None where there is none, or where it has died."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            return _read(file)
    except OSError:
        return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder. That of a process which has died is taken over.

    Raises:
        CheckpointError: another process runs there, or so does this one.
        OSError: the file cannot be written.
    """
    file = folder / LOCK_FILE
    with _exclusively(file, "a+b") as stream:
        other = _read(stream)
        if other is not None:
            raise CheckpointError(
                f"run_dir={folder}: process {other.pid} on {other.host} has been running there since {other.since}; "
                f"wait for it, or choose another run_dir (if that process is gone, delete {file})"
            )
        own = Holder(
            os.getpid(),
            socket.gethostname(),
            datetime.now(UTC).isoformat(timespec="seconds"),
            _start_of(os.getpid()),
            os.fstat(stream.fileno()).st_ino,
        )
        stream.truncate(0)
        stream.write(json.dumps(asdict(own)).encode())
    try:
        yield
    finally:
        with suppress(OSError), _exclusively(file, "rb") as stream:  # the folder may have been moved or deleted
            if os.getpid() == own.pid and _read(stream) == own:
                file.unlink()


@contextmanager
def _exclusively(file: Path, mode: str) -> Iterator[IO[bytes]]:
    """The lock file, open and closed to other processes, which look at it one after the other."""
    while True:
        with file.open(mode) as stream:
            with suppress(OSError):  # a file system without such locks
                fcntl.flock(stream, fcntl.LOCK_EX)
            if not _is_same(file, stream):  # its holder has deleted it in between
                continue
            yield stream
            return


def _is_same(file: Path, stream: IO[bytes]) -> bool:
    try:
        return file.stat().st_ino == os.fstat(stream.fileno()).st_ino
    except FileNotFoundError:
        return False


def _read(stream: IO[bytes]) -> Holder | None:
    """The holder that a lock file names, if it is alive and the file is not a copy."""
    stream.seek(0)
    try:
        found = Holder(**json.loads(stream.read()))
    except (ValueError, TypeError):  # empty, or cut off by a crash
        return None
    return found if found.inode == os.fstat(stream.fileno()).st_ino and found.is_alive() else None


def _start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since the system did; None where the process or `/proc` is missing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
