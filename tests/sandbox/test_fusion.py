"""FusionSandbox against a stand-in server, and against a running SandboxFusion where SANDBOX_FUSION_URL names one."""

import asyncio
import base64
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest

from cookbook.core.errors import ConfigError
from cookbook.sandbox import fusion
from cookbook.sandbox.base import ExecResult, Language, Limits
from cookbook.sandbox.fusion import DEAF, ECHO, HELLO, FusionSandbox
from tests.sandbox.fusion_stand_in import (
    RETRYABLE,
    SANDBOX_ERROR,
    Answer,
    Fault,
    StandIn,
    finished,
    response,
    timed_out,
)

Connect = Callable[..., FusionSandbox]


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as server:
        yield server


@pytest.fixture
def connect(server: StandIn) -> Iterator[Connect]:
    """Makes a sandbox of the stand-in, which has then forgotten the probes."""
    made: list[FusionSandbox] = []

    def connect(**settings: Any) -> FusionSandbox:
        made.append(FusionSandbox(base_url=server.url, **{"backoff_s": 0.001, **settings}))
        server.forget()
        return made[-1]

    yield connect
    for sandbox in made:
        sandbox.close()


def run(
    sandbox: FusionSandbox, code: str = "program", language: Language = "python", stdin: str = "5\n", **rest: Any
) -> ExecResult:
    return asyncio.run(sandbox.run(code, language, stdin, **rest))


def test_a_request_carries_program_files_and_limits(server: StandIn, connect: Connect):
    sandbox = connect()
    limits = Limits(wall_s=3, memory_mb=256, compile_s=7)
    assert run(sandbox, files={"data/a.txt": "grün\n"}, limits=limits).stdout == "5\n"
    assert server.requests == [
        {
            "code": "program",
            "language": "python",
            "stdin": "5\n",
            "files": {"data/a.txt": base64.b64encode("grün\n".encode()).decode()},
            "run_timeout": 3,
            "compile_timeout": 7,
            "memory_limit_MB": 256,
        }
    ]
    server.forget()
    for language in get_args(Language):
        run(sandbox, language=language, limits=limits)
    # No memory limit where the runtime reserves more address space than that, and enough for g++.
    expected = {"python": 256, "cpp": 1024, "java": -1, "go": -1, "rust": -1, "nodejs": -1}
    assert {request["language"]: request["memory_limit_MB"] for request in server.requests} == expected
    server.forget()
    run(connect(limit_memory=False), limits=limits)
    assert [request["memory_limit_MB"] for request in server.requests] == [-1]


# What the real server (commit 469de08) answered, shortened.
ENDINGS = {
    "ok": (response(finished("5\n", "debug\n")), ExecResult("ok", "5\n", "debug\n", 0, 0.0, 0.025, 0.0)),
    "exit": (response(finished("5\n", return_code=3)), ExecResult("runtime_error", "5\n", "", 3, 0.0, 0.025, 0.0)),
    "signal": (
        response(finished(return_code=-11), finished()),
        ExecResult("runtime_error", "", "", -11, 0.0, 0.025, 0.0),
    ),
    "time": (response(timed_out("1\n")), ExecResult("timeout", "1\n", "", None, 0.0, 1.0, 0.0)),
    "python memory": (
        response(finished(stderr="  x=bytearray(10**9)\nMemoryError\n", return_code=1)),
        ExecResult("memory", "", "  x=bytearray(10**9)\nMemoryError\n", 1, 0.0, 0.025, 0.0),
    ),
    "c++ memory": (
        response(finished(stderr="  what():  std::bad_alloc\n", return_code=-6), finished()),
        ExecResult("memory", "", "  what():  std::bad_alloc\n", -6, 0.0, 0.025, 0.0),
    ),
    "compiler": (
        response(None, finished(stderr="error: expected ';'\n", return_code=1)),
        ExecResult("compile_error", "", "error: expected ';'\n", 1, 0.0, 0.0, 0.0),
    ),
    "compile time": (
        response(None, timed_out()),
        ExecResult("compile_error", "", "compiling took over 30 s\n", None, 0.0, 0.0, 0.0),
    ),
    "output": (response(finished("é" * 600)), ExecResult("output", "é" * 512, "", 0, 0.0, 0.025, 0.0)),
    "errors": (response(timed_out("x" * 2000)), ExecResult("output", "x" * 1024, "", None, 0.0, 1.0, 0.0)),
}


