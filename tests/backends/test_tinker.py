"""The tinker backend: the contract against our own server over a socket, early errors, and drop-in modules."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("tinker")

import httpx

from cookbook.backends.tinker import TinkerService, calls, connection
from cookbook.backends.tinker.calls import Calls, failure
from cookbook.backends.tinker.connection import find_features
from cookbook.backends.tinker.convert import Stops
from cookbook.core.clients import ServiceClient
from cookbook.core.errors import BackendError, CapabilityError, ConfigError, CookbookError
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams
from tests.backend_contract import BackendContract
from tests.backends import drop_in
from tests.conftest import SMALL, CommandLine
from tests.serve.live_server import live_server

DROP_IN = "a_vendor_of_tinker"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live_server(tmp_path_factory.mktemp("server"), device="cpu", dtype="float32") as url:
        yield url


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TINKER_API_KEY", "TINKER_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)


class TestTinkerBackend(BackendContract):
    base_model = "tiny"
    learning_rate = 3e-3
    url: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, url: str) -> None:
        cls.url = url

    @classmethod
    def make_service(cls, state_dir: Path) -> ServiceClient:
        """What is saved is the server's: `state_dir` plays no part."""
        return TinkerService(base_url=cls.url)


def test_capabilities_are_the_servers(url: str):
    service = TinkerService(base_url=url, model_name="tiny")
    assert service.list_base_models() == ["tiny"]
    assert {"gspo", "dro", "cross_entropy"} <= service.capabilities.losses
    assert service.capabilities.critic and service.capabilities.seeds and service.capabilities.loss_temperature
    assert os.environ["TINKER_TELEMETRY"] == "0"
    service.stop()


def test_a_recipe_runs(url: str, cli: CommandLine, tmp_path: Path):
    ran = cli(
        "recipe=gsm8k_ppo", *SMALL[1:], "backend=tinker", f"backend.base_url={url}", f"run_dir={tmp_path / 'run'}"
    )
    assert ran.status == 0, ran.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
    assert ran.err == ""


def test_a_run_goes_on_at_a_restarted_server(cli: CommandLine, tmp_path: Path):
    run = ("recipe=gsm8k_grpo", *SMALL[2:], "backend=tinker", "checkpoint.every=1", f"run_dir={tmp_path / 'run'}")
    for steps, resume in ((1, "never"), (2, "auto")):
        with live_server(tmp_path / "state", device="cpu", dtype="float32") as url:
            ran = cli(*run, f"loop.steps={steps}", f"resume={resume}", f"backend.base_url={url}")
            assert (ran.status, ran.err) == (0, "")
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if "time/step" in line
    ]
    assert steps == [0, 1]


def test_what_is_wrong_stops_a_run_before_it_starts(url: str, cli: CommandLine, tmp_path: Path):
    run = ("recipe=gsm8k_grpo", "backend=tinker", f"run_dir={tmp_path / 'run'}")
    line = cli(*run, f"backend.base_url={url}", "model=smollm2").line()
    assert "'smollm2' is not served" in line and "served are tiny" in line
    assert "TINKER_API_KEY is not set" in cli(*run).line()
    assert not (tmp_path / "run").exists()


