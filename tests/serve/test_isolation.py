"""API keys and tenants over real sockets: a tenant sees nothing of another."""

import json
from pathlib import Path
from typing import Any

from tests.serve.api import Api, error_line
from tests.serve.fake_server import KEY_A, KEY_B, fake_server, forward_backward, logprobs, optim_step


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
            assert guessed[0] == 404 and error_line(guessed[1]), (where, guessed)
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
