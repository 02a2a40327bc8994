"""Names of base models, and the errors of those that cannot be loaded."""

import json
import shutil
from pathlib import Path

import pytest

from cookbook.backends import base_models
from cookbook.backends.base_models import check_base_model
from cookbook.backends.local import LocalService
from cookbook.core.errors import BackendError, ConfigError


@pytest.fixture
def broken(random_model: str, tmp_path: Path) -> Path:
    """A copy of a good model's folder, to break."""
    return Path(shutil.copytree(random_model, tmp_path / "model"))


def test_good_names_pass(random_model: str) -> None:
    check_base_model("tiny")
    check_base_model(random_model)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something_is_named(broken: Path, remove: str, message: str) -> None:
    (broken / remove).unlink()
    with pytest.raises(ConfigError, match=message) as caught:
        check_base_model(str(broken))
    assert str(broken) in str(caught.value) and "\n" not in str(caught.value)
    service = LocalService(device="cpu")
    with pytest.raises(ConfigError, match=message):
        service.create_lora_training_client(str(broken))
    service.stop()


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "tinny", "a/b/c"])
def test_a_name_that_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist; give tiny, smollm2, a model folder, or a hub id"):
        check_base_model(name)


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", refuse)
    with pytest.raises(BackendError, match="hub cannot be reached \\(no route\\)"):
        check_base_model("some-owner/some-model-that-is-not-cached")


def test_an_unloadable_folder_is_one_line(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps({**config, "model_type": "no-such-architecture", "architectures": ["NoSuch"]})
    )
    service = LocalService(device="cpu")
    with pytest.raises(BackendError, match="could not be loaded") as caught:
        service.create_sampling_client(base_model=str(broken))
    assert "\n" not in str(caught.value)
    service.stop()


def test_weights_of_another_architecture_are_refused(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    service = LocalService(device="cpu")
    with pytest.raises(BackendError, match=r"lack .*layers\.2"):
        service.create_sampling_client(base_model=str(broken))
    service.stop()


def test_smollm2_comes_from_the_hub_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(base_models, "_smollm2_gguf", lambda: None)
    monkeypatch.setattr(base_models, "_check_hub", asked.append)
    assert base_models.base_model_source("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct" == asked[0]