def test_each_obstacle_has_its_line(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        silent = f"http://127.0.0.1:{free.getsockname()[1]}"
    obstacles = [
        ({"module": "no_such_sdk"}, ConfigError, "no_such_sdk.*cannot be imported"),
        ({"base_url": "localhost:8000"}, ConfigError, "is not a URL"),
        ({"base_url": "http://example.invalid"}, ConfigError, "TINKER_API_KEY is not set"),
        ({"base_url": silent}, BackendError, "cannot be reached.*start the server"),
        ({"base_url": f"{url}/elsewhere"}, BackendError, "answers 404"),
        ({"base_url": url, "model_name": "tinny"}, ConfigError, "not served.*did you mean tiny"),
        ({"base_url": url, "patience_s": 0.0}, ConfigError, "patience_s"),
    ]
    for arguments, kind, pattern in obstacles:
        with pytest.raises(kind, match=pattern) as raised:
            TinkerService(**arguments)
        assert "\n" not in str(raised.value)
    monkeypatch.setenv("TINKER_API_KEY", "sk-of-another-vendor")
    with pytest.raises(ConfigError, match="begin with tml-"):
        TinkerService(base_url=url)


def test_wrong_key_is_refused_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = tmp_path / "keys"
    keys.write_text("alice=tml-the-right-key-of-all\n")
    with live_server(tmp_path / "state", api_keys=keys) as guarded:
        monkeypatch.setenv("A_KEY", "tml-the-wrong-key-of-all")
        with pytest.raises(ConfigError, match="refuses the API key") as raised:
            TinkerService(base_url=guarded, api_key_env="A_KEY")
        assert "wrong-key" not in str(raised.value)
        monkeypatch.setenv("A_KEY", "tml-the-right-key-of-all")
        service = TinkerService(base_url=guarded, api_key_env="A_KEY", model_name="tiny")
        assert service.create_sampling_client(base_model="tiny").compute_logprobs(ModelInput((1,))).result(60) == [None]
        service.stop()


def test_tinker_itself_is_asked_by_its_sdk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "HOSTED_ANSWER_S", 0.05)

    class Sdk:
        @staticmethod
        def RestClient(api_key: str) -> SimpleNamespace:
            if api_key == "tml-wrong":
                raise RuntimeError("Error code: 401")
            if api_key == "tml-slow":
                time.sleep(1)
            models = [SimpleNamespace(model_name="Qwen/Qwen3-8B")]
            answer = SimpleNamespace(result=lambda: SimpleNamespace(supported_models=models))
            return SimpleNamespace(get_server_capabilities=lambda: answer)

    features = find_features("tinker", Sdk, None, "tml-right")
    assert features.base_models == ("Qwen/Qwen3-8B",) and not features.weights
    with pytest.raises(ConfigError, match=r"401.*check TINKER_API_KEY"):
        find_features("tinker", Sdk, None, "tml-wrong")
    with pytest.raises(BackendError, match="has not answered"):
        find_features("tinker", Sdk, None, "tml-slow")


def test_lost_session_says_what_to_load(url: str):
    service = TinkerService(base_url=url)
    client = service.create_lora_training_client("tiny", rank=4)
    path = client.save_state("kept").result(60).path
    session = path.removeprefix("tinker://").partition(":")[0]
    httpx.post(f"{url}/api/v1/sessions/{session}/finish", json={"reason": {"type": "errored"}}).raise_for_status()
    with pytest.raises(BackendError, match=f"create a new session, and load its newest checkpoint {path}") as raised:
        client.optim_step(AdamParams()).result(60)
    assert "\n" not in str(raised.value) and "self." not in str(raised.value)
    service.stop()
    successor = TinkerService(base_url=url)
    with successor.create_training_client_from_state(path, with_optimizer=True) as restored:
        restored.optim_step(AdamParams()).result(60)
    successor.stop()


def test_pending_operations_of_a_silent_server_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(calls, "WATCH_EVERY_S", 0.02)

    async def answers() -> bool:
        return False

    watched = Calls(answers, patience_s=1.0, where="http://server")
    with caplog.at_level(logging.WARNING):
        pending = watched.call(lambda: asyncio.sleep(60), lambda value: value)
        with pytest.raises(BackendError, match=r"http://server has not answered.*resume=auto"):
            pending.result(10)
    assert [record.message for record in caplog.records] == [
        "http://server does not answer; what is pending fails after 1 s"
    ]
    pending = watched.call(lambda: asyncio.sleep(60), lambda value: value)
    watched.stop("stopped")
    with pytest.raises(BackendError, match="stopped"):
        pending.result(10)


def test_errors_are_the_servers_words_in_one_line():
    failed = RuntimeError(
        "Request failed: datum 0: too\nlong for self.request_id='x' and expected type self.model_cls=<class>"
    )
    assert str(failure(failed)) == "datum 0: too long"
    refused = RuntimeError("Error code: 404 - {...}")
    vars(refused)["body"] = {"detail": "there is no model m; create one"}
    outer = ValueError("Error retrieving result: Error code: 404 with status 404 for self.request_id='x'")
    outer.__cause__ = refused
    assert str(failure(outer)) == str(failure(refused)) == "there is no model m; create one"
    assert str(failure(KeyError("x"))) == "KeyError: 'x'"


