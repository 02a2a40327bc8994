"""The interface of a sandbox: the protocol, the limits of a run, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Language = Literal["python", "cpp", "java", "go", "rust", "javascript"]

ExecStatus = Literal["ok", "runtime_error", "timeout", "memory", "output", "compile_error", "infrastructure_error"]
"""How a run ended. "ok" is exit status 0 and "runtime_error" any other exit of the program; "timeout", "memory" and
"output" name the limit that it exceeded. "infrastructure_error" says nothing about the program: the sandbox failed, or
it has no compiler or interpreter for the language."""

NOT_STARTED = frozenset({126, 127})
"""Exit statuses by which a shell says that it could not execute a command or did not find it. A program may exit with
them too; a compiler does not."""


@dataclass(frozen=True)
class Limits:
    """The limits of one run. Time spent waiting for a free worker, or compiling, does not count towards `wall_s`."""

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    """Resident memory of all processes of the run together."""
    processes: int = 16
    """Processes and threads at the same time."""
    file_mb: int = 16
    """Size of the largest file, and of all files together."""
    output_kb: int = 1024
    """Size of stdout, and of stderr; a program that writes more is killed and has the status "output"."""
    compile_s: float = 30.0
    """Wall time of the compiler."""


@dataclass(frozen=True)
class ExecResult:
    """The result of one run. `stdout` and `stderr` are decoded as UTF-8 with replacements, up to `output_kb`."""

    status: ExecStatus
    stdout: str
    stderr: str
    exit: int | None
    """The exit status, negative for a signal; None if the program was killed at a limit or never ran."""
    cpu_s: float
    wall_s: float
    memory_mb: float
    """Peak resident memory; 0 if the sandbox does not measure it."""


class Sandbox(Protocol):
    """Runs programs concurrently. May be used from any thread and any event loop."""

    @property
    def languages(self) -> frozenset[Language]: ...

    @property
    def python_modules(self) -> frozenset[str] | None:
        """The top-level modules that Python programs can import; None where they are not known."""
        ...

    @property
    def isolation(self) -> str:
        """One line that says how programs are isolated from the machine."""
        ...

    async def run(
        self,
        code: str,
        language: Language,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run one program in its own directory, which holds `files` (relative names and contents).

        What the program does is a status, never an exception, and so is a failure of the sandbox after its retries.

        Raises:
            ConfigError: the sandbox does not support the language.
        """
        ...

    def close(self) -> None:
        """End all runs and free all resources. Called automatically when the sandbox is collected or Python exits."""
        ...
