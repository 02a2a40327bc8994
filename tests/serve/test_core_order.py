"""The core without HTTP, over the fake backend: order, repeats, samplers, quotas and fairness."""

from pathlib import Path

import numpy as np
import pytest

from cookbook.core.errors import DataError
from cookbook.core.types import ModelInput, SamplingParams
from cookbook.serve.core.errors import Gone, InvalidRequest, QuotaExceeded
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import CreateModel, Sample, Usage
from cookbook.serve.core.service import TrainingService
from tests.serve.core_client import STEP, TOKENS, Client, Gate, datum, forward_backward, open_service, sample
from tests.serve.waiting import eventually

pytestmark = pytest.mark.usefixtures("quick_reaper")


def test_operations_run_in_the_order_of_their_numbers(service: TrainingService):
    client, plain = Client(service), Client(service)
    late = [
        client.send(STEP, sequence=4),
        client.send(forward_backward(datum(2)), sequence=3),
        client.send(STEP, sequence=2),
    ]
    assert not service.sessions.ticket("a", late[0]).future.done()
    client.send(forward_backward(datum(1)), sequence=1)
    client.result(late[0])
    for operation in (forward_backward(datum(1)), STEP, forward_backward(datum(2)), STEP):
        plain.do(operation)
    client.sequence = 4
    np.testing.assert_array_equal(client.logprobs(), plain.logprobs())


def test_a_repeated_operation_is_the_same_ticket_applied_and_counted_once(service: TrainingService):
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
    service = open_service(tmp_path, Limits(kept_s=0.5))
    client = Client(service)
    first = client.send(forward_backward())
    client.result(first)
    eventually(lambda: service.sessions._tickets.get(first) is None)
    with pytest.raises(Gone, match="no longer kept"):
        service.sessions.ticket("a", first)
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


def test_the_least_recently_used_snapshot_is_evicted(tmp_path: Path):
    service = open_service(tmp_path, Limits(max_snapshots=2))
    client = Client(service)
    first, second, third = (client.snapshot() for _ in range(3))
    with pytest.raises(Gone, match="replaced by newer ones"):
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


def test_quotas_of_sessions_and_of_queued_operations(tmp_path: Path):
    backend = Gate(str(tmp_path / "states"))
    service = open_service(tmp_path, Limits(max_sessions=2, max_queued=3), backend)
    client = Client(service)
    client.result(client.create)
    service.sessions.create("a")
    with pytest.raises(QuotaExceeded, match="2 sessions"):
        service.sessions.create("a")
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
