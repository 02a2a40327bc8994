"""The tinker API without the SDK: JSON requests, and requests that an SDK never sends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.serve.adapters.tinker import routes
from cookbook.serve.core.tickets import Ticket
from tests.serve.api import Api
from tests.serve.live_server import live_server

DATUM = {
    "model_input": {"chunks": [{"tokens": [40, 41]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [41, 42], "dtype": "int64"},
        "weights": {"data": [0, 1], "dtype": "float32"},
    },
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with live_server(tmp_path_factory.mktemp("server")) as url:
        yield Api(url)


def forward_backward(model_id: str, seq_id: int | None = None, data: object = None) -> dict[str, object]:
    asked = {"data": [DATUM] if data is None else data, "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": asked}


def test_a_cycle_in_json(api: Api) -> None:
    model_id = api.model()
    output = api.result("forward_backward", forward_backward(model_id))
    assert output["metrics"]["loss:sum"] == pytest.approx(
        -output["loss_fn_outputs"][0]["logprobs"]["data"][1], rel=1e-5
    )
    assert (
        "grad_norm"
        in api.result("optim_step", {"model_id": model_id, "adam_params": {"learning_rate": 1e-3}})["metrics"]
    )
    sampler = api.result("save_weights_for_sampler", {"model_id": model_id, "sampling_session_seq_id": 0})[
        "sampling_session_id"
    ]
    asked = {
        "prompt": {"chunks": [{"tokens": [40]}]},
        "sampling_params": {"max_tokens": 3, "seed": 1},
        "prompt_logprobs": True,
    }
    sample = api.result("asample", {"sampling_session_id": sampler, **asked})
    assert 1 <= len(sample["sequences"][0]["tokens"]) <= 3 and sample["prompt_logprobs"] == [None]
    path = api.result("save_weights", {"model_id": model_id, "path": "end"})["path"]
    assert path == f"tinker://{model_id}/weights/end"


def test_numbers_decide_the_order_and_repeats_are_the_same_operation(api: Api) -> None:
    model_id = api.model()
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {}}
    second = api.ok("optim_step", step)["request_id"]
    first = api.ok("forward_backward", forward_backward(model_id, 1))["request_id"]
    assert api.ok("optim_step", step)["request_id"] == second
    assert api.ok("retrieve_future", {"request_id": second})["metrics"]["grad_norm"] > 0, "the gradient was there"
    assert api.ok("forward_backward", forward_backward(model_id, 1))["request_id"] == first
    again = api.result("optim_step", {**step, "seq_id": 3})
    assert again["metrics"]["grad_norm"] == 0, "the repeated forward_backward added nothing"


def test_a_result_that_is_not_ready_can_be_fetched_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = api.model()
    waiting = api.ok("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})["request_id"]
    waited, wait = [], Ticket.wait
    with monkeypatch.context() as patch:
        patch.setattr(routes, "HOLD_S", 0.2)
        patch.setattr(Ticket, "wait", lambda ticket, timeout_s: waited.append(timeout_s) or wait(ticket, timeout_s))
        status, answer = api.call("retrieve_future", {"request_id": waiting})
    assert (status, answer["type"], answer["request_id"]) == (408, "try_again", waiting)
    assert waited == [0.2]
    api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert "metrics" in api.ok("retrieve_future", {"request_id": waiting})


def test_the_size_of_a_large_result_is_sent_first_on_request(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "METADATA_FIRST_BYTES", 1)
    request_id = api.ok("forward_backward", forward_backward(api.model()))["request_id"]
    status, answer = api.call(
        "retrieve_future", {"request_id": request_id, "allow_metadata_only": True}, Accept=routes.PROTOBUF
    )
    assert (status, answer) == (200, {"status": "complete_metadata", "response_payload_size": 8})


def test_operations_that_make_no_sense_fail_in_their_turn(api: Api) -> None:
    model_id = api.model()
    wrong = {**DATUM, "model_input": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}
    sparse = {
        "data": [1.0],
        "dtype": "float32",
        "shape": [2, 2**40],
        "sparse_crow_indices": [0, 1, 1],
        "sparse_col_indices": [0],
    }
    huge = {**DATUM, "loss_fn_inputs": {"weights": sparse}}
    late = {**DATUM, "loss_fn_inputs": {"target_tokens": {"data": [2**70, 1], "dtype": "int64"}}}
    for message, path, body in (
        ("no images or audio", "forward_backward", forward_backward(model_id, data=[DATUM, wrong])),
        ("entries once dense", "forward_backward", forward_backward(model_id, data=[huge])),
        ("does not fit int64", "forward_backward", forward_backward(model_id, data=[late])),
        ("learning_rate is nan", "optim_step", {"model_id": model_id, "adam_params": {"learning_rate": float("nan")}}),
        ("must be below 1", "optim_step", {"model_id": model_id, "adam_params": {"beta2": 1.0}}),
        ("AdamW only", "optim_step", {"model_id": model_id, "optimizer_params": {"type": "dimuon"}}),
        ("checkpoint name", "save_weights", {"model_id": model_id, "path": "a/b"}),
        ("path is missing", "save_weights", {"model_id": model_id}),
        (
            "kind='inflight'",
            "save_weights_for_sampler",
            {"model_id": model_id, "sampling_session_seq_id": 0, "kind": "inflight"},
        ),
        (
            "there is no checkpoint",
            "load_weights",
            {"model_id": model_id, "path": "tinker://a/weights/b", "optimizer": False},
        ),
    ):
        answer = api.result(path, body)
        assert message in answer["error"] and answer["category"] == "user", answer
    assert api.result("optim_step", {"model_id": model_id, "adam_params": {}})["metrics"]["grad_norm"] == 0


def test_requests_that_cannot_be_read_are_refused(api: Api) -> None:
    model_id = api.model()
    protobuf = {"Content-Type": routes.PROTOBUF}
    assert "not a ForwardBackwardRequest protobuf" in api.refused(400, "forward_backward", b"\xff\xff\xff", **protobuf)
    assert "compressed" in api.refused(400, "forward_backward", b"", **protobuf, **{"Content-Encoding": "zstd"})
    assert "Invalid JSON" in api.refused(400, "optim_step", b"{")
    assert "adam_params" in api.refused(
        400, "optim_step", {"model_id": model_id, "adam_params": {"learning_rate": "fast"}}
    )
    assert "session_id" in api.refused(400, "create_model", {})
    assert "session_id and model_seq_id" in api.refused(400, "load_weights", {"path": "x", "optimizer": True})
    for metadata in ({"lora_alpha": "much"}, {"lora_alpha": "nan"}, {"role": "judge"}, {"full_parameter": "perhaps"}):
        body = {
            "session_id": model_id[:32],
            "model_seq_id": 9,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
            "user_metadata": metadata,
        }
        assert next(iter(metadata)) in api.refused(400, "create_model", body)
    assert "GET /api/v1/nothing" in api.refused(404, "nothing")
    assert "there is no model" in api.refused(404, "get_info", {"model_id": f"{model_id[:32]}:train:5"})
    assert "there is no session" in api.refused(404, "session_heartbeat", {"session_id": "x"})
    assert "there is no operation" in api.refused(404, "retrieve_future", {"request_id": "x:op:1"})
    assert "there is no sampler" in api.refused(404, f"samplers/{model_id[:32]}:sample:5")


def test_a_sample_in_the_queue_can_be_cancelled(api: Api) -> None:
    session = api.model()[:32]
    sampler = api.ok(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )
    asked = {"prompt": {"chunks": [{"tokens": [40]}]}, "sampling_params": {"max_tokens": 200}, "num_samples": 500}
    sent = [api.ok("asample", {**sampler, **asked})["request_id"] for _ in range(3)]
    status, _ = api.call("cancel_future", {"request_id": sent[-1]})
    assert status == 204
    assert "cancelled" in api.ok("retrieve_future", {"request_id": sent[-1]})["error"]


def test_the_loss_that_recipes_ask_for_by_default_is_refused_with_one_to_choose_instead(api: Api) -> None:
    asked = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = api.ok("create_sampling_session", asked)["sampling_session_id"]
    sample = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"tokens": [40]}]},
        "sampling_params": {"max_tokens": 1},
    }
    assert "loss_fn=importance_sampling" in api.failed("asample", {**sample, "record_stability_info": True})


def test_operations_of_an_earlier_server_fail_with_what_happened_to_their_session(tmp_path: Path) -> None:
    with live_server(tmp_path) as url:
        first = Api(url)
        model_id = first.model()
        path = first.result("save_weights", {"model_id": model_id, "path": "kept"})["path"]
        request_id = first.ok("optim_step", {"model_id": model_id, "adam_params": {}})["request_id"]
    with live_server(tmp_path) as url:
        second = Api(url)
        answer = second.ok("retrieve_future", {"request_id": request_id})
        assert (
            answer["category"] == "user"
            and f"create a new session, and load its newest checkpoint {path}" in answer["error"]
        )
        assert "create a new session" in second.refused(410, "session_heartbeat", {"session_id": model_id[:32]})
        assert "create a new session" in second.refused(410, "optim_step", {"model_id": model_id, "adam_params": {}})
        session = second.ok("create_session", {})["session_id"]
        again = second.result(
            "load_weights", {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        )
        assert again["model_id"] == f"{session}:train:0"
