"""The server process: the core over the local backend, with all adapters, behind uvicorn."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import shutil
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import uvicorn

from cookbook.backends.base_models import check_base_model
from cookbook.backends.local import LocalService
from cookbook.backends.local.clients import SAMPLER_FOLDER
from cookbook.core.errors import ConfigError
from cookbook.serve.adapters.openai import OPENAI
from cookbook.serve.adapters.tinker import TINKER
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.store import Store
from cookbook.serve.core.tenants import Tenants
from cookbook.serve.http.app import create_app
from cookbook.serve.http.metrics import Metrics

ADAPTERS = (TINKER, OPENAI)

FINAL_FETCH_S = 2.0
"""How long clients can still fetch results after all operations have ended."""

CHECKPOINTS = "checkpoints"

BACKLOG = 2048
"""How many connections can wait to be accepted."""


@dataclass(frozen=True)
class Settings:
    """The settings of a server, as on the command line."""

    host: str
    port: int
    state_dir: Path
    base_models: Mapping[str, str]
    api_keys: Path | None = None
    max_sessions: int = 64
    max_queued: int = 4096
    session_timeout_s: float = 600.0
    max_body_bytes: int = 64 * 2**20
    device: str = "auto"
    dtype: str = "auto"
    token_budget: int = 4096


class Server(uvicorn.Server):
    """uvicorn, except that shutdown closes the core first, so that long polls are answered at once."""

    def __init__(
        self, config: uvicorn.Config, service: TrainingService, listener: socket.socket, lock: IO[bytes]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._listener = listener
        self._lock = lock

    @classmethod
    def open(cls, settings: Settings) -> Server:
        """Bind the port, open the database, and check the base models. Models are loaded at their first use.

        Raises:
            ConfigError: the port or the state directory is in use, the key file is not valid, or a base model does not
                exist.
        """
        key_rules = [adapter.key_problem for adapter in ADAPTERS]
        tenants = Tenants.from_file(settings.api_keys, key_rules) if settings.api_keys else Tenants()
        for name in settings.base_models.values():
            check_base_model(name)
        state_dir = settings.state_dir.absolute()
        lock = _lock(state_dir)
        listener = _bind(settings.host, settings.port)
        limits = Limits(settings.max_sessions, settings.max_queued, session_timeout_s=settings.session_timeout_s)
        store = Store(state_dir / "serve.sqlite")
        remove_leftovers(store, state_dir / CHECKPOINTS)
        backend = LocalService(settings.device, settings.dtype, str(state_dir / CHECKPOINTS), settings.token_budget)
        metrics = Metrics()
        service = TrainingService(backend, store, settings.base_models, limits, metrics.observe)
        metrics.watch(service)
        app = create_app(service, tenants, metrics, ADAPTERS, settings.max_body_bytes)
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5, lifespan="off")
        return cls(config, service, listener, lock)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run_until_stopped(self) -> None:
        """Serve until SIGINT or SIGTERM; then finish the running operation and fail the others."""
        models = ", ".join(self._service.base_models)
        print(f"serving {models} at {self.url} (tinker: {self.url}; openai: {self.url}/v1)", flush=True)
        lost = self._service.sessions.lost
        if lost:
            print(f"{lost} sessions of an earlier process are lost; their checkpoints are kept", flush=True)
        await self.serve(sockets=[self._listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._service.close)
        await asyncio.sleep(FINAL_FETCH_S)
        await super().shutdown(sockets)
        self._service.store.close()
        self._lock.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; a second SIGINT does so at once.

        uvicorn's own handler would raise the signal again at the end, and the exit status would not be 0.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _lock(state_dir: Path) -> IO[bytes]:
    """Lock the state directory until the file is closed.

    A second server would mark the sessions of the first one as lost.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    lock = (state_dir / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            f"--state-dir {state_dir}: another server uses it; stop that one, or use another directory"
        ) from error
    return lock


def remove_leftovers(store: Store, folder: Path) -> None:
    """Remove saves that a killed process had not recorded yet. Call it only before the server starts."""
    recorded = store.checkpoint_folder_names()
    for place in (folder, folder / SAMPLER_FOLDER):
        for found in [*place.iterdir()] if place.is_dir() else []:
            if found.name != SAMPLER_FOLDER and found.name not in recorded:
                shutil.rmtree(found)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # Clients know the URL before uvicorn is ready, so they must be able to connect now.
    except (OSError, OverflowError) as error:
        listener.close()
        reason = "is in use" if getattr(error, "errno", None) == errno.EADDRINUSE else f"is not available ({error})"
        raise ConfigError(f"--port {port} on {host}: {reason}; use another, or 0 for a free one") from error
    return listener