@pytest.mark.parametrize(("answer", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_what_a_program_does_is_its_status_and_is_not_repeated(
    answer: Answer, expected: ExecResult, server: StandIn, connect: Connect
):
    sandbox = connect()
    server.answers["program"] = answer
    assert run(sandbox, limits=Limits(output_kb=1)) == expected
    assert len(server.requests) == 1


@pytest.mark.parametrize("fault", RETRYABLE)
def test_a_failure_of_the_server_is_retried_and_then_is_an_infrastructure_error(
    fault: Fault, server: StandIn, connect: Connect
):
    # A request that gets an answer has 2 s for it, one that gets none costs the test as long.
    sandbox = connect(retries=2, request_timeout_margin_s=1.8)
    server.fail(fault)
    assert run(sandbox, limits=Limits(wall_s=0.2)).status == "ok"
    assert len(server.requests) == 2

    server.forget()
    server.fail(then=fault)
    result = run(sandbox, limits=Limits(wall_s=0.2))
    assert (result.status, result.exit, result.stdout) == ("infrastructure_error", None, "")
    assert f"SandboxFusion at {server.url}, after 3 attempts: " in result.stderr
    assert len(server.requests) == 3


def test_a_refused_request_is_not_repeated_and_tells_why(server: StandIn, connect: Connect):
    sandbox = connect()
    server.fail(then="400")
    result = run(sandbox)
    assert result.status == "infrastructure_error" and "HTTP 400: stand-in says 400" in result.stderr
    assert len(server.requests) == 1


def test_a_slow_answer_within_the_limits_is_an_answer(server: StandIn, connect: Connect):
    sandbox = connect(retries=0, request_timeout_margin_s=0.5)
    server.fail(then="slow")
    assert run(sandbox, limits=Limits(wall_s=20)).status == "ok"
    # Compiling has a limit of its own.
    assert run(sandbox, language="cpp", limits=Limits(wall_s=0.01, compile_s=20)).status == "ok"
    assert len(server.requests) == 2
    assert run(sandbox, limits=Limits(wall_s=0.01, compile_s=20)).status == "infrastructure_error"


def test_the_pauses_between_attempts_double_up_to_a_limit(
    server: StandIn, connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    sandbox = connect(retries=3, backoff_s=1000.0)
    server.fail(then="500")
    pauses: list[float | None] = []

    class NoPause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return False

    class Call(fusion._Call):
        def __init__(self) -> None:
            super().__init__()
            self.abandoned = NoPause()

    monkeypatch.setattr(fusion, "_Call", Call)
    monkeypatch.setattr(fusion, "LONGEST_BACKOFF_S", 3000.0)
    monkeypatch.setattr(fusion.random, "uniform", lambda low, high: low)
    assert run(sandbox).status == "infrastructure_error"
    assert pauses == [500.0, 1000.0, 1500.0]


def test_no_more_runs_than_allowed_are_with_the_server_and_waiting_here_is_not_run_time(
    server: StandIn, connect: Connect
):
    sandbox = connect(concurrency=3, retries=0, request_timeout_margin_s=2.8)
    # The last runs wait for 60 / 3 * 0.2 s, which is longer than the 3 s that a request may take.
    server.run_s = 0.2

    async def all_at_once() -> list[ExecResult]:
        return await asyncio.gather(
            *(sandbox.run("program", "python", str(number), limits=Limits(wall_s=0.2)) for number in range(60))
        )

    results = asyncio.run(all_at_once())
    assert [result.stdout for result in results] == [str(number) for number in range(60)]
    assert server.most_running == 3


def test_any_thread_and_any_event_loop_may_run_programs(server: StandIn, connect: Connect):
    sandbox = connect(concurrency=4)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda number: run(sandbox, stdin=str(number)).stdout, range(12)))
    assert results == [str(number) for number in range(12)]


def test_closing_ends_runs_that_are_with_the_server_and_those_that_wait(server: StandIn, connect: Connect):
    sandbox = connect(concurrency=1, request_timeout_margin_s=3600)
    server.fail(then="silent")

    async def close_soon() -> list[ExecResult]:
        runs = [asyncio.create_task(sandbox.run("program", "python")) for _ in range(3)]
        while not server.requests:
            await asyncio.sleep(0.01)
        sandbox.close()
        return await asyncio.wait_for(asyncio.gather(*runs), timeout=60)

    assert [result.status for result in asyncio.run(close_soon())] == ["infrastructure_error"] * 3
    assert len(server.requests) == 1


def test_a_cancelled_run_gives_its_place_back(server: StandIn, connect: Connect):
    sandbox = connect(concurrency=1, request_timeout_margin_s=3600)
    server.fail("silent")

    async def cancel_one() -> ExecResult:
        abandoned = asyncio.create_task(sandbox.run("program", "python"))
        while not server.requests:
            await asyncio.sleep(0.01)
        abandoned.cancel()
        return await asyncio.wait_for(sandbox.run("program", "python", "next"), timeout=60)

    assert asyncio.run(cancel_one()).stdout == "next"


def test_a_sandbox_that_is_collected_leaves_no_thread(server: StandIn):
    def fusion_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("sandbox-fusion")]

    before = len(fusion_threads())
    sandbox = FusionSandbox(base_url=server.url)
    assert len(fusion_threads()) > before
    del sandbox
    gc.collect()
    deadline = time.monotonic() + 60
    while len(fusion_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(fusion_threads()) <= before


def test_text_that_is_not_unicode_is_sent_with_replacements(server: StandIn, connect: Connect):
    assert run(connect(), stdin="a\ud800b").stdout == "a?b"


def one_line_error(server: StandIn, **settings: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        FusionSandbox(**{"base_url": server.url, "request_timeout_margin_s": 0.5, **settings})
    assert "\n" not in str(raised.value)
    return str(raised.value)


PROBE_FAULTS: dict[str, tuple[dict[str, Answer], str]] = {
    "the race on stdin": ({DEAF: SANDBOX_ERROR}, "the handler is closed"),
    "stdin of another": ({ECHO: response(finished("probe 2\n"))}, "'probe 2\\n'"),
    "lost stdin": ({ECHO: response(finished(""))}, "stdout ''"),
    "lost exit status": ({DEAF: response(finished())}, "exit 0"),
}


@pytest.mark.parametrize(("answers", "reason"), PROBE_FAULTS.values(), ids=PROBE_FAULTS)
def test_a_server_that_runs_python_wrongly_is_refused(answers: dict[str, Answer], reason: str, server: StandIn):
    server.answers.update(answers)
    message = one_line_error(server)
    assert server.url in message and "docker run" in message and reason in message


def test_a_server_that_is_not_there_or_is_another_is_refused(server: StandIn):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        message = one_line_error(server, base_url=url)
    assert url in message and "Connection refused" in message and "docker run" in message
    assert "HTTP 404" in one_line_error(server, base_url=f"{server.url}/elsewhere")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"base_url": "127.0.0.1:8080"}, "write it as http://HOST:PORT"),
        ({"base_url": "http://127.0.0.1:http"}, "Port could not be cast"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"retries": -1}, "retries=-1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], reason: str, server: StandIn):
    assert reason in one_line_error(server, **settings)
    assert not server.requests


