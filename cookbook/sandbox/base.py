"""What a sandbox is: a place where a program that nobody trusts runs within limits, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Language = Literal["python", "cpp", "java", "go", "rust", "javascript"]

ExecStatus = Literal["ok", "runtime_error", "timeout", "memory", "output", "compile_error", "infrastructure_error"]
"""How a run ended. "ok" is exit status 0; "runtime_error" any other end of the program's own making; "timeout", "memory" and
"output" name the limit that it broke. "infrastructure_error" says nothing about the program: the sandbox itself failed."""


@dataclass(frozen=True)
class Limits:
    """What one run may use. Time spent waiting for a free place in the sandbox, or compiling, does not count towards `wall_s`."""

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    """Resident memory of all its processes together."""
    processes: int = 16
    """Processes and threads at once."""
    file_mb: int = 16
    """Largest file, and largest sum of its files."""
    output_kb: int = 1024
    """Of stdout, and the same again of stderr; a program that writes more is ended with the status "output"."""
    compile_s: float = 30.0
    """Wall time of the compiler."""


@dataclass(frozen=True)
class ExecResult:
    """What became of one run. `stdout` and `stderr` are decoded as UTF-8, invalid bytes replaced, cut at `Limits.output_kb`."""

    status: ExecStatus
    stdout: str
    stderr: str
    exit: int | None
    """The exit status, negative for a signal; None where there was none to see."""
    cpu_s: float
    wall_s: float
    memory_mb: float
    """Largest resident memory seen; 0 where the sandbox cannot tell."""


class Sandbox(Protocol):
    """Runs programs, many at a time. Usable from any thread and any event loop."""

    @property
    def languages(self) -> frozenset[Language]: ...

    @property
    def isolation(self) -> str:
        """One line: what stands between a program and the machine."""
        ...

    async def run(
        self,
        code: str,
        language: Language,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run one program in a directory of its own that holds `files` (relative names and their contents).

        Whatever the program does is a status, never an exception; so is a failure of the sandbox, after the retries it is allowed.

        Raises:
            ConfigError: the sandbox does not have the language.
        """
        ...

    def close(self) -> None:
        """End every run and free everything. Called by itself when the sandbox is collected or the program ends."""
        ...
