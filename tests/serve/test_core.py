"""The core without HTTP, over the fake backend: order, repeats, tenants, money, quotas, and ends of every kind."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cookbook.backends.fake import FakeService, FakeTrainingClient
from cookbook.core.clients import APIFuture
from cookbook.core.errors import DataError
from cookbook.core.types import AdamParams, Datum, ModelInput, OptimStepResponse, SamplingParams
from cookbook.serve.core import service as service_module
from cookbook.serve.core.errors import (
    Gone,
    InvalidRequest,
    NotFound,
    OperationFailed,
    QuotaExceeded,
    ShuttingDown,
)
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import (
    CreateModel,
    CreateModelFromState,
    Forward,
    Load,
    Operation,
    OptimStep,
    Sample,
    Save,
    Snapshot,
    Usage,
)
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.store import Store
from cookbook.serve.core.tickets import Ticket

TOKENS = 6
STEP = OptimStep(AdamParams(learning_rate=0.1))


def datum(shift: int = 1) -> Datum:
    tokens = np.arange(5, 5 + TOKENS)
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens + shift, "weights": np.ones(TOKENS)})


def forward_backward(*data: Datum) -> Forward:
    return Forward(data or (datum(),), "cross_entropy", {}, backward=True)


def sample(num_samples: int = 2, seed: int = 0) -> Sample:
    return Sample(ModelInput.from_ints([5, 6]), num_samples, SamplingParams(4, seed=seed))


class Client:
    """One tenant's view of a service, one model, blocking."""

    def __init__(self, service: TrainingService, tenant: str = "a") -> None:
        self.service, self.tenant = service, tenant
        self.session_id = service.create_session(tenant, "mine").id
        self.create = service.create_model(tenant, self.session_id, 0, CreateModel("fake", 8, 32.0, 0))
        self.model_id = f"{self.session_id}:train:0"
        self.sequence = 0

    def send(self, operation: Operation, sequence: int | None = None) -> str:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        return self.service.submit(self.tenant, self.model_id, sequence, operation)

    def result(self, ticket_id: str) -> Any:
        return self.service.ticket(self.tenant, ticket_id).future.result(timeout=10)

    def do(self, operation: Operation) -> Any:
        return self.result(self.send(operation))

    def snapshot(self) -> str:
        return self.do(Snapshot(self.service.sampler_id(self.session_id, self.sequence)))

    def logprobs(self) -> np.ndarray:
        return self.do(Forward((datum(),), "cross_entropy", {}, backward=False)).loss_fn_outputs[0]["logprobs"]


def open_service(folder: Path, limits: Limits | None = None, backend: FakeService | None = None) -> TrainingService:
    return TrainingService(
        backend or FakeService(str(folder / "states")), Store(folder / "serve.sqlite"), {"fake": "fake"}, limits
    )


@pytest.fixture(autouse=True)
def quick_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "REAP_EVERY_S", 0.02)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TrainingService]:
    opened = open_service(tmp_path)
    yield opened
    opened.close()


