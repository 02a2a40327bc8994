"""A run says at its beginning and in its summary how many parameters it trains, in which kinds of layers."""

from dataclasses import replace
from pathlib import Path

from cookbook.backends.fake import FakeService
from cookbook.backends.fake.clients import FakeTrainingClient
from cookbook.backends.local import LocalService
from cookbook.core.clients import ServiceClient
from cookbook.data.generated.small_talk import SmallTalk
from cookbook.loops import sft
from cookbook.loops.config import LoraConfig, ModelConfig
from cookbook.tracking import NoLogger
from tests.loops.harness import summary
from tests.loops.test_sft import configured


def run(run_dir: Path, service: ServiceClient, model: str) -> tuple[str, dict]:
    config = configured(run_dir, steps=1, batch_size=2)
    config = replace(config, model=ModelConfig(name=model), lora=LoraConfig(rank=4, alpha=8))
    sft.run(config, sft.Components(service, NoLogger(), SmallTalk(train_size=8, test_size=2)))
    service.stop()
    return (run_dir / "console.log").read_text(), summary(run_dir)


def test_the_local_backend_counts_by_kind_of_layer(tmp_path: Path) -> None:
    console, recorded = run(tmp_path / "run", LocalService(device="cpu", state_dir=str(tmp_path / "state")), "tiny")
    trained = recorded["trained"]
    assert trained["parameters"] == sum(trained["kinds"].values()) < trained["of"]
    assert set(trained["kinds"]) == {"attention", "mlp"}
    parts = ", ".join(f"{kind} {count:,}" for kind, count in trained["kinds"].items())
    assert f"training {trained['parameters']:,} of {trained['of']:,} parameters (" in console and parts in console
    assert console.index(parts) < console.index("step 1/1")


def test_the_fake_backend_trains_its_one_table(tmp_path: Path) -> None:
    _, recorded = run(tmp_path / "run", FakeService(state_dir=str(tmp_path / "state")), "fake")
    assert recorded["trained"]["parameters"] == recorded["trained"]["of"] > 0


def test_a_service_that_does_not_say_is_not_guessed_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(FakeTrainingClient, "trainable", None)
    console, recorded = run(tmp_path / "run", FakeService(state_dir=str(tmp_path / "state")), "fake")
    assert recorded["trained"] is None and "training " not in console.split("step 1/1")[0].replace(
        "before training", ""
    )
