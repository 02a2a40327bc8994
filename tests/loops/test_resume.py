"""What a run checks before it goes on: its weights, its data, what it starts from."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cookbook.tracking.checkpoints import CheckpointLog
from tests.conftest import SMALL, CommandLine
from tests.loops.harness import assert_same_run

RECIPE = ("recipe=gsm8k_grpo", *SMALL, "checkpoint.every=1")
CHAT = ("recipe=chat_sft", "backend=fake", "loop.steps=3", "loop.batch_size=2", "eval.examples=2", "checkpoint.every=1")


def test_a_damaged_checkpoint_falls_back_and_the_numbers_are_the_same(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE, "run_dir=whole", "loop.steps=4").status == 0
    assert cli(*RECIPE, "run_dir=run", "loop.steps=3").status == 0
    checkpoint = CheckpointLog(tmp_path / "run").latest()
    assert checkpoint is not None
    weights = Path(checkpoint.states["policy"], "weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    ran = cli("resume=run", "loop.steps=4")
    assert ran.status == 0, ran.err
    assert "warning: the checkpoint of step 3 cannot be used" in ran.out and "continuing at step 3" in ran.out
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_dataset_that_changed_is_said_or_refused(cli: CommandLine, tmp_path: Path, data_folder: Path):
    overrides = (*RECIPE, "dataset=gsm8k", f"dataset.path={data_folder}", "run_dir=run")
    assert cli(*overrides).status == 0
    file = data_folder / "train.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], lines[-1].replace("What is", "How much is")]) + "\n")
    ran = cli("resume=run", "loop.steps=3")
    assert ran.status == 0 and "warning: the train split of the dataset has changed" in ran.out, ran.err
    file.write_text("\n".join(lines[1:]) + "\n")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert (
        "its train split has changed since this run was saved (4 rows then, 3 now)"
        in cli("resume=run", "loop.steps=4").line()
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("other", ["lora.rank=4", "lora.alpha=8", "model.name=other"])
def test_a_start_from_other_settings_is_refused(cli: CommandLine, tmp_path: Path, other: str):
    assert cli(*RECIPE, "run_dir=first").status == 0
    start = tmp_path / "first" / "checkpoints" / "states" / "first-step-000002-policy"
    assert f"start_from={start}: " in cli(*RECIPE, "run_dir=second", f"start_from={start}", other).line()
    assert cli(*RECIPE, "run_dir=second", f"start_from={start}").status == 0


@pytest.mark.parametrize(
    "override",
    ["optim.learning_rate=inf", "optim.beta1=nan", "optim.eps=\"'inf'\"", "lora.alpha=inf", "loop.warmup_fraction=nan"],
)
def test_settings_that_are_not_finite_are_refused(cli: CommandLine, tmp_path: Path, override: str):
    key = override.partition("=")[0]
    assert cli(*CHAT, override).line().startswith(f"error: {key}=")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_diverge_stop_the_run_and_a_finite_checkpoint_stays(cli: CommandLine, tmp_path: Path):
    line = cli(*CHAT, "checkpoint.keep=1", "loop.schedule=constant", "optim.learning_rate=1e308", "run_dir=run").line()
    assert "the weights are no longer finite" in line or "loss 'cross_entropy' is" in line
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    checkpoint, warnings = CheckpointLog(tmp_path / "run").latest_intact()
    assert checkpoint is not None and not warnings
    weights = load_file(Path(checkpoint.states["policy"], "weights.safetensors"))
    assert all(np.isfinite(array).all() for array in weights.values())
