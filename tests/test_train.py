"""cookbook.train and cookbook.load_config: the interface for programs and notebooks."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import cookbook
from cookbook.core.errors import ConfigError, CookbookError
from tests.conftest import SMALL


def test_train_returns_the_summary_and_the_folder(tmp_path: Path):
    folder = tmp_path / "run"
    result = cookbook.train("gsm8k_grpo", *SMALL, "optim.learning_rate=1e-4", f"run_dir={folder}")
    assert result == {**json.loads((folder / "summary.json").read_text()), "run_dir": str(folder)}
    assert (result["status"], result["steps"]) == ("completed", 2)


def test_train_works_inside_a_running_event_loop(tmp_path: Path):
    async def notebook_cell() -> str:
        return cookbook.train("gsm8k_grpo", *SMALL, f"run_dir={tmp_path / 'run'}")["status"]

    assert asyncio.run(notebook_cell()) == "completed"


def test_load_config_is_the_typed_configuration():
    config = cookbook.load_config("gsm8k_grpo", "optim.learning_rate=1e-4", "loop.group_size=3")
    assert (config.optim.learning_rate, config.recipe) == (1e-4, "gsm8k_grpo")
    assert config.loop.group_size == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gsm8k_grp0"], "did you mean gsm8k_grpo?"),
        (["gsm8k_grpo", "optim.learning_rat=1"], "did you mean optim.learning_rate?"),
        (["gsm8k_grpo", "backend=fake", "loop.group_size=0"], "loop.group_size=0"),
        (["gsm8k_grpo", "seed=0,1"], "seed=0,1"),
    ],
)
def test_a_mistake_is_an_exception(arguments: list[str], expected: str, tmp_path: Path):
    with pytest.raises(CookbookError, match=expected.replace("?", r"\?")):
        cookbook.train(*arguments, f"run_dir={tmp_path / 'run'}")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path):
    cookbook.train("gsm8k_grpo", *SMALL, f"run_dir={tmp_path}/run")
    with pytest.raises(CookbookError, match="resume=auto"):
        cookbook.train("gsm8k_grpo", *SMALL, f"run_dir={tmp_path}/run")
    again = cookbook.train("gsm8k_grpo", *SMALL, f"run_dir={tmp_path}/run", "resume=auto")
    assert again["status"] == "completed"


def test_a_folder_of_ones_own(tmp_path: Path):
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "short.yaml").write_text(
        "# @package _global_\n# Four steps.\ndefaults:\n  - gsm8k_grpo\n  - _self_\nloop:\n  steps: 4\n"
    )
    config = cookbook.load_config("short", config_dir=tmp_path / "mine")
    assert (config.recipe, config.loop.steps) == ("short", 4)
    with pytest.raises(ConfigError, match="there is no such recipe"):
        cookbook.load_config("short")


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, cookbook; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'cookbook'" in loaded and not any(f"'{name}'" in loaded for name in ("hydra", "numpy", "torch"))