def test_a_language_that_the_server_lacks_is_not_offered(server: StandIn, connect: Connect):
    server.answers[HELLO["go"]] = response(
        None, finished(stderr="/bin/bash: line 1: go: command not found\n", return_code=127)
    )
    sandbox = connect()
    assert sandbox.languages == {"python", "cpp", "java", "rust", "javascript"}
    with pytest.raises(ConfigError, match=r"does not run go: its probe failed: .*go: command not found"):
        run(sandbox, language="go")
    assert not server.requests
    assert server.url in sandbox.isolation


REAL_PROGRAMS: dict[str, tuple[Language, str, dict[str, Any], tuple[str, int | None, str]]] = {
    "python": ("python", "print(int(input()) + 1)", {"stdin": "41\n"}, ("ok", 0, "42\n")),
    "python file": ("python", "print(open('d/a.txt').read())", {"files": {"d/a.txt": "grün"}}, ("ok", 0, "grün\n")),
    "python exception": ("python", "print(1, flush=True)\n1 / 0", {}, ("runtime_error", 1, "1\n")),
    "python exit": ("python", "raise SystemExit(7)", {"stdin": "unread\n" * 100_000}, ("runtime_error", 7, "")),
    "python signal": ("python", "import os; os.kill(os.getpid(), 11)", {}, ("runtime_error", -11, "")),
    "python syntax": ("python", "print(", {}, ("runtime_error", 1, "")),
    "python time": (
        "python",
        "print(1, flush=True)\nwhile True: pass",
        {"limits": Limits(wall_s=1)},
        ("timeout", None, "1\n"),
    ),
    "python memory": ("python", "x = bytearray(10**10)", {}, ("memory", 1, "")),
    "python output": ("python", "print('x' * 4000)", {"limits": Limits(output_kb=1)}, ("output", 0, "x" * 1024)),
    "c++": (
        "cpp",
        "#include <bits/stdc++.h>\nint main() { int a; std::cin >> a; std::cout << a + 1; }",
        {"stdin": "41"},
        ("ok", 0, "42"),
    ),
    "c++ exit": ("cpp", "int main() { return 7; }", {}, ("runtime_error", 7, "")),
    "c++ signal": ("cpp", "#include <cstdlib>\nint main() { abort(); }", {}, ("runtime_error", -6, "")),
    "c++ syntax": ("cpp", "int main() { return 0 }", {}, ("compile_error", 1, "")),
    "c++ compile time": (
        "cpp",
        "#include <bits/stdc++.h>\nint main() {}",
        {"limits": Limits(compile_s=0.01)},
        ("compile_error", None, ""),
    ),
    "c++ time": ("cpp", "int main() { for (;;) ; }", {"limits": Limits(wall_s=1)}, ("timeout", None, "")),
    "c++ memory": (
        "cpp",
        "#include <vector>\nint main() { std::vector<char> v(1l << 36); return v[5]; }",
        {},
        ("memory", -6, ""),
    ),
    "javascript": ("javascript", "console.log(+require('fs').readFileSync(0) + 1)", {"stdin": "41"}, ("ok", 0, "42\n")),
}


@pytest.mark.skipif("SANDBOX_FUSION_URL" not in os.environ, reason="set SANDBOX_FUSION_URL to a running SandboxFusion")
def test_the_real_server_agrees():
    sandbox = FusionSandbox(base_url=os.environ["SANDBOX_FUSION_URL"], concurrency=4)
    programs = {name: program for name, program in REAL_PROGRAMS.items() if program[0] in sandbox.languages}
    assert {language for language, *_ in programs.values()} >= {"python", "cpp"}

    async def all_at_once() -> list[ExecResult]:
        return await asyncio.gather(
            *(sandbox.run(code, language, **rest) for language, code, rest, _ in programs.values())
        )

    results = dict(zip(programs, asyncio.run(all_at_once()), strict=True))
    sandbox.close()
    endings = {name: (result.status, result.exit, result.stdout) for name, result in results.items()}
    assert endings == {name: expected for name, (*_, expected) in programs.items()}
    assert "ZeroDivisionError" in results["python exception"].stderr
    assert "expected" in results["c++ syntax"].stderr
    assert 0 < results["python"].wall_s < results["python time"].wall_s
