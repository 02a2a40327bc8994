"""What SandboxFusion's `POST /run_code` is sent and answers, in the words of `cookbook.sandbox.base`.

Source: github.com/bytedance/SandboxFusion, sandbox/server/sandbox_api.py (RunCodeRequest, RunCodeResponse, parse_run_status) and
sandbox/runners (CommandRunResult, what is run for each language, and how its limits are set).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from cookbook.sandbox.base import ExecResult, ExecStatus, Language, Limits

SERVER_LANGUAGE: Mapping[Language, str] = {
    "python": "python",
    "cpp": "cpp",
    "java": "java",
    "go": "go",
    "rust": "rust",
    "javascript": "nodejs",
}
COMPILED: frozenset[Language] = frozenset({"cpp", "java", "go", "rust"})

MEMORY_FLOOR_MB: Mapping[Language, int] = {"python": 64, "cpp": 1024}
"""Least `memory_limit_MB` for a language; the others get none.

The server makes it a limit of address space, for the compiler too. Under 1024 MiB of that java, rustc and node do not start (Go is taken
to be like them), and g++ fails on the standard headers under 256: right programs would be marked wrong.
"""

SERVER_OUTPUT_BYTES = 1 << 20
"""The server returns this much of stdout, and of stderr, and says nothing of the rest."""

LARGEST_ANSWER_BYTES = 32 << 20
"""Four streams of `SERVER_OUTPUT_BYTES` with every byte escaped, and room to spare."""

LONGEST_REASON = 500
"""Characters of the reason for an infrastructure error."""

OUT_OF_MEMORY = ("MemoryError", "std::bad_alloc", "java.lang.OutOfMemoryError", "memory allocation of ")
"""How runtimes end a program whose allocation failed. The server itself does not tell."""


class SandboxFailedError(Exception):
    """The sandbox, not the program, failed. The message is the reason; `retry` says whether the same request may yet succeed."""

    def __init__(self, reason: str, *, retry: bool = True) -> None:
        super().__init__(reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + "...")
        self.retry = retry


def request_body(
    code: str, language: Language, stdin: str, files: Mapping[str, str], limits: Limits, limit_memory: bool
) -> bytes:
    """A RunCodeRequest. Without `limit_memory` no language gets a memory limit."""
    request = {
        "code": _valid_unicode(code),
        "language": SERVER_LANGUAGE[language],
        "stdin": _valid_unicode(stdin),
        "files": {name: base64.b64encode(_valid_unicode(text).encode()).decode() for name, text in files.items()},
        "compile_timeout": limits.compile_s,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": max(limits.memory_mb, MEMORY_FLOOR_MB[language])
        if limit_memory and language in MEMORY_FLOOR_MB
        else -1,
    }
    return json.dumps(request).encode()


def read_answer(body: bytes, limits: Limits) -> ExecResult:
    """The server's RunCodeResponse as a result. Raises SandboxFailedError where it is none, or is a SandboxError."""
    try:
        answer = json.loads(body)
        status, compiled, ran = answer["status"], answer["compile_result"], answer["run_result"]
        if status == "SandboxError":
            raise SandboxFailedError(f"SandboxError: {answer['message']}")
        if status not in ("Success", "Failed"):
            raise ValueError(f"status {status!r}")
        if ran is not None:
            return _run_result(ran, limits)
        return _compile_error(compiled, limits)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no answer of a SandboxFusion server ({type(error).__name__}: {error}): {body[:200].decode(errors='replace')}"
        raise SandboxFailedError(reason) from error


def _run_result(ran: Mapping[str, Any], limits: Limits) -> ExecResult:
    """From the server's CommandRunResult of the program. Raises ValueError, KeyError, TypeError or AttributeError if it is none."""
    stdout, stdout_over = _cut(ran["stdout"], limits)
    stderr, stderr_over = _cut(ran["stderr"], limits)
    exit_status = _exit_status(ran)
    status: ExecStatus
    if stdout_over or stderr_over:
        status = "output"
    elif exit_status is None:
        status = "timeout"
    elif exit_status == 0:
        status = "ok"
    else:
        # C++ writes the name on its last line; a Java stack trace follows it.
        last_lines = stderr.splitlines()[-8:]
        status = "memory" if any(sign in line for line in last_lines for sign in OUT_OF_MEMORY) else "runtime_error"
    return exec_result(status, stdout, stderr, exit_status, float(ran["execution_time"]))


def _compile_error(compiled: Mapping[str, Any], limits: Limits) -> ExecResult:
    """From the CommandRunResult of a compiler after which nothing ran. Raises as `_run_result`."""
    exit_status = _exit_status(compiled)
    if exit_status == 0:
        raise ValueError("compiled, but did not run")
    stdout, _ = _cut(compiled["stdout"], limits)
    stderr, _ = _cut(compiled["stderr"], limits)
    if exit_status is None:
        stderr += f"compiling took over {limits.compile_s:g} s\n"
    return exec_result("compile_error", stdout, stderr, exit_status)


def _exit_status(command: Mapping[str, Any]) -> int | None:
    """The exit status; None for a command that its time limit ended. Raises ValueError for a command without either."""
    if command["status"] == "TimeLimitExceeded":
        return None
    if command["status"] == "Finished" and isinstance(command["return_code"], int):
        return command["return_code"]
    raise ValueError(f"a command with status {command['status']!r} and return code {command['return_code']!r}")


def _cut(text: str, limits: Limits) -> tuple[str, bool]:
    """The text within the output limit, and whether the program wrote more."""
    limit = limits.output_kb * 1024
    encoded = text.encode(errors="replace")
    return encoded[:limit].decode(errors="ignore"), len(encoded) > limit or len(encoded) >= SERVER_OUTPUT_BYTES


def exec_result(
    status: ExecStatus, stdout: str = "", stderr: str = "", exit_status: int | None = None, wall_s: float = 0.0
) -> ExecResult:
    return ExecResult(
        status=status, stdout=stdout, stderr=stderr, exit=exit_status, cpu_s=0.0, wall_s=wall_s, memory_mb=0.0
    )


def _valid_unicode(text: str) -> str:
    """Lone surrogates replaced, which cannot be written to a file: the server answers them with HTTP 500."""
    return text.encode(errors="replace").decode()
