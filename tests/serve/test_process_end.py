"""The end of the server process: killed while it saves, and stopped by SIGTERM."""

import contextlib
import http.client
import itertools
import json
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cookbook.serve.adapters.tinker.paths import format_path
from cookbook.serve.core.store import Store
from tests.serve.api import Api
from tests.serve.fake_server import KEY_A, TOKENS, forward_backward, logprobs, optim_step
from tests.serve.live_server import server_process
from tests.serve.waiting import eventually


def test_kill_during_saves_loses_nothing_that_was_acknowledged(tmp_path: Path):
    """A server process is killed at several moments of a stream of saves, which overwrites one name repeatedly."""
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
    """Save from operation `seq_id` on, kill the server meanwhile, and check what it left on disk.

    Returns an operation that was not finished, and the newest checkpoint of the model.
    """
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
    assert {format_path(record.key) for record in kept} >= {*acknowledged}
    assert store.usage("a").trained == TOKENS, "recorded once, and kept"
    store.close()
    return owed, next(format_path(record.key) for record in kept if record.kind == "weights")


def load_newest(api: Api) -> None:
    """Load the newest two checkpoints of each kind: they may have been saved during the kill."""
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
        eventually(lambda: "cookbook_queue_depth 0.0" in api.ok("/metrics"), "the sample is running")
        queued = [api.ok("forward_backward", forward_backward(model_id))["request_id"] for _ in range(5)]
        with ThreadPoolExecutor(6) as pool:
            waiting = [pool.submit(api.fetch, request_id) for request_id in (running, *queued)]
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            results = [future.result(timeout=60) for future in waiting]
        assert len(results[0]["sequences"]) == 100
        for result in results[1:]:
            assert result["category"] == "server" and "continue from the last checkpoint" in result["error"]
        assert process.wait(timeout=20) == 0
    output = "".join(log) + (tmp_path / "stderr").read_text()
    assert marker not in output and KEY_A not in output
    assert "never retrieved" not in output and "Traceback" not in output, output
    lines = [json.loads(line) for line in log]
    assert {"time", "method", "path", "status", "ms", "tenant"} == {*lines[0]}
    assert {line["tenant"] for line in lines} == {"a", None} and {line["status"] for line in lines} == {200, 400, 401}