def eventually(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


class Gate(FakeService):
    """A backend whose optimizer steps wait until the gate is opened."""

    def __init__(self, state_dir: str) -> None:
        super().__init__(state_dir)
        self.opened, self.entered = threading.Event(), threading.Event()
        self.order: list[int] = []

    def create_lora_training_client(self, *arguments: Any, **keywords: Any) -> FakeTrainingClient:
        client = super().create_lora_training_client(*arguments, **keywords)
        number = len(self.order)
        self.order.append(-1)
        step = client.optim_step

        def gated(adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
            self.entered.set()
            assert self.opened.wait(10)
            self.order.append(number)
            return step(adam_params)

        client.optim_step = gated
        return client


# Order and repeats


def test_operations_run_in_the_order_of_their_numbers(service: TrainingService):
    client, plain = Client(service), Client(service)
    late = [
        client.send(STEP, sequence=4),
        client.send(forward_backward(datum(2)), sequence=3),
        client.send(STEP, sequence=2),
    ]
    assert not service.ticket("a", late[0]).future.done()
    client.send(forward_backward(datum(1)), sequence=1)
    client.result(late[0])
    for operation in (forward_backward(datum(1)), STEP, forward_backward(datum(2)), STEP):
        plain.do(operation)
    client.sequence = 4
    np.testing.assert_array_equal(client.logprobs(), plain.logprobs())


def test_a_repeated_operation_is_the_same_ticket_applied_and_billed_once(service: TrainingService):
    client = Client(service)
    first = client.send(forward_backward())
    assert client.send(forward_backward(), sequence=1) == first
    client.result(first)
    assert client.send(forward_backward(), sequence=1) == first
    assert service.store.usage("a") == Usage(trained=TOKENS)
    assert service.create_model("a", client.session_id, 0, CreateModel("fake", 8, 32.0, 0)) == client.create

    sampler = client.snapshot()
    drawn = service.sample("a", sampler, 7, sample())
    assert service.sample("a", sampler, 7, sample()) == drawn
    sampled = sum(len(sequence.tokens) for sequence in client.result(drawn).sequences)
    assert service.store.usage("a", client.session_id) == Usage(2, sampled, TOKENS)


def test_a_repeat_after_the_result_was_dropped_is_refused_and_not_applied(tmp_path: Path):
    service = open_service(tmp_path, Limits(kept_s=0.05))
    client = Client(service)
    first = client.send(forward_backward())
    client.result(first)
    eventually(lambda: service._tickets.get(first) is None)
    with pytest.raises(Gone, match="no longer kept"):
        service.ticket("a", first)
    with pytest.raises(Gone, match="operation 1 ran before"):
        client.send(forward_backward(), sequence=1)
    assert service.store.usage("a") == Usage(trained=TOKENS)
    service.close()


def test_operations_behind_a_gap_are_given_up_and_the_session_goes_on(tmp_path: Path):
    service = open_service(tmp_path, Limits(gap_timeout_s=0.1))
    client = Client(service)
    lost = client.send(STEP, sequence=3)
    with pytest.raises(InvalidRequest, match=r"operation 1 of .* did not arrive"):
        client.result(lost)
    client.sequence = 3
    assert client.do(STEP).metrics["grad_norm"] == 0
    service.close()


# Samplers


def test_a_snapshot_is_pinned_and_the_live_sampler_follows(service: TrainingService):
    client = Client(service)
    before = client.snapshot()
    live, ready = service.live_sampler("a", client.model_id)
    ready.future.result(10)
    assert service.live_sampler("a", client.model_id)[0] is live
    for _ in range(20):
        client.send(forward_backward())
        client.send(STEP)
    after, ready = service.live_sampler("a", client.model_id)
    assert after is not live
    ready.future.result(10)
    drawn = [
        client.result(service.sample("a", name, None, sample(8))).sequences for name in (before, live.id, after.id)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_oldest_snapshot_makes_room(tmp_path: Path):
    service = open_service(tmp_path, Limits(max_snapshots=2))
    client = Client(service)
    first, second, third = (client.snapshot() for _ in range(3))
    with pytest.raises(Gone, match="made room"):
        client.result(service.sample("a", first, 1, sample()))
    for sampler in (second, third):
        client.result(service.sample("a", sampler, 1, sample()))
    service.close()


def test_one_bad_sample_of_a_batch_fails_alone(service: TrainingService):
    client = Client(service)
    sampler = client.snapshot()
    bad = Sample(ModelInput.from_ints([10**6]), 1, SamplingParams(4))
    tickets = [
        service.sample("a", sampler, index, operation) for index, operation in enumerate((sample(), bad, sample()))
    ]
    assert client.result(tickets[0]) == client.result(tickets[2])
    with pytest.raises(DataError, match="token id"):
        client.result(tickets[1])


# Tenants


def test_a_tenant_sees_nothing_of_another(service: TrainingService):
    mine, other = Client(service, "a"), Client(service, "b")
    path = mine.do(Save("x", "weights"))
    sampler = mine.snapshot()
    ticket = mine.send(STEP)
    mine.result(ticket)
    attempts = [
        lambda: service.session("b", mine.session_id),
        lambda: service.model("b", mine.model_id),
        lambda: service.submit("b", mine.model_id, 99, STEP),
        lambda: service.sample("b", sampler, 1, sample()),
        lambda: service.create_sampler("b", mine.session_id, 5, base_model="fake"),
        lambda: service.create_sampler("b", other.session_id, 5, model_path=path),
        lambda: service.create_model("b", other.session_id, 5, CreateModelFromState(path, True)),
        lambda: service.ticket("b", ticket),
        lambda: service.cancel("b", ticket),
        lambda: service.live_sampler("b", mine.model_id),
        lambda: service.checkpoint("b", path),
        lambda: service.delete_checkpoint("b", path),
        lambda: service.stop_session("b", mine.session_id),
        lambda: other.do(Load(path, True)),
    ]
    for attempt in attempts:
        with pytest.raises(NotFound):
            attempt()
    assert service.store.checkpoints("b") == [] and service.store.usage("b") == Usage()
    assert [session.id for session in service.store.sessions("b")] == [other.session_id]
    assert mine.do(STEP).metrics["grad_norm"] == 0


# Quotas and fairness


def test_quotas_of_sessions_and_of_queued_operations(tmp_path: Path):
    backend = Gate(str(tmp_path / "states"))
    service = open_service(tmp_path, Limits(max_sessions=2, max_queued=3), backend)
    client = Client(service)
    client.result(client.create)
    service.create_session("a")
    with pytest.raises(QuotaExceeded, match="2 sessions"):
        service.create_session("a")
    other = Client(service, "b")
    tickets = [client.send(STEP) for _ in range(3)]
    with pytest.raises(QuotaExceeded, match="3 operations"):
        client.send(STEP)
    other.send(forward_backward())
    backend.opened.set()
    client.result(tickets[-1])
    client.sequence = 3
    client.do(STEP)  # the number that was refused was not used up
    service.close()


def test_sessions_take_turns_however_much_one_has_queued(tmp_path: Path):
    backend = Gate(str(tmp_path / "states"))
    service = open_service(tmp_path, None, backend)
    clients = [Client(service), Client(service), Client(service)]
    for client in clients:
        client.result(client.create)
    backend.order.clear()
    tickets = [clients[0].send(STEP) for _ in range(6)]
    backend.entered.wait(10)
    tickets += [client.send(STEP) for client in clients[1:] for _ in range(2)]
    backend.opened.set()
    for client, ticket in zip([clients[0]] * 6 + [clients[1]] * 2 + [clients[2]] * 2, tickets, strict=True):
        client.result(ticket)
    assert backend.order == [0, 0, 1, 2, 0, 1, 2, 0, 0, 0]
    service.close()


# Failures


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


# Checkpoints and restarts


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
    assert again.lost_sessions == 1
    record = again.store.session("a", client.session_id)
    assert record is not None and record.state == "Failed"
    for attempt in (lambda: again.ticket("a", ticket), lambda: again.submit("a", client.model_id, 9, STEP)):
        with pytest.raises(
            Gone, match=rf"is Failed \(the server ended before it\); create a new session, and load .* {path}"
        ):
            attempt()
    assert again.store.usage("a") == usage
    session_id = again.create_session("a").id
    again.ticket("a", again.create_model("a", session_id, 0, CreateModelFromState(path, True))).future.result(10)
    restored = Client(again)
    restored.model_id, restored.session_id = f"{session_id}:train:0", session_id
    np.testing.assert_array_equal(restored.logprobs(), logprobs)
    again.delete_checkpoint("a", path)
    assert again.store.checkpoints("a") == [] and not list((tmp_path / "states").rglob("*step-1*"))
    again.close()
    service.close()


def test_a_checkpoint_with_a_lifetime_is_deleted(service: TrainingService):
    client = Client(service)
    path = client.do(Save("short", "weights", ttl_s=0.1))
    assert service.checkpoint("a", path).bytes > 0
    eventually(lambda: not service.store.checkpoints("a"))


# Ends


def test_stopping_a_session_fails_what_is_queued_and_lets_what_runs_end(tmp_path: Path):
    backend = Gate(str(tmp_path / "states"))
    service = open_service(tmp_path, None, backend)
    client, other = Client(service), Client(service)
    running = client.send(STEP)
    backend.entered.wait(10)
    queued, behind_gap = client.send(STEP), client.send(STEP, sequence=99)
    service.stop_session("a", client.session_id, "done")
    assert service.session("a", client.session_id).state == "Stopping"
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
    service.stop_session("a", client.session_id)
    assert other.do(STEP).metrics["grad_norm"] == 0
    service.close()


def test_a_silent_session_expires_and_a_heard_one_does_not(tmp_path: Path):
    service = open_service(tmp_path, Limits(session_timeout_s=0.3))
    silent, heard = Client(service), Client(service)

    def expired() -> bool:
        service.session("a", heard.session_id)
        record = service.store.session("a", silent.session_id)
        return record is not None and record.state == "Expired"

    eventually(expired)
    with pytest.raises(Gone, match="is Expired"):
        silent.send(STEP)
    heard.do(STEP)
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
    with pytest.raises(ShuttingDown, match="go on from the last checkpoint"):
        client.result(queued)
    with pytest.raises(ShuttingDown):
        service.create_session("a")
    record = service.store.session("a", client.session_id)
    assert record is not None and record.state == "Stopped"


def test_an_error_after_a_poll_gave_up_is_nobodys_news(caplog: pytest.LogCaptureFixture):
    async def poll() -> None:
        ticket = Ticket("s:op:1", "a", "s", "m", STEP)
        assert not await ticket.wait(0.01)
        ticket.settle(error=InvalidRequest("no"))
        await asyncio.sleep(0.01)

    asyncio.run(poll())
    gc.collect()
    assert "never retrieved" not in caplog.text
