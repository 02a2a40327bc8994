"""Faults between a client and the server, over real sockets: nothing is applied twice or lost."""

import gc
import http.client
import json
import logging
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cookbook.backends.fake import FakeService
from cookbook.core.types import AdamParams, Datum, ModelInput
from cookbook.serve.adapters.tinker import routes
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import Usage
from tests.serve.api import error_line
from tests.serve.fake_server import (
    ADAM,
    TOKENS,
    fake_server,
    forward_backward,
    logprobs,
    optim_step,
    sdk_data,
    tokens_of,
)
from tests.serve.live_server import API_KEY
from tests.serve.waiting import eventually

pytestmark = pytest.mark.usefixtures("quick_reaper")


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


def test_a_killed_client_does_not_affect_others_and_its_memory_is_freed(tmp_path: Path):
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
        request_id = api.ok("optim_step", optim_step(other))["request_id"]
        backend.gate.set()
        assert "metrics" in api.fetch(request_id)

        session = model_id.partition(":")[0]

        def expired() -> bool:
            logprobs(api, other)
            record = service.store.session("local", session)
            return record is not None and record.state == "Expired"

        eventually(expired, "the session of a killed client expires")
        assert "metrics" in api.fetch(last), "what was accepted ran to its end"
        for path, body in (("optim_step", optim_step(model_id, 100)), ("session_heartbeat", {"session_id": session})):
            assert re.search(r"is Expired \(no request .*\); create a new session", api.refused(410, path, body))
        gc.collect()
        assert [made() is None for made in backend.made] == [False, True], "its weights are gone, the other's are not"


def test_a_hundred_waiting_clients_get_their_results_and_do_not_delay_others(tmp_path: Path):
    with fake_server(tmp_path, limits=Limits(max_sessions=200)) as (api, _, backend), ThreadPoolExecutor(100) as pool:
        models = [*pool.map(lambda _: api.model(), range(100))]
        backend.gate.clear()
        sent = [api.ok("optim_step", optim_step(model))["request_id"] for model in models]
        waiting = [pool.submit(api.fetch, request_id) for request_id in sent]
        time.sleep(0.5)
        for model in models[:20]:
            api.ok("get_info", {"model_id": model})
        assert not any(future.done() for future in waiting), "other requests are answered while all of them wait"
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


def test_an_oversized_body_is_refused_and_later_operations_fail_with_a_message(tmp_path: Path):
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
            assert status == 200 or error_line(answer)
        assert len(logprobs(api, api.model())) == TOKENS, "the server goes on"
