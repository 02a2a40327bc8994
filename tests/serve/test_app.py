"""HTTP around the core: health, metrics, errors, the access log, and the messages of a server that cannot start."""

import json
import logging
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.backends.fake import FakeService
from cookbook.serve.__main__ import main
from cookbook.serve.core.errors import ServiceError
from cookbook.serve.core.store import CheckpointRecord, Store
from cookbook.serve.http.errors import STATUS
from cookbook.serve.server import remove_leftovers
from tests.serve.api import Api
from tests.serve.live_server import live_server, live_service
from tests.serve.waiting import eventually

KEY = "tml-key-of-the-tenant-0000"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with live_service(FakeService(str(tmp_path / "states")), tmp_path, keys=[("a", KEY)]) as (url, _):
        yield Api(url, KEY, "fake")


@pytest.fixture(autouse=True)
def access_log() -> Iterator[None]:
    """Undo what `main` changes in the access log."""
    log = logging.getLogger("cookbook.serve.access")
    before = log.propagate, log.level, [*log.handlers]
    yield
    log.propagate, log.level, log.handlers = before


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a server that does not start."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_health_needs_no_key_and_metrics_count_what_was_done(api: Api):
    assert Api(api.url).call("/healthz") == (200, {"status": "ok"}) == Api(api.url).call("healthz")
    model_id = api.model()
    assert "error" in api.result(
        "load_weights", {"model_id": model_id, "path": "tinker://x/weights/y", "optimizer": False}
    )
    sampler = api.ok(
        "create_sampling_session",
        {"session_id": model_id.partition(":")[0], "sampling_session_seq_id": 0, "base_model": "fake"},
    )
    asked = {"prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": {"max_tokens": 2}}
    drawn = api.result("asample", {**sampler, **asked})["sequences"][0]["tokens"]
    used = {"prefill": 3, "sampled": len(drawn), "trained": 0}
    assert api.call("/usage") == (200, used) == api.call(f"/usage?session={model_id.partition(':')[0]}")
    api.refused(404, "/usage?session=guessed")
    eventually(lambda: 'kind="Sample"' in api.ok("/metrics"), "the sample is counted, shortly after its result")
    text = api.ok("/metrics")
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in {
        'cookbook_operations_total{kind="CreateModel",outcome="ok"}': 1,
        'cookbook_operations_total{kind="Load",outcome="NotFound"}': 1,
        'cookbook_tokens_total{kind="prefill"}': 3,
        'cookbook_tokens_total{kind="sampled"}': len(drawn),
        'cookbook_operation_seconds_count{kind="Sample"}': 1,
        "cookbook_sessions": 1,
        "cookbook_queue_depth": 0,
    }.items():
        assert float(counts[name]) == value, name
    assert model_id[:32] not in text and "tenant" not in text


def test_errors_have_the_shape_that_the_clients_of_a_path_read(api: Api):
    large = b"x" * 70 * 2**20
    for path, status in (("/usage?session=x", 404), ("get_info", 404), ("get_info", 413)):
        body = None if path.startswith("/") else {"model_id": "x"} if status == 404 else large
        got, answer = api.call(path, body)
        assert (got, {*answer}) == (status, {"detail"})
    for body, status, kind in (({"model": "none", "prompt": "x"}, 400, "InvalidRequest"), (large, 413, "TooLarge")):
        got, answer = api.call("/v1/completions", body)
        assert (got, {*answer}, answer["error"]["type"]) == (status, {"error"}, kind)
    for path, variable in (("get_info", "TINKER_API_KEY"), ("/oai/api/v1/completions", "OPENAI_API_KEY")):
        assert variable in Api(api.url, f"{KEY}-unknown").refused(401, path, {})


def test_every_error_of_the_service_has_a_status():
    assert {*ServiceError.__subclasses__()} == {*STATUS}


def test_the_log_has_a_line_for_each_request_and_nothing_of_what_was_sent(api: Api, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    api.ok("training_runs?limit=7")
    api.refused(400, "create_session", b"{marker")
    Api(api.url, "tml-marker-is-no-key-at-all").refused(401, "create_session", {})

    def lines_of_log() -> list[str]:
        return [record.message for record in caplog.records if record.name.startswith("cookbook")]

    eventually(lambda: len(lines_of_log()) == 3, "every answer is followed by a line")
    logged = lines_of_log()
    lines = [json.loads(line) for line in logged]
    assert [(line["method"], line["path"], line["status"], line["tenant"]) for line in lines] == [
        ("GET", "/api/v1/training_runs", 200, "a"),
        ("POST", "/api/v1/create_session", 400, "a"),
        ("POST", "/api/v1/create_session", 401, None),
    ]
    assert all(line["ms"] >= 0 for line in lines)
    assert not [line for line in logged if "marker" in line or KEY in line or "limit" in line]


def test_another_address_than_loopback_needs_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for host in ("0.0.0.0", "::", "example.org", "192.0.2.1"):
        assert "add --api-keys FILE" in refusal(capsys, "--port", 0, "--host", host, "--state-dir", tmp_path)


def test_a_port_in_use_and_one_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} on 127.0.0.1: is in use; use another" in refusal(
            capsys, "--port", port, "--state-dir", tmp_path
        )
    assert "is not available" in refusal(capsys, "--port", 99999, "--state-dir", tmp_path)


def test_a_state_directory_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with live_server(tmp_path):
        assert "another server uses it; stop that one" in refusal(capsys, "--port", 0, "--state-dir", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "has no key"),
        ("# nothing\n\nsecret-without-tenant\n", r":3: must be tenant=key"),
        ("a=tml-short\n", r":1: the key must have 20 characters"),
        (f"a=sk-{KEY}\n", r":1: the key must begin with tml-"),
        (f"a={KEY}\nb={KEY}\n", r":2: an earlier line has the same key"),
        (f"a b={KEY}\n", ":1: must be tenant=key"),
    ],
)
def test_a_bad_key_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, message: str):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    said = refusal(capsys, "--port", 0, "--api-keys", file, "--state-dir", tmp_path / "state")
    assert (
        re.search(f"--api-keys {file}.*{message}", said)
        and KEY not in said
        and "secret" not in said
        and "tml-short" not in said
    )


def test_bad_settings_and_models(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for arguments, message in {
        ("--max-queued", "0"): "--max-queued 0: must be more than 0",
        ("--base-model", "=x"): "must be NAME or NAME=PATH",
        ("--base-model", "a=tiny", "--base-model", "a=tiny"): "a is given twice",
        ("--base-model", f"a={tmp_path}/nothing"): "nothing",
        ("--device", "abacus"): "abacus",
    }.items():
        assert message in refusal(capsys, "--port", 0, "--state-dir", tmp_path, *arguments)


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "cookbook.serve.server", raising=False)
    assert "pip install -e '.[serve]'" in refusal(capsys, "--port", 0, "--state-dir", tmp_path)


def test_saves_that_were_never_recorded_are_removed_at_the_start(tmp_path: Path):
    store = Store(tmp_path / "serve.sqlite")
    folder = tmp_path / "checkpoints"
    for name in ("kept", ".half-written-x", "unrecorded", "sampler/kept-too", "sampler/unrecorded-too"):
        (folder / name).mkdir(parents=True)
    for name in ("kept", "sampler/kept-too"):
        store.put_checkpoint(
            CheckpointRecord("m", "weights", name, "a", str(folder / name), "tiny", rank=8, bytes=1, created=0.0)
        )
    remove_leftovers(store, folder)
    store.close()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {"kept", "sampler", "sampler/kept-too"}
