"""Real servers for tests: on a thread of this process, or as a process of their own that can be killed."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cookbook.serve.server import Server, Settings

API_KEY = "tml-any-key-will-do-here"
"""What the tinker SDK demands of a key's form; a server without keys accepts any."""


@contextmanager
def live_server(state_dir: Path, *, base_models: dict[str, str] | None = None, **settings: object) -> Iterator[str]:
    """The URL of a server on a thread of this process, which ends gracefully afterwards. `settings` are those of `Settings`."""
    server = Server.open(Settings("127.0.0.1", 0, state_dir, base_models or {"tiny": "tiny"}, **settings))
    thread = threading.Thread(target=lambda: asyncio.run(server.run_until_stopped()), name="live-server")
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        yield server.url
    finally:
        server.should_exit = True
        thread.join(timeout=30)


@contextmanager
def server_process(state_dir: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process of `python -m cookbook.serve --port 0`, killed afterwards if it still runs."""
    command: Sequence[str] = [sys.executable, "-m", "cookbook.serve", "--port", "0", "--state-dir", str(state_dir), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "the server ended before it printed its URL"
            found = re.search(r" at (http://\S+) ", line)
        # Nobody reads the log; a full pipe would stop the server.
        threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
        yield found[1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
