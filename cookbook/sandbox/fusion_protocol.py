"""Requests and answers of SandboxFusion's `POST /run_code`, converted from and to `cookbook.sandbox.base`.

Source: github.com/bytedance/SandboxFusion, sandbox/server/sandbox_api.py (RunCodeRequest, RunCodeResponse,
parse_run_status) and sandbox/runners (CommandRunResult, the commands for each language, and how limits are set).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from cookbook.sandbox.base import NOT_STARTED, ExecResult, ExecStatus, Language, Limits

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
"""Smallest `memory_limit_MB` for a language; the other languages get no limit.

The server limits address space, for the compiler too. Below 1024 MiB java, rustc and node do not start (Go is assumed
to behave like them), and below 256 MiB g++ fails on the standard headers: correct programs would be judged wrong.
"""

SERVER_OUTPUT_BYTES = 1 << 20
"""The server cuts stdout and stderr at this size without saying so."""

LARGEST_ANSWER_BYTES = 32 << 20
"""More than four streams of `SERVER_OUTPUT_BYTES` with every byte escaped."""

LONGEST_REASON = 500
"""Characters of the reason for an infrastructure error."""

OUT_OF_MEMORY = ("MemoryError", "std::bad_alloc", "java.lang.OutOfMemoryError", "memory allocation of ")
"""What runtimes print when an allocation fails. The server itself does not report it."""


class SandboxFailedError(Exception):
    """The sandbox failed, not the program. `retry` says whether the same request may succeed later."""

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
    """Convert the server's RunCodeResponse. Raises SandboxFailedError if it cannot be read or is a SandboxError."""
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
        beginning = body[:200].decode(errors="replace")
        reason = f"not an answer of a SandboxFusion server ({type(error).__name__}: {error}): {beginning}"
        raise SandboxFailedError(reason) from error


def _run_result(ran: Mapping[str, Any], limits: Limits) -> ExecResult:
    """Convert the CommandRunResult of a program. Raises what `read_answer` catches if it is malformed."""
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
        # C++ writes the name on the last line; in Java a stack trace follows it.
        last_lines = stderr.splitlines()[-8:]
        status = "memory" if any(sign in line for line in last_lines for sign in OUT_OF_MEMORY) else "runtime_error"
    return exec_result(status, stdout, stderr, exit_status, float(ran["execution_time"]))


def _compile_error(compiled: Mapping[str, Any], limits: Limits) -> ExecResult:
    """Convert the CommandRunResult of a compiler after which nothing ran. Raises like `_run_result`."""
    exit_status = _exit_status(compiled)
    if exit_status == 0:
        raise ValueError("compiled, but did not run")
    if exit_status in NOT_STARTED:
        reason = f"no compiler: exit status {exit_status}: {str(compiled['stderr'])[:200].strip()}"
        raise SandboxFailedError(reason, retry=False)
    stdout, _ = _cut(compiled["stdout"], limits)
    stderr, _ = _cut(compiled["stderr"], limits)
    if exit_status is None:
        stderr += f"compiling took over {limits.compile_s:g} s\n"
    return exec_result("compile_error", stdout, stderr, exit_status)


def _exit_status(command: Mapping[str, Any]) -> int | None:
    """The exit status; None for a command that exceeded its time limit. Raises ValueError if there is neither."""
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
    """`text` with lone surrogates replaced: the server cannot write them to a file and answers HTTP 500."""
    return text.encode(errors="replace").decode()
