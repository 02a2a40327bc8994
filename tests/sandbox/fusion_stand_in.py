"""A stand-in for SandboxFusion: real sockets and the real server's answers. It runs nothing, and fails on request."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from cookbook.sandbox.fusion import DEAF, HELLO

Answer = dict[str, Any]
Fault = Literal[
    "500", "429", "400", "silent", "trickle", "dropped", "reset", "garbage", "not_fusion", "sandbox_error", "slow"
]

RETRYABLE: tuple[Fault, ...] = (
    "500",
    "429",
    "silent",
    "trickle",
    "dropped",
    "reset",
    "garbage",
    "not_fusion",
    "sandbox_error",
)

SLOW_S = 1.0
"""How long a slow answer takes."""

RACE = "unable to perform operation on <WriteUnixTransport closed=True>; the handler is closed"


def finished(stdout: str = "", stderr: str = "", return_code: int = 0) -> Answer:
    """A CommandRunResult."""
    return {
        "status": "Finished",
        "execution_time": 0.025,
        "return_code": return_code,
        "stdout": stdout,
        "stderr": stderr,
    }


def timed_out(stdout: str = "", seconds: float = 1.0) -> Answer:
    return {
        "status": "TimeLimitExceeded",
        "execution_time": seconds,
        "return_code": None,
        "stdout": stdout,
        "stderr": "",
    }


def response(run: Answer | None, compile: Answer | None = None) -> Answer:
    """A RunCodeResponse, with the status that the real server gives it."""
    commands = [command for command in (compile, run) if command is not None]
    errors = [command["stderr"] for command in commands if command["status"] == "Error"]
    succeeded = all(command["status"] == "Finished" and command["return_code"] == 0 for command in commands)
    status = "SandboxError" if errors else "Success" if succeeded else "Failed"
    return {
        "status": status,
        "message": "".join(errors[:1]),
        "compile_result": compile,
        "run_result": run,
        "executor_pod_name": None,
        "files": {},
    }


SANDBOX_ERROR = response(
    {"status": "Error", "execution_time": None, "return_code": None, "stdout": None, "stderr": RACE}
)


class StandIn(ThreadingHTTPServer):
    """Answers each program with `answers[code]`, one that is not there by echoing its stdin. Use as a context manager.

    A request whose code is not one of the probes' takes the next of `faults` (None is none).
    """

    request_queue_size = 128
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, Answer] = {DEAF: response(finished(return_code=3))}
        for language, code in HELLO.items():
            compiled = None if language == "javascript" else finished()
            self.answers[code] = response(finished("hello\n"), compiled)
        self.probes = {DEAF, *HELLO.values()}
        self.faults: Iterator[Fault | None] = itertools.repeat(None)
        self.run_s = 0.0
        """How long each run takes."""
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        """Ends the answers that never end."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def forget(self) -> None:
        """Count requests from here on."""
        self.requests.clear()
        self.most_running = 0

    def fail(self, *faults: Fault | None, then: Fault | None = None) -> None:
        """The faults of the requests to come, and that of all after them."""
        self.faults = itertools.chain[Fault | None](faults, itertools.repeat(then))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are part of the tests."""

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def stand_in(self) -> StandIn:
        assert isinstance(self.server, StandIn)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        if self.path != "/run_code":
            return self.reply(404, b'{"detail":"Not Found"}')
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.stand_in
        with server.lock:
            server.requests.append(request)
            fault = None if request["code"] in server.probes else next(server.faults)
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        try:
            time.sleep(server.run_s)
            answer = server.answers.get(request["code"]) or response(finished(request["stdin"]))
        finally:
            with server.lock:
                server.running -= 1
        self.fail_or_reply(fault, json.dumps(answer).encode())

    def fail_or_reply(self, fault: Fault | None, body: bytes) -> None:
        match fault:
            case None:
                self.reply(200, body)
            case "slow":
                time.sleep(SLOW_S)
                self.reply(200, body)
            case "500" | "429" | "400":
                self.reply(int(fault), f"stand-in says {fault}".encode())
            case "silent":
                self.stand_in.released.wait()
            case "trickle":
                self.reply(200, b"", announced=1 << 20)
                while not self.stand_in.released.wait(0.02):
                    self.wfile.write(b" ")
            case "dropped":
                self.reply(200, body, announced=len(body) + 1000)
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            case "garbage":
                self.reply(200, body[: len(body) // 2])
            case "not_fusion":
                self.reply(200, b'{"status": "Success", "output": "5"}')
            case "sandbox_error":
                self.reply(200, json.dumps(SANDBOX_ERROR).encode())
        self.close_connection = True

    def reply(self, status: int, body: bytes, announced: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(announced or len(body)))
        self.end_headers()
        self.wfile.write(body)
