"""The core without HTTP, over the fake backend: tenants, failures, checkpoints, and how sessions end."""

import asyncio
import contextlib
import gc
import sqlite3
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cookbook.backends.fake import FakeTrainingClient
from cookbook.core.clients import APIFuture
from cookbook.core.errors import ConfigError, DataError
from cookbook.core.types import Datum, ModelInput
from cookbook.serve.core.errors import Gone, InvalidRequest, NotFound, OperationFailed, ShuttingDown
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import CreateModelFromState, Forward, Load, Save, Usage
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.store import Store
from cookbook.serve.core.tickets import Ticket
from tests.serve.core_client import STEP, TOKENS, Client, Gate, forward_backward, open_service, sample
from tests.serve.waiting import eventually

pytestmark = pytest.mark.usefixtures("quick_reaper")


def test_a_tenant_sees_nothing_of_another(service: TrainingService):
    mine, other = Client(service, "a"), Client(service, "b")
    path = mine.do(Save("x", "weights"))
    sampler = mine.snapshot()
    ticket = mine.send(STEP)
    mine.result(ticket)
    attempts = [
        lambda: service.sessions.get("b", mine.session_id),
        lambda: service.model("b", mine.model_id),
        lambda: service.submit("b", mine.model_id, 99, STEP),
        lambda: service.sample("b", sampler, 1, sample()),
        lambda: service.create_sampler("b", mine.session_id, 5, "fake"),
        lambda: service.create_sampler("b", other.session_id, 5, path),
        lambda: service.create_model("b", other.session_id, 5, CreateModelFromState(path, True)),
        lambda: service.sessions.ticket("b", ticket),
        lambda: service.sessions.cancel("b", ticket),
        lambda: service.live_sampler("b", mine.model_id),
        lambda: service.checkpoint("b", path),
        lambda: service.delete_checkpoint("b", path),
        lambda: service.sessions.stop("b", mine.session_id),
        lambda: other.do(Load(path, True)),
    ]
    for attempt in attempts:
        with pytest.raises(NotFound):
            attempt()
    assert service.store.checkpoints("b") == [] and service.store.usage("b") == Usage()
    assert [session.id for session in service.store.sessions("b")] == [other.session_id]
    assert mine.do(STEP).metrics["grad_norm"] == 0


def test_a_poisoned_operation_fails_alone(service: TrainingService, monkeypatch: pytest.MonkeyPatch):
    client = Client(service)
    before = client.logprobs()
    with pytest.raises(DataError):
        client.do(
            Forward((Datum(ModelInput.from_ints([1]), {"weights": np.ones(1)}),), "cross_entropy", {}, backward=True)
        )

    def broken(*arguments: Any) -> APIFuture[Any]:
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("CUDA out of memory. Tried to allocate"))
        return APIFuture(future)

    with monkeypatch.context() as patch:
        patch.setattr(FakeTrainingClient, "forward_backward", broken)
        with pytest.raises(OperationFailed, match=r"out of memory; .* send less data"):
            client.do(forward_backward())
    np.testing.assert_array_equal(client.logprobs(), before)
    assert service.store.usage("a") == Usage(prefill=2 * TOKENS)


def test_checkpoints_and_usage_outlive_the_process_and_a_session_is_recreated(tmp_path: Path):
    service = open_service(tmp_path)
    client = Client(service)
    client.do(forward_backward())
    client.do(STEP)
    path = client.do(Save("step-1", "weights"))
    with pytest.raises(InvalidRequest, match="exists"):
        client.do(Save("step-1", "weights"))
    with pytest.raises(InvalidRequest, match="checkpoint name"):
        client.do(Save("../x", "weights"))
    logprobs, ticket = client.logprobs(), client.send(STEP)
    client.result(ticket)
    usage = service.store.usage("a")

    # Another process over the same files, as after kill -9: the first was never closed.
    again = open_service(tmp_path)
    assert again.sessions.lost == 1
    record = again.store.session("a", client.session_id)
    assert record is not None and record.state == "Failed"
    for attempt in (lambda: again.sessions.ticket("a", ticket), lambda: again.submit("a", client.model_id, 9, STEP)):
        with pytest.raises(
            Gone,
            match=rf"is Failed \(the server ended before .*\); create a new session, and load .* {path}",
        ):
            attempt()
    assert again.store.usage("a") == usage
    session_id = again.sessions.create("a").id
    again.sessions.ticket("a", again.create_model("a", session_id, 0, CreateModelFromState(path, True))).future.result(
        10
    )
    restored = Client(again)
    restored.model_id, restored.session_id = f"{session_id}:train:0", session_id
    np.testing.assert_array_equal(restored.logprobs(), logprobs)
    again.delete_checkpoint("a", path)
    assert again.store.checkpoints("a") == [] and not list((tmp_path / "states").rglob("*step-1*"))
    again.close()
    service.close()


