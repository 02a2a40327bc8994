"""Client of ByteDance's SandboxFusion, a container that runs programs on request (HTTP, `POST /run_code`).

It uses the HTTP client of the standard library with one connection per request: a run costs far more than a connection,
no request finds a connection that the server has just closed, and another thread can end a request.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import urlsplit

from cookbook.core.errors import ConfigError
from cookbook.core.notices import notice
from cookbook.sandbox.base import NOT_STARTED, ExecResult, Language, Limits
from cookbook.sandbox.fusion_protocol import (
    COMPILED,
    LARGEST_ANSWER_BYTES,
    LONGEST_REASON,
    SandboxFailedError,
    exec_result,
    read_answer,
    request_body,
)

START_COMMAND = "docker run -d --rm -e HOST=0.0.0.0 -p 127.0.0.1:8080:8080 code_sandbox:server"

LONGEST_BACKOFF_S = 30.0

PROBE_RUNS = 8
PROBE_LIMITS = Limits(wall_s=20.0)
ECHO = "import sys\nsys.stdout.write(sys.stdin.read())\n"
"""Probe: prints its stdin."""
DEAF = "raise SystemExit(3)\n"
"""Probe: exits without reading its stdin. Servers from before 26 June 2025 answer SandboxError because of a race
(verl issue 4074)."""
HELLO: Mapping[Language, str] = {
    "cpp": '#include <iostream>\nint main() { std::cout << "hello\\n"; }\n',
    "java": 'public class Main { public static void main(String[] args) { System.out.println("hello"); } }\n',
    "go": 'package main\nimport "fmt"\nfunc main() { fmt.Println("hello") }\n',
    "rust": 'fn main() { println!("hello"); }\n',
    "javascript": 'console.log("hello")\n',
}


class _Call:
    """One run on the server: one or more requests. Any thread may abandon it."""

    def __init__(self) -> None:
        self.abandoned = threading.Event()
        self._socket: socket.socket | None = None

    def attach(self, connected: socket.socket) -> None:
        self._socket = connected
        if self.abandoned.is_set():
            self.abandon()

    def abandon(self) -> None:
        """End the current request, if any, and allow no further one. Does nothing to a call that has ended."""
        self.abandoned.set()
        if self._socket is not None:
            with suppress(OSError):
                # The shutdown of the plain socket wakes the thread that reads; TLS need not end cleanly.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


@dataclass(frozen=True)
class _Server:
    """The address of the server."""

    connect: Callable[..., http.client.HTTPConnection]
    host: str
    port: int | None
    path: str

    def post(self, call: _Call, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises SandboxFailedError without a complete answer within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        answer = bytearray()
        try:
            with closing(self.connect(self.host, self.port, timeout=timeout_s)) as connection:
                connection.connect()
                call.attach(connection.sock)
                connection.request("POST", self.path, body, {"Content-Type": "application/json", "Connection": "close"})
                with connection.getresponse() as response:
                    while chunk := response.read1(1 << 16):
                        answer += chunk
                        if len(answer) > LARGEST_ANSWER_BYTES:
                            raise SandboxFailedError(f"the answer is larger than {LARGEST_ANSWER_BYTES >> 20} MiB")
                        # The timeout of a socket holds for each read, so a slow trickle would never exceed it.
                        if time.monotonic() > deadline:
                            raise TimeoutError
                    if response.length:
                        raise SandboxFailedError(f"the connection closed with {response.length} bytes missing")
                    return response.status, bytes(answer)
        except TimeoutError as error:
            raise SandboxFailedError(f"no answer within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise SandboxFailedError(str(error) or type(error).__name__) from error


class FusionSandbox:
    """A SandboxFusion server as a `cookbook.sandbox.base.Sandbox`.

    At most `concurrency` runs are on the server at the same time; others wait here, which counts towards no limit.
    `Limits.wall_s` is the server's `run_timeout`, `compile_s` its `compile_timeout`. With `limit_memory`, `memory_mb`
    is its `memory_limit_MB` for Python and C++ (see `MEMORY_FLOOR_MB`); the server limits address space, under which
    numpy and threads of the default stack size do not start. `cpu_s`, `processes` and `file_mb` must be limited by the
    container. `cpu_s` and `memory_mb` of a result are 0, since the server does not report them. The status "memory" is
    derived from the last lines of stderr.

    A request that fails for a temporary reason (a lost or refused connection, no answer within the limits plus
    `request_timeout_margin_s`, HTTP 429 or 5xx, an unreadable answer, the server status SandboxError) is repeated up to
    `retries` times, each after `backoff_s` * 2**n seconds, of which up to half is removed at random. After that, and
    after any other HTTP status, the result is an "infrastructure_error" with the reason in `stderr`.

    Raises:
        ConfigError: a setting is out of range, or the server does not run several Python programs at once correctly.
    """

    def __init__(
        self,
        *,
        base_url: str,
        concurrency: int = 32,
        retries: int = 3,
        backoff_s: float = 0.5,
        request_timeout_margin_s: float = 10.0,
        limit_memory: bool = True,
    ) -> None:
        for name, value, least in (
            ("concurrency", concurrency, 1),
            ("retries", retries, 0),
            ("backoff_s", backoff_s, 0),
            ("request_timeout_margin_s", request_timeout_margin_s, 0),
        ):
            if value < least:
                raise ConfigError(f"FusionSandbox: {name}={value}: must be at least {least}")
        self._base_url = base_url
        self._server = _server_at(base_url)
        self._retries = retries
        self._backoff_s = backoff_s
        self._margin_s = request_timeout_margin_s
        self._limit_memory = limit_memory
        self._calls: set[_Call] = set()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="sandbox-fusion")
        self._finalizer = weakref.finalize(self, _close, self._pool, self._calls)
        try:
            self._probe_python(min(concurrency, PROBE_RUNS))
            self._missing = self._probe_languages()
        except BaseException:
            self.close()
            raise
        notice(f"sandbox: {self.isolation}")

    @property
    def languages(self) -> frozenset[Language]:
        """Python, and each other language whose probe ran when the sandbox was created."""
        return frozenset(get_args(Language)) - self._missing.keys()

    @property
    def python_modules(self) -> None:
        """Not known: they depend on the server's image."""
        return None

    @property
    def isolation(self) -> str:
        return (
            f"SandboxFusion at {self._base_url}: all programs share its container; the server limits wall time, and "
            "address space for Python and C++; the container must limit processes, files and network"
        )

    async def run(
        self,
        code: str,
        language: Language,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """See `Sandbox.run`. A run whose caller is cancelled is abandoned: the server ends it at its limits."""
        if language not in self.languages:
            why = self._missing.get(language, f"choose one of {', '.join(sorted(self.languages))}")
            raise ConfigError(f"SandboxFusion at {self._base_url} does not run {language}: {why}")
        call, future = self._submit(self._run, code, language, stdin, files or {}, limits or Limits())
        try:
            return await asyncio.wrap_future(future)
        except SandboxFailedError as error:
            return exec_result("infrastructure_error", stderr=str(error))
        finally:
            call.abandon()

    def close(self) -> None:
        """Abandon all runs and free all resources; later runs raise RuntimeError."""
        self._finalizer()

    def _submit(self, function: Callable[..., ExecResult], *arguments: Any) -> tuple[_Call, Future[ExecResult]]:
        """Start `function(call, *arguments)` in a free thread. `close` abandons calls that have not ended."""
        call, calls = _Call(), self._calls
        calls.add(call)
        future = self._pool.submit(function, call, *arguments)
        future.add_done_callback(lambda _: calls.discard(call))
        return call, future

    def _run(
        self, call: _Call, code: str, language: Language, stdin: str, files: Mapping[str, str], limits: Limits
    ) -> ExecResult:
        """Raises SandboxFailedError when no retries are left."""
        body = request_body(code, language, stdin, files, limits, self._limit_memory)
        timeout_s = limits.wall_s + (limits.compile_s if language in COMPILED else 0.0) + self._margin_s
        attempt = 0
        while True:
            try:
                result = self._attempt(call, body, timeout_s, limits)
                if result.exit in NOT_STARTED:
                    self._check_interpreter(call, language)
                return result
            except SandboxFailedError as error:
                if call.abandoned.is_set():
                    raise SandboxFailedError("the run was abandoned", retry=False) from error
                if attempt == self._retries or not error.retry:
                    times = "" if attempt == 0 else f", after {attempt + 1} attempts"
                    raise SandboxFailedError(
                        f"SandboxFusion at {self._base_url}{times}: {error}", retry=False
                    ) from error
            # Up to half of the delay is random, so that runs that failed together are not repeated together.
            call.abandoned.wait(min(self._backoff_s * 2**attempt, LONGEST_BACKOFF_S) * random.uniform(0.5, 1.0))
            attempt += 1

    def _attempt(self, call: _Call, body: bytes, timeout_s: float, limits: Limits) -> ExecResult:
        if call.abandoned.is_set():
            raise SandboxFailedError("the run was abandoned")
        status, answer = self._server.post(call, body, timeout_s)
        if status != 200:
            # Any other status says that the request is wrong; repeating it would not help.
            retry = status == 429 or status >= 500
            raise SandboxFailedError(f"HTTP {status}: {answer[:LONGEST_REASON].decode(errors='replace')}", retry=retry)
        return read_answer(answer, limits)

    def _check_interpreter(self, call: _Call, language: Language) -> None:
        """For a run with an exit status of `NOT_STARTED`, which a program may have chosen: the language must still run.

        Raises SandboxFailedError if it does not.
        """
        body = request_body(HELLO.get(language, ECHO), language, "hello", {}, PROBE_LIMITS, self._limit_memory)
        result = self._attempt(call, body, PROBE_LIMITS.wall_s + PROBE_LIMITS.compile_s + self._margin_s, PROBE_LIMITS)
        if (result.status, result.stdout.strip()) != ("ok", "hello"):
            raise SandboxFailedError(
                f"{language} does not run: exit status {result.exit}: {_one_line(result.stderr)[-200:]}"
            )

    def _probe_python(self, runs: int) -> None:
        """Run `runs` programs at once, each with its own stdin, which it echoes or ignores. Retries would hide a race.

        Raises ConfigError if a result is wrong.
        """
        timeout_s = PROBE_LIMITS.wall_s + self._margin_s
        programs = [
            (DEAF, f"unread {number}\n" * 100) if number % 2 else (ECHO, f"probe {number}\n") for number in range(runs)
        ]
        bodies = [request_body(code, "python", stdin, {}, PROBE_LIMITS, self._limit_memory) for code, stdin in programs]
        futures = [self._submit(self._attempt, body, timeout_s, PROBE_LIMITS) for body in bodies]
        for (code, stdin), (_, future) in zip(programs, futures, strict=True):
            try:
                result = future.result()
            except SandboxFailedError as error:
                raise ConfigError(
                    f"SandboxFusion at {self._base_url} does not run programs: {_one_line(str(error))}; set base_url "
                    f"to a running server, or build and start the container as in docs/sandbox.md ({START_COMMAND})"
                ) from error
            expected = ("ok", 0, stdin) if code == ECHO else ("runtime_error", 3, "")
            if (result.status, result.exit, result.stdout) != expected:
                raise ConfigError(
                    f"SandboxFusion at {self._base_url} runs {runs} programs at once incorrectly: the probe's result "
                    f"was {result.status}, exit {result.exit}, stdout {result.stdout[:80]!r}, "
                    f"stderr {result.stderr[-200:]!r}, not {expected}; "
                    f"build and start the container as in docs/sandbox.md ({START_COMMAND})"
                )

    def _probe_languages(self) -> dict[Language, str]:
        """The languages other than Python that the server does not run, each with the reason."""
        futures = [self._submit(self._run, code, language, "", {}, PROBE_LIMITS) for language, code in HELLO.items()]
        missing: dict[Language, str] = {}
        for language, (_, future) in zip(HELLO, futures, strict=True):
            try:
                result = future.result()
            except SandboxFailedError as error:
                missing[language] = f"its probe failed: {_one_line(str(error))}"
                continue
            if (result.status, result.stdout.strip()) != ("ok", "hello"):
                missing[language] = (
                    f"its probe ended with {result.status}: {_one_line(result.stderr or result.stdout)[-200:]}"
                )
        return missing


def _server_at(base_url: str) -> _Server:
    """Raises ConfigError."""
    connections = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    url = urlsplit(base_url)
    try:
        port = url.port
    except ValueError as error:
        raise ConfigError(f"FusionSandbox: base_url={base_url}: {error}") from error
    if url.scheme not in connections or not url.hostname:
        raise ConfigError(f"FusionSandbox: base_url={base_url}: write it as http://HOST:PORT")
    return _Server(connections[url.scheme], url.hostname, port, url.path.rstrip("/") + "/run_code")


def _close(pool: ThreadPoolExecutor, calls: set[_Call]) -> None:
    pool.shutdown(wait=False)
    ending = calls.copy()
    # Mark all first, so that no waiting call starts when another one ends.
    for call in ending:
        call.abandoned.set()
    for call in ending:
        call.abandon()


def _one_line(text: str) -> str:
    return " ".join(text.split())