class FakeTokenizer:
    """Token i is the i-th letter."""

    eos_token_id = 25

    def decode(self, tokens: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


@pytest.mark.parametrize(
    ("stop", "tokens", "wire_reason", "expected", "reason"),
    [
        ((), [0, 1, 25], "stop", [0, 1, 25], "eos"),
        ((25,), [0, 25], "stop", [0, 25], "eos"),
        ((1,), [0, 1], "stop", [0, 1], "stop"),
        (("bc",), [0, 1, 2], "stop", [0, 1, 2], "stop"),
        (("bc",), [0, 24], "stop", [0, 24], "eos"),  # another EOS of the model's
        ((7, "bc"), [0, 1, 2, 3, 7], "stop", [0, 1, 2], "stop"),  # the wire had 7 alone
        ((7, "xy"), [0, 1, 7], "stop", [0, 1, 7], "stop"),
        ((7, "bc"), [0, 1, 2, 3, 4, 5], "length", [0, 1, 2], "stop"),
        ((), [0, 1, 2, 3, 4, 5, 6, 7], "stop", [0, 1, 2, 3, 4, 5], "length"),  # of a service with a least max_tokens
    ],
)
def test_how_a_sequence_ended(
    stop: tuple[str | int, ...], tokens: list[int], wire_reason: str, expected: list[int], reason: str
):
    stops = Stops(SamplingParams(max_tokens=6, stop=stop), FakeTokenizer(), min_max_tokens=8)
    assert stops.wire_max_tokens == 8
    sampled = SimpleNamespace(tokens=tokens, logprobs=[-0.5] * len(tokens), stop_reason=wire_reason)
    sequence = stops.sequence(sampled)
    assert (sequence.tokens, sequence.stop_reason, len(sequence.logprobs)) == (expected, reason, len(expected))


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> TinkerService:
    monkeypatch.setitem(sys.modules, DROP_IN, drop_in.make_module(DROP_IN))
    drop_in.CALLS.clear()
    return TinkerService(module=DROP_IN, model_name="tiny")


def test_drop_in_module_has_what_tinker_documents(vendor: TinkerService, monkeypatch: pytest.MonkeyPatch):
    assert vendor.capabilities.losses == {"cross_entropy", "importance_sampling", "ppo", "cispo"}
    assert vendor.capabilities.custom_loss and not vendor.capabilities.loss_temperature
    for arguments in ({"role": "critic"}, {"rank": None}):
        with pytest.raises(CapabilityError):
            vendor.create_lora_training_client("tiny", **arguments)
    monkeypatch.setenv("TINKER_API_KEY", "tml-a-key-for-tinker")
    TinkerService(module=DROP_IN)
    assert drop_in.CALLS == [("service", (None, None))] * 2, "a key of Tinker's is not for another vendor"
    vendor.stop()


def test_drop_in_module_gets_documented_requests(vendor: TinkerService, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        client, _ = (vendor.create_lora_training_client("tiny", rank=8, alpha=16, seed=3) for _ in range(2))
    assert drop_in.CALLS[-1] == ("model", ("tiny", 8, 3, None))
    assert len(caplog.records) == 1 and "alpha=16" in caplog.records[0].message
    ones, weights = np.ones(2, np.float32), np.array([0.0, 0.5], np.float32)
    datum = Datum(
        ModelInput((1, 2)), {"target_tokens": [2, 3], "weights": weights, "logprobs": -ones, "advantages": 4 * ones}
    )
    for loss_fn in ("ppo", "cross_entropy"):
        client.forward_backward([datum], loss_fn).result(10)
    (_, [policy]), (_, [supervised]) = drop_in.CALLS[-2:]
    assert set(policy) == {"target_tokens", "logprobs", "advantages"} and policy["advantages"].tolist() == [0.0, 2.0]
    assert set(supervised) == {"target_tokens", "weights"} and supervised["weights"].tolist() == [0.0, 0.5]
    with pytest.raises(BackendError, match="no step today: the trainer is on strike"):
        client.optim_step(AdamParams()).result(10)
    sampler = client.save_weights_and_get_sampling_client()
    response = sampler.sample(ModelInput((1,)), 2, SamplingParams(max_tokens=3)).result(10)
    assert [sequence.tokens for sequence in response.sequences] == [[10, 11, 12]] * 2
    assert client.save_state("any").result(10).path == "a-bare-id"
    assert (
        vendor.create_training_client_from_state("a-bare-id", with_optimizer=True).get_tokenizer().eos_token_id
        is not None
    )
    with pytest.raises(CookbookError, match="create_sampling_client"):
        vendor.create_sampling_client(base_model="tiny")
    vendor.stop()
    with pytest.raises(BackendError, match="stopped"):
        client.save_state("late")