def test_a_database_of_another_version_is_refused_and_kept(tmp_path: Path):
    file = tmp_path / "serve.sqlite"
    other = sqlite3.connect(file)
    other.execute("CREATE TABLE checkpoints (path TEXT PRIMARY KEY)")
    other.close()
    with pytest.raises(ConfigError, match=r"serve\.sqlite: was written by another version"):
        Store(file)
    with contextlib.closing(sqlite3.connect(file)) as kept:
        assert kept.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall() == [("checkpoints",)]


def test_a_checkpoint_with_a_lifetime_is_deleted(service: TrainingService):
    client = Client(service)
    path = client.do(Save("short", "weights", ttl_s=0.1))
    assert service.checkpoint("a", path).bytes > 0
    eventually(lambda: not service.store.checkpoints("a"))


def test_stopping_a_session_fails_what_is_queued_and_lets_what_runs_end(tmp_path: Path):
    backend = Gate(str(tmp_path / "states"))
    service = open_service(tmp_path, None, backend)
    client, other = Client(service), Client(service)
    running = client.send(STEP)
    backend.entered.wait(10)
    queued, behind_gap = client.send(STEP), client.send(STEP, sequence=99)
    service.sessions.stop("a", client.session_id, "done")
    assert service.sessions.get("a", client.session_id).state == "Stopping"
    with pytest.raises(Gone):
        client.send(STEP)
    for ticket in (queued, behind_gap):
        with pytest.raises(Gone, match="ended before this operation ran"):
            client.result(ticket)
    backend.opened.set()
    client.result(running)
    eventually(lambda: [record.state for record in service.store.sessions("a")].count("Stopped") == 1)
    with pytest.raises(Gone, match="is Stopped"):
        client.send(STEP)
    service.sessions.stop("a", client.session_id)
    assert other.do(STEP).metrics["grad_norm"] == 0
    service.close()


def test_a_session_without_requests_expires_and_another_does_not(tmp_path: Path):
    service = open_service(tmp_path, Limits(session_timeout_s=1.0))
    silent, active = Client(service), Client(service)

    def expired() -> bool:
        service.sessions.get("a", active.session_id)
        record = service.store.session("a", silent.session_id)
        return record is not None and record.state == "Expired"

    eventually(expired)
    with pytest.raises(Gone, match="is Expired"):
        silent.send(STEP)
    active.do(STEP)
    service.close()


def test_closing_settles_every_ticket(tmp_path: Path):
    backend = Gate(str(tmp_path / "states"))
    service = open_service(tmp_path, None, backend)
    client = Client(service)
    running = client.send(STEP)
    backend.entered.wait(10)
    queued = client.send(STEP)
    threading.Timer(0.1, backend.opened.set).start()
    service.close()
    client.result(running)
    with pytest.raises(ShuttingDown, match="continue from the last checkpoint"):
        client.result(queued)
    with pytest.raises(ShuttingDown):
        service.sessions.create("a")
    record = service.store.session("a", client.session_id)
    assert record is not None and record.state == "Stopped"


def test_an_error_after_a_poll_timed_out_is_not_reported_as_lost(caplog: pytest.LogCaptureFixture):
    async def poll() -> None:
        ticket = Ticket("s:op:1", "a", "s", "m", STEP)
        assert not await ticket.wait(0.01)
        ticket.settle(error=InvalidRequest("no"))
        await asyncio.sleep(0.01)

    asyncio.run(poll())
    gc.collect()
    assert "never retrieved" not in caplog.text
