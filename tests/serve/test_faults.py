"""What goes wrong between a client and the server, over real sockets: nothing is applied twice, lost, or seen by others."""

import contextlib
import gc
import http.client
import itertools
import json
import logging
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cookbook.backends.fake import FakeService, FakeTrainingClient
from cookbook.core.clients import APIFuture
from cookbook.core.types import AdamParams, Datum, ModelInput, OptimStepResponse
from cookbook.serve.adapters.tinker import routes
from cookbook.serve.core import service as service_module
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import Usage
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.store import Store
from tests.serve.api import ONE_LINE, Api
from tests.serve.live_server import API_KEY, live_service, server_process

TOKENS = 6
KEY_A, KEY_B = "tml-key-of-tenant-a-0000", "tml-key-of-tenant-b-1111"
ADAM = {"learning_rate": 0.1}


@pytest.fixture(autouse=True)
def quick_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "REAP_EVERY_S", 0.02)


class SlowService(FakeService):
    """A backend whose optimizer steps wait for the gate, which is open at first, and that remembers its training clients weakly."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(str(state_dir / "states"))
        self.gate, self.step_s = threading.Event(), 0.0
        self.gate.set()
        self.made: list[weakref.ref[FakeTrainingClient]] = []

    def create_lora_training_client(self, *arguments: Any, **keywords: Any) -> FakeTrainingClient:
        client = super().create_lora_training_client(*arguments, **keywords)
        step = client.optim_step

        def gated(adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
            assert self.gate.wait(30)
            time.sleep(self.step_s)
            return step(adam_params)

        client.optim_step = gated
        self.made.append(weakref.ref(client))
        return client


@contextlib.contextmanager
def fake_server(
    folder: Path, *, keys=(), limits: Limits | None = None, **settings: Any
) -> Iterator[tuple[Api, TrainingService, SlowService]]:
    backend = SlowService(folder)
    with live_service(backend, folder, keys=keys, limits=limits, **settings) as (url, service):
        try:
            yield Api(url, keys[0][1] if keys else None, "fake"), service, backend
        finally:
            backend.gate.set()


def tokens_of(shift: int) -> tuple[list[int], list[int]]:
    return [*range(5, 5 + TOKENS)], [5 + shift % 20] * TOKENS


def forward_backward(
    model_id: str, seq_id: int | None = None, shift: int = 1, forward_only: bool = False
) -> dict[str, Any]:
    tokens, targets = tokens_of(shift)
    datum = {
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": {"data": targets, "dtype": "int64"}},
    }
    asked = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": asked, "forward_only": forward_only}


def optim_step(model_id: str, seq_id: int | None = None) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": ADAM}


def logprobs(api: Api, model_id: str) -> list[float]:
    return api.result("forward_backward", forward_backward(model_id, forward_only=True))["loss_fn_outputs"][0][
        "logprobs"
    ]["data"]


def eventually(condition: Callable[[], bool], what: str, within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# Order and repeats


def test_operations_in_any_order_and_many_times_are_applied_once_and_in_turn(tmp_path: Path):
    with fake_server(tmp_path) as (api, service, _):
        model_id = api.model()
        sent = [("forward_backward", forward_backward(model_id, 1 + shift, shift)) for shift in range(12)]
        sent += [
            ("optim_step", optim_step(model_id, 13)),
            ("forward_backward", forward_backward(model_id, 14, 3, forward_only=True)),
        ]
        resent = [*reversed(sent), *random.Random(0).choices(sent, k=30)]
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda request: api.ok(*request)["request_id"], resent)]
            results = [*pool.map(api.fetch, answers)]
        by_number = {request[1]["seq_id"]: answer for request, answer in zip(resent, answers, strict=True)}
        for request, answer in zip(resent, answers, strict=True):
            assert by_number[request[1]["seq_id"]] == answer, "a number is one operation"
        for path, body in sent:
            assert api.ok(path, body)["request_id"] == by_number[body["seq_id"]], "after its end too"

        plain = FakeService().create_lora_training_client("fake", 4, 32.0, 1)
        for shift in range(12):
            tokens, targets = tokens_of(shift)
            plain.forward_backward(
                [Datum(ModelInput.from_ints(tokens), {"target_tokens": np.array(targets)})], "cross_entropy"
            ).result()
        norm = plain.optim_step(AdamParams(**ADAM)).result().metrics
        tokens, targets = tokens_of(3)
        after = plain.forward(
            [Datum(ModelInput.from_ints(tokens), {"target_tokens": np.array(targets)})], "cross_entropy"
        ).result()
        by_id = dict(zip(answers, results, strict=True))
        assert by_id[by_number[13]]["metrics"] == pytest.approx(norm)
        np.testing.assert_allclose(
            by_id[by_number[14]]["loss_fn_outputs"][0]["logprobs"]["data"],
            after.loss_fn_outputs[0]["logprobs"],
            rtol=1e-6,
        )
        assert service.store.usage("local") == Usage(prefill=TOKENS, trained=12 * TOKENS)


def test_repeated_samples_and_creations_are_one(tmp_path: Path):
    with fake_server(tmp_path) as (api, service, _):
        session = api.session()
        create = {"session_id": session, "model_seq_id": 0, "base_model": "fake", "lora_config": {"rank": 4}}
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
        with ThreadPoolExecutor(8) as pool:
            created = {*pool.map(lambda _: api.ok("create_model", create)["request_id"], range(8))}
            samplers = {
                *pool.map(lambda _: api.ok("create_sampling_session", sampler)["sampling_session_id"], range(8))
            }
            asked = {
                "sampling_session_id": next(iter(samplers)),
                "seq_id": 1,
                "num_samples": 2,
                "prompt": {"chunks": [{"tokens": [5, 6]}]},
            }
            asked["sampling_params"] = {"max_tokens": 4}
            drawn = {*pool.map(lambda _: api.ok("asample", asked)["request_id"], range(8))}
        assert [len(ids) for ids in (created, samplers, drawn)] == [1, 1, 1]
        sequences = api.fetch(next(iter(drawn)))["sequences"]
        assert service.store.usage("local") == Usage(
            prefill=2, sampled=sum(len(sequence["tokens"]) for sequence in sequences)
        )


def test_the_operation_that_others_wait_for_is_accepted_though_they_fill_the_queue(tmp_path: Path):
    with fake_server(tmp_path, limits=Limits(max_queued=4)) as (api, _, _):
        model_id = api.model()
        waiting = [
            api.ok("forward_backward", forward_backward(model_id, number))["request_id"] for number in range(2, 6)
        ]
        assert "try again" in api.refused(429, "forward_backward", forward_backward(model_id, 6))
        api.result("forward_backward", forward_backward(model_id, 1))
        for request_id in waiting:
            assert "metrics" in api.fetch(request_id)


# Clients that die, wait, or are too many

DOOMED = """
import sys, threading
from tests.serve.api import Api

