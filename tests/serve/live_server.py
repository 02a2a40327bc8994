"""Real servers for tests: on a thread of this process, or as a separate process that can be killed."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import uvicorn

from cookbook.core.clients import ServiceClient
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.store import Store
from cookbook.serve.core.tenants import Tenants
from cookbook.serve.http.app import create_app
from cookbook.serve.http.metrics import Metrics
from cookbook.serve.server import ADAPTERS, Server, Settings

API_KEY = "tml-any-key-will-do-here"
"""A key in the form that the tinker SDK requires; a server without keys accepts any."""


@contextmanager
def live_server(state_dir: Path, *, base_models: dict[str, str] | None = None, **settings: object) -> Iterator[str]:
    """The URL of a server on a thread of this process, with further `Settings`; it shuts down gracefully afterwards."""
    server = Server.open(Settings("127.0.0.1", 0, state_dir, base_models or {"tiny": "tiny"}, **settings))
    with _running(server, lambda: asyncio.run(server.run_until_stopped())):
        yield server.url


@contextmanager
def live_service(
    backend: ServiceClient,
    state_dir: Path,
    *,
    keys: Sequence[tuple[str, str]] = (),
    limits: Limits | None = None,
    max_body_bytes: int = 64 * 2**20,
) -> Iterator[tuple[str, TrainingService]]:
    """The URL and the core of a server on a thread; its base model is `fake`, and `keys` are (tenant, key)."""
    metrics = Metrics()
    service = TrainingService(backend, Store(state_dir / "serve.sqlite"), {"fake": "fake"}, limits, metrics.observe)
    metrics.watch(service)
    app = create_app(service, Tenants(keys), metrics, ADAPTERS, max_body_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    )
    with _running(server, lambda: asyncio.run(server.serve(sockets=[listener]))):
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
        finally:
            service.close()
    service.store.close()


@contextmanager
def _running(server: uvicorn.Server, serve: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=serve, name="live-server")
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=30)


@contextmanager
def server_process(
    state_dir: Path, *arguments: str, log: list[str] | None = None, stderr: IO[str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process of `python -m cookbook.serve --port 0`, killed afterwards if it still runs.

    The lines of its standard output go to `log`, which is complete after the block.
    """
    log = [] if log is None else log
    command: Sequence[str] = [
        sys.executable,
        "-m",
        "cookbook.serve",
        "--port",
        "0",
        "--state-dir",
        str(state_dir),
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    # Nobody else reads the pipe, and a full one would block the server.
    reader = threading.Thread(target=lambda: log.extend(process.stdout or ()), daemon=True)
    try:
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "the server ended before it printed its URL"
            found = re.search(r" at (http://\S+) ", line)
        reader.start()
        yield found[1], process
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join(timeout=10)
        process.stdout.close()
