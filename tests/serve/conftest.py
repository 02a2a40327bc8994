"""Fixtures of several test modules of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cookbook.backends.local import LocalService
from cookbook.serve.core import registry
from cookbook.serve.core.service import TrainingService
from tests.serve.core_client import open_service
from tests.serve.live_server import API_KEY, live_server
from tests.serve.sdk_models import ALPHA, RANK, SEED


@pytest.fixture
def quick_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REAP_EVERY_S", 0.02)


@pytest.fixture
def service(tmp_path: Path, quick_reaper: None) -> Iterator[TrainingService]:
    """The core over the fake backend."""
    opened = open_service(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A live server over the local backend."""
    with (
        pytest.MonkeyPatch.context() as patch,
        live_server(tmp_path_factory.mktemp("server"), max_queued=256) as running,
    ):
        patch.setenv("TINKER_TELEMETRY", "0")
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[LocalService]:
    """The same backend in this process."""
    service = LocalService()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def sdk_client(url: str) -> Iterator[Any]:
    """The tinker SDK, connected to the live server."""
    tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed: pip install -e '.[tinker]'")
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY, user_metadata={"who": "test"}, display_name="named")
    yield service
    service.close("success").result(timeout=30)


@pytest.fixture
def pair(sdk_client: Any, local: LocalService) -> tuple[Any, Any]:
    """A model of the server and one of this process, with the same seed."""
    remote = sdk_client.create_lora_training_client("tiny", rank=RANK, seed=SEED).result(timeout=60)
    return remote, local.create_lora_training_client("tiny", RANK, ALPHA, SEED)