api = Api(sys.argv[1], None, "fake")
model_id = api.model()
api.result("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0})
for number in [*range(2, 12), 99]:
    sent = api.ok("optim_step", {"model_id": model_id, "seq_id": number, "adam_params": {}})
    last = last if number == 99 else sent["request_id"]
threading.Thread(target=api.fetch, args=(last,)).start()
print(model_id, last, flush=True)
"""


def test_a_killed_client_disturbs_nobody_and_what_it_held_is_freed(tmp_path: Path):
    limits = Limits(session_timeout_s=1.0, gap_timeout_s=0.5)
    with fake_server(tmp_path, limits=limits) as (api, service, backend):
        other = api.model()
        backend.gate.clear()
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, api.url], stdout=subprocess.PIPE, text=True)
        assert doomed.stdout is not None
        with ThreadPoolExecutor(1) as pool:
            line = pool.submit(doomed.stdout.readline)
            while not line.done():
                api.ok("session_heartbeat", {"session_id": other.partition(":")[0]})
                time.sleep(0.05)
        model_id, last = line.result().split()
        doomed.kill()
        doomed.wait()
        doomed.stdout.close()
        heard = api.ok("optim_step", optim_step(other))["request_id"]
        backend.gate.set()
        assert "metrics" in api.fetch(heard)

        session = model_id.partition(":")[0]

        def expired() -> bool:
            logprobs(api, other)
            record = service.store.session("local", session)
            return record is not None and record.state == "Expired"

        eventually(expired, "the session of a killed client expires")
        assert "metrics" in api.fetch(last), "what was accepted ran to its end"
        for path, body in (("optim_step", optim_step(model_id, 100)), ("session_heartbeat", {"session_id": session})):
            assert re.search(r"is Expired \(nothing was heard .*\); create a new session", api.refused(410, path, body))
        gc.collect()
        assert [made() is None for made in backend.made] == [False, True], "its weights are gone, the other's are not"


def test_a_hundred_waiting_clients_get_their_results_and_hold_up_nobody(tmp_path: Path):
    with fake_server(tmp_path, limits=Limits(max_sessions=200)) as (api, _, backend), ThreadPoolExecutor(100) as pool:
        models = [*pool.map(lambda _: api.model(), range(100))]
        backend.gate.clear()
        sent = [api.ok("optim_step", optim_step(model))["request_id"] for model in models]
        waiting = [pool.submit(api.fetch, request_id) for request_id in sent]
        time.sleep(0.5)
        took = []
        for model in models[:20]:
            started = time.monotonic()
            api.ok("get_info", {"model_id": model})
            took.append(time.monotonic() - started)
        assert sorted(took)[10] < 0.2 and not any(future.done() for future in waiting)
        backend.gate.set()
        assert all("grad_norm" in future.result(timeout=30)["metrics"] for future in waiting)


def test_the_sdk_waits_on_after_a_poll_that_ran_out_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tinker = pytest.importorskip("tinker")
    monkeypatch.setattr(routes, "HOLD_S", 0.1)
    caplog.set_level(logging.INFO, "cookbook.serve.access")
    with (
        fake_server(tmp_path) as (api, service, backend),
        tinker.ServiceClient(base_url=api.url, api_key=API_KEY) as client,
    ):
        model = client.create_lora_training_client("fake", rank=4).result(timeout=20)
        backend.step_s = 1.0
        backward, step = (
            model.forward_backward(sdk_data(1), "cross_entropy"),
            model.optim_step(tinker.AdamParams(**ADAM)),
        )
        assert backward.result(timeout=20).metrics and step.result(timeout=20).metrics["grad_norm"] > 0
        assert service.store.usage("local") == Usage(trained=TOKENS)
        statuses = [
            json.loads(record.message)["status"] for record in caplog.records if record.name == "cookbook.serve.access"
        ]
        assert statuses.count(408) >= 5


def sdk_data(count: int, repeat: int = 1) -> list:
    import tinker

    tokens, targets = (values * repeat for values in tokens_of(1))
    inputs = {"target_tokens": targets}
    return [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=dict(inputs)) for _ in range(count)
    ]


def test_the_sdk_backs_off_from_full_quotas_and_completes(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tinker = pytest.importorskip("tinker")
    caplog.set_level(logging.INFO, "cookbook.serve.access")

    def refused() -> set[str]:
        lines = [json.loads(record.message) for record in caplog.records if record.name == "cookbook.serve.access"]
        return {line["path"].rpartition("/")[2] for line in lines if line["status"] == 429}

    with fake_server(tmp_path, limits=Limits(max_sessions=1, max_queued=3)) as (api, service, backend):
        with tinker.ServiceClient(base_url=api.url, api_key=API_KEY) as client, ThreadPoolExecutor(1) as pool:
            model = client.create_lora_training_client("fake", rank=4).result(timeout=20)
            assert "stop one, or try again later" in api.refused(429, "create_session", {})
            second = pool.submit(lambda: tinker.ServiceClient(base_url=api.url, api_key=API_KEY))
            sampler = model.save_weights_and_get_sampling_client().result(timeout=20)
            backend.gate.clear()
            steps = []
            for _ in range(8):
                steps += [
                    model.forward_backward(sdk_data(1), "cross_entropy"),
                    model.optim_step(tinker.AdamParams(**ADAM)),
                ]
            prompt, params = tinker.ModelInput.from_ints([5, 6]), tinker.SamplingParams(max_tokens=2)
            samples = [sampler.sample(prompt, 1, params) for _ in range(8)]
            eventually(
                lambda: refused() >= {"create_session", "asample"} and len(refused()) > 2, "all kinds are refused"
            )
            backend.gate.set()
            assert all(step.result(timeout=30).metrics for step in steps)
            drawn = [sequence for sample in samples for sequence in sample.result(timeout=30).sequences]
            client.close("success").result(timeout=20)
            second.result(timeout=30).close("success").result(timeout=20)
        sampled = sum(len(sequence.tokens) for sequence in drawn)
        assert service.store.usage("local") == Usage(prefill=8 * 2, sampled=sampled, trained=8 * TOKENS)


# Bodies


def test_an_oversized_body_is_refused_and_the_numbers_after_it_end_as_the_text_says(tmp_path: Path):
    tinker = pytest.importorskip("tinker")
    limits = Limits(gap_timeout_s=0.5)
    with fake_server(tmp_path, limits=limits, max_body_bytes=2**20) as (api, service, _):
        for size in (2**20 + 1, 3 * 2**20):
            assert "send less data at once" in api.refused(413, "forward_backward", b"x" * size)
        connection = http.client.HTTPConnection(api.url.removeprefix("http://"))
        connection.request("POST", "/api/v1/optim_step", iter([b" " * 2**19] * 3))  # without a declared length
        assert connection.getresponse().status == 413
        connection.close()
        with tinker.ServiceClient(base_url=api.url, api_key=API_KEY) as client:
            model = client.create_lora_training_client("fake", rank=4).result(timeout=20)
            large = model.forward_backward(sdk_data(1, 2**16), "cross_entropy")
            behind = model.optim_step(tinker.AdamParams(**ADAM))
            with pytest.raises(tinker.APIStatusError, match="send less data at once") as caught:
                large.result(timeout=20)
            assert caught.value.status_code == 413
            with pytest.raises(
                tinker.RequestFailedError, match=r"operation 1 of .* did not arrive in time; .* send them again"
            ):
                behind.result(timeout=20)
            backward, step = (
                model.forward_backward(sdk_data(1), "cross_entropy"),
                model.optim_step(tinker.AdamParams(**ADAM)),
            )
            assert backward.result(timeout=20).metrics and step.result(timeout=20).metrics["grad_norm"] > 0
        assert service.store.usage("local") == Usage(trained=TOKENS)


def test_damaged_protobuf_never_breaks_the_server(tmp_path: Path):
    pytest.importorskip("tinker")
    from tinker import types
    from tinker.proto import request_conv

    rng = random.Random(0)
    with fake_server(tmp_path) as (api, _, _):
        model_id = api.model()
        asked = types.ForwardBackwardInput(data=sdk_data(2), loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id=model_id, seq_id=1)
        whole = request_conv.forward_backward_request_to_proto(request).SerializeToString()
        for _ in range(150):
            damaged = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.5 else whole)
            for _ in range(rng.randrange(4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            status, answer = api.call("forward_backward", bytes(damaged), **{"Content-Type": routes.PROTOBUF})
            assert status in (200, 400, 404, 410), answer
            assert status == 200 or ONE_LINE.fullmatch(answer["detail"])
        assert len(logprobs(api, api.model())) == TOKENS, "the server goes on"


# Keys and tenants


def test_without_a_known_key_no_endpoint_answers(tmp_path: Path):
    with fake_server(tmp_path, keys=[("a", KEY_A)]) as (api, _, _):
        paths = [
            ("POST", "create_session"),
            ("POST", "asample"),
            ("POST", "retrieve_future"),
            ("POST", "forward_backward"),
            ("GET", "x"),
        ]
        paths += [
            ("GET", "checkpoints"),
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("POST", "/oai/api/v1/chat/completions"),
        ]
        for key, message in (
            (None, "no API key"),
            ("tml-key-that-nobody-has-99", "unknown API key"),
            (KEY_A[:-1], "unknown"),
            ("", "no API"),
        ):
            stranger = Api(api.url, key)
            for method, path in paths:
                assert message in stranger.refused(401, path, None if method == "GET" else {}, method)
        assert Api(api.url).call("/healthz") == (200, {"status": "ok"})
        status, _ = Api(api.url).call("/v1/models", Authorization=f"Bearer {KEY_A}")
        assert status == 200


def test_another_tenants_ids_look_like_ids_that_do_not_exist(tmp_path: Path):
    with fake_server(tmp_path, keys=[("a", KEY_A), ("b", KEY_B)]) as (mine, service, _):
        model_id = mine.model()
        session = model_id.partition(":")[0]
        mine.result("forward_backward", forward_backward(model_id))
        sampler = mine.result("save_weights_for_sampler", {"model_id": model_id, "sampling_session_seq_id": 0})[
            "sampling_session_id"
        ]
        path = mine.result("save_weights", {"model_id": model_id, "path": "secret"})["path"]
        request_id = mine.ok("optim_step", optim_step(model_id))["request_id"]
        before, usage = logprobs(mine, model_id), service.store.usage("a")

        other = Api(mine.url, KEY_B, "fake")
        own_session = other.session()
        own_model = other.model(own_session)
        prompt = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}
        checkpoint = f"training_runs/{model_id}/checkpoints/weights/secret"
        chat = {"messages": [{"role": "user", "content": "x"}]}
        new = {"base_model": "fake", "lora_config": {"rank": 4}}
        guesses: list[tuple[str, str, object]] = [
            ("POST", "session_heartbeat", {"session_id": session}),
            ("POST", f"sessions/{session}/finish", {}),
            ("GET", f"sessions/{session}", None),
            ("POST", "create_model", {"session_id": session, "model_seq_id": 7, **new}),
            ("POST", "create_model", {"session_id": session, "model_seq_id": 0, **new}),
            ("POST", "get_info", {"model_id": model_id}),
            ("POST", "forward_backward", forward_backward(model_id)),
            ("POST", "forward_backward", forward_backward(model_id, 1)),
            ("POST", "optim_step", optim_step(model_id)),
            ("POST", "save_weights", {"model_id": model_id, "path": "mine", "overwrite": True}),
            ("POST", "save_weights_for_sampler", {"model_id": model_id, "path": "mine"}),
            ("POST", "load_weights", {"model_id": model_id, "path": path, "optimizer": True}),
            ("POST", "load_weights", {"session_id": own_session, "model_seq_id": 8, "path": path, "optimizer": True}),
            (
                "POST",
                "create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"},
            ),
            (
                "POST",
                "create_sampling_session",
                {"session_id": own_session, "sampling_session_seq_id": 0, "model_path": path},
            ),
            ("GET", f"samplers/{sampler}", None),
            ("POST", "asample", {"sampling_session_id": sampler, **prompt}),
            ("POST", "retrieve_future", {"request_id": request_id}),
            ("POST", "cancel_future", {"request_id": request_id}),
            ("GET", f"training_runs/{model_id}", None),
            ("POST", "weights_info", {"tinker_path": path}),
            ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 0.001}),
            ("DELETE", checkpoint, None),
            ("GET", f"/v1/models/{model_id}", None),
            ("GET", f"/v1/models/{path}", None),
            ("POST", "/v1/chat/completions", {"model": model_id, **chat}),
            ("POST", "/v1/chat/completions", {"model": f"fake;{path}", **chat}),
            ("POST", "/v1/completions", {"model": path, "prompt": "x"}),
            ("GET", f"/usage?session={session}", None),
        ]
        made_up = "0123456789abcdef" * 2

        def replaced(value: object) -> Any:
            return json.loads(json.dumps(value).replace(session, made_up).replace("secret", "secrer"))

        for method, where, body in guesses:
            guessed, unknown = other.call(where, body, method), other.call(replaced(where), replaced(body), method)
            assert guessed[0] == 404 and ONE_LINE.fullmatch(guessed[1]["detail"]), (where, guessed)
            assert replaced(guessed) == replaced(unknown), where
        assert "there is no checkpoint" in other.failed(
            "load_weights", {"model_id": own_model, "path": path, "optimizer": True}
        )
        for listing in (
            "sessions",
            "training_runs",
            "checkpoints",
            f"training_runs/{model_id}/checkpoints",
            "/v1/models",
        ):
            assert session not in json.dumps(other.ok(listing)), listing
        assert other.ok("training_runs")["cursor"]["total_count"] == 1

        assert "metrics" in mine.fetch(request_id)
        assert service.store.usage("a") == usage and logprobs(mine, model_id) == before
        assert [record["tinker_path"] for record in mine.ok("checkpoints")["checkpoints"]] == [path]


# The end of the process


def test_kill_during_saves_loses_nothing_that_was_acknowledged(tmp_path: Path):
    """A server of its own is killed at several moments of a stream of saves, of which one name is overwritten again and again."""
    keys = tmp_path / "keys"
    keys.write_text(f"a={KEY_A}\n")
    state_dir, arguments = tmp_path / "state", ("--api-keys", str(keys))
    with server_process(state_dir, *arguments) as (url, process):
        api = Api(url, KEY_A)
        model_id = api.model()
        api.result("forward_backward", forward_backward(model_id))
        api.result("optim_step", optim_step(model_id))
        expected = logprobs(api, model_id)
        operation, newest = kill_while_saving(api, process, model_id, 4, 0.02, state_dir)
    for delay_s in (0.1, None):
        with server_process(state_dir, *arguments) as (url, process):
            api = Api(url, KEY_A)
            answer = api.ok("retrieve_future", {"request_id": operation})
            assert answer["error"].endswith(f"create a new session, and load its newest checkpoint {newest}"), answer
            load_newest(api)
            create = {"session_id": api.session(), "model_seq_id": 0, "path": newest, "optimizer": True}
            model_id = api.result("load_weights", create)["model_id"]
            assert logprobs(api, model_id) == expected
            if delay_s is not None:
                operation, newest = kill_while_saving(api, process, model_id, 2, delay_s, state_dir)


def kill_while_saving(
    api: Api, process: subprocess.Popen[str], model_id: str, seq_id: int, delay_s: float, state_dir: Path
) -> tuple[str, str]:
    """Save from operation `seq_id` on, kill the server meanwhile, and check what it left: an operation that it still owed, and the
    newest checkpoint of the model."""
    acknowledged: list[str] = []
    owed = api.ok("optim_step", optim_step(model_id, 10**6))["request_id"]

    def save_on_and_on() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for number in itertools.count(seq_id, 4):
                saves = [("save_weights", f"s{number}"), ("save_weights_for_sampler", "again")] * 2
                saves[2] = ("save_weights", f"s{number}-too")
                bodies = [
                    (path, {"model_id": model_id, "seq_id": number + i, "path": name})
                    for i, (path, name) in enumerate(saves)
                ]
                for request_id in [api.ok(*body)["request_id"] for body in bodies]:
                    acknowledged.append(api.fetch(request_id)["path"])

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_on_and_on)
        eventually(lambda: len(acknowledged) > 1, "a save is acknowledged")
        time.sleep(delay_s)
        process.kill()
        process.wait()
        saving.result(timeout=30)
    store = Store(state_dir / "serve.sqlite")
    kept = [record for record in store.checkpoints("a") if record.model == model_id]
    assert {record.path for record in kept} >= {*acknowledged}
    assert store.usage("a").trained == TOKENS, "billed once, and still"
    store.close()
    return owed, next(record.path for record in kept if record.kind == "weights")


def load_newest(api: Api) -> None:
    """Load the newest two of the listed checkpoints of each kind, which a kill may have cut."""
    session = api.session()
    records = api.ok("checkpoints?limit=1000")["checkpoints"]
    for number, record in enumerate([record for record in records if record["checkpoint_type"] == "training"][:2]):
        create = {"session_id": session, "model_seq_id": number, "path": record["tinker_path"], "optimizer": True}
        assert record["size_bytes"] > 0 and "model_id" in api.result("load_weights", create)
    for number, record in enumerate([record for record in records if record["checkpoint_type"] == "sampler"][:2]):
        create = {"session_id": session, "sampling_session_seq_id": number, "model_path": record["tinker_path"]}
        asked = {"prompt": {"chunks": [{"tokens": [40]}]}, "sampling_params": {"max_tokens": 1}}
        assert api.result("asample", {**api.ok("create_sampling_session", create), **asked})["sequences"]


def test_sigterm_ends_what_runs_fails_what_waits_and_logs_no_secrets(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text(f"a={KEY_A}\n")
    log: list[str] = []
    marker = "marker-of-a-prompt"
    with (
        (tmp_path / "stderr").open("w") as stderr,
        server_process(tmp_path / "state", "--api-keys", str(keys), log=log, stderr=stderr) as (url, process),
    ):
        api = Api(url, KEY_A)
        model_id = api.model()
        chat = {"model": "tiny", "messages": [{"role": "user", "content": marker}], "max_tokens": 2}
        assert api.ok("/v1/chat/completions", chat)["choices"]
        api.refused(400, "/v1/chat/completions", {**chat, "temperature": marker})
        api.refused(401, "asample", {"prompt": marker}, **{"X-API-Key": f"tml-{marker}"})
        api.failed("save_weights", {"model_id": model_id, "path": f"{marker}/"})
        session = model_id.partition(":")[0]
        sampler = api.ok(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        )
        long = {
            "prompt": {"chunks": [{"tokens": [40]}]},
            "sampling_params": {"max_tokens": 150, "stop": marker},
            "num_samples": 100,
        }
        running = api.ok("asample", {**sampler, **long})["request_id"]
        time.sleep(0.3)
        queued = [api.ok("forward_backward", forward_backward(model_id))["request_id"] for _ in range(5)]
        with ThreadPoolExecutor(6) as pool:
            waiting = [pool.submit(api.fetch, request_id) for request_id in (running, *queued)]
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            results = [future.result(timeout=60) for future in waiting]
        assert len(results[0]["sequences"]) == 100
        for result in results[1:]:
            assert result["category"] == "server" and "go on from the last checkpoint" in result["error"]
        assert process.wait(timeout=20) == 0
    output = "".join(log) + (tmp_path / "stderr").read_text()
    assert marker not in output and KEY_A not in output
    assert "never retrieved" not in output and "Traceback" not in output, output
    lines = [json.loads(line) for line in log]
    assert {"time", "method", "path", "status", "ms", "tenant"} == {*lines[0]}
    assert {line["tenant"] for line in lines} == {"a", None} and {line["status"] for line in lines} == {200, 400, 401}
