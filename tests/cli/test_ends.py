"""Ends of a run that nobody planned: signals, a closed output, a full disk. One line says so, nothing is lost."""

import errno
import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from cookbook.backends.fake.clients import FakeTrainingClient
from cookbook.tracking import records
from cookbook.tracking.checkpoints import CheckpointLog
from tests.cli.endings import LITTLE, Ending, start, wait_for
from tests.conftest import SMALL, CommandLine
from tests.loops.harness import assert_same_run

RECIPE = ("recipe=gsm8k_grpo", *SMALL, "loop.steps=4", "checkpoint.every=0", "eval.every=1")
UPDATE = ("recipe=gsm8k_ppo", *RECIPE[1:], "loop.num_epochs=1", "loop.num_minibatches=1")
"""PPO with a critic, which takes two optimizer steps in every step."""


def signal_at(monkeypatch: pytest.MonkeyPatch, method: str, call: int, number: signal.Signals) -> None:
    """Send the signal to this process when a client's method is called for that time."""
    original, calls = getattr(FakeTrainingClient, method), []

    def signalling(self, *arguments):
        calls.append(method)
        result = original(self, *arguments)
        if len(calls) == call:
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(FakeTrainingClient, method, signalling)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    ("method", "call", "steps"),
    [
        # In the third step: before the weights change it is given up, afterwards it ends first.
        ("forward_backward", 5, 2),
        ("optim_step", 5, 3),
        ("save_weights_and_get_sampling_client", 4, 3),
    ],
)
def test_a_signal_leaves_a_checkpoint_summary_and_report(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number, status, method, call, steps
):
    assert cli(*UPDATE, "run_dir=whole").status == 0
    with monkeypatch.context() as patch:
        signal_at(patch, method, call, number)
        ran = cli(*UPDATE, "run_dir=run")
    assert ran.status == status and "resume=auto" in ran.line()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted" and (tmp_path / "run" / "report.html").exists()
    checkpoint, _ = CheckpointLog(tmp_path / "run").latest_intact()
    assert checkpoint is not None and checkpoint.next_step == steps
    (tmp_path / "run").rename(tmp_path / "moved")
    ran = cli("resume=moved")
    assert ran.status == 0, ran.err
    assert_same_run(tmp_path / "whole", tmp_path / "moved")


def test_a_second_signal_does_not_wait_for_the_checkpoint(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    signal_at(monkeypatch, "forward_backward", 5, signal.SIGINT)
    signal_at(monkeypatch, "save_state", 1, signal.SIGINT)
    assert cli(*UPDATE, "run_dir=run").status == 130
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert not (tmp_path / "run" / "checkpoints.jsonl").exists()


def test_a_signal_stops_a_sweep(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    signal_at(monkeypatch, "save_weights_and_get_sampling_client", 2, signal.SIGTERM)
    ran = cli(*RECIPE, "seed=0,1,2", "-m", "run_dir=sweep")
    assert ran.status == 143 and "repeat the command" in ran.line()
    assert len(list((tmp_path / "sweep").iterdir())) == 1


def test_a_stage_that_is_interrupted_leaves_a_record_of_its_pipeline(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    signal_at(monkeypatch, "forward_backward", 2, signal.SIGTERM)
    ran = cli("recipe=gsm8k_pipeline", "backend=fake", "run_dir=run")
    assert ran.status == 143
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted" and list(summary["stages"]) == ["sft"]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_reader_of_the_output_that_has_enough_stops_the_run_with_a_checkpoint(tmp_path: Path):
    overrides = (*RECIPE, "loop.steps=500", "run_dir=run")
    process = start(tmp_path, *overrides, bufsize=1)
    assert process.stdout is not None and process.stderr is not None
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None
    process.stdout.close()
    errors = process.stderr.read().splitlines()
    assert process.wait() == 1
    assert len(errors) == 1 and "resume=auto" in errors[0] and "stdout" in errors[0], errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    checkpoint = CheckpointLog(tmp_path / "run").latest()
    assert checkpoint is not None and checkpoint.next_step < 500


@pytest.mark.parametrize("what", ["metrics.jsonl", "checkpoints.jsonl", "summary.json", "console.log", "states"])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    overrides = (*RECIPE, "checkpoint.every=1", "checkpoint.keep=1", "run_dir=run")
    assert cli(*overrides, "loop.steps=2").status == 0
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(descriptor: int) -> None:
        if what in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise full

    original = Path.open

    def opened(self, mode="r", *arguments, **options):
        if what == "console.log" and self.name == what and "a" in mode:
            raise full
        return original(self, mode, *arguments, **options)

    def save(*arguments) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", fsync)
        patch.setattr(Path, "open", opened)
        if what == "states":
            patch.setattr("cookbook.backends.fake.state.save_file", save)
        line = cli(*overrides, "resume=auto").line()
    assert "No space left on device" in line and (what in line or what == "states"), line
    checkpoint, warnings = CheckpointLog(tmp_path / "run").latest_intact()
    assert checkpoint is not None and not warnings
    assert cli(*overrides, "resume=auto").status == 0
    assert cli(*RECIPE, "checkpoint.every=1", "run_dir=whole").status == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gsm8k_grpo", "gsm8k_ppo"])
def test_ended_at_any_moment_moved_and_resumed_equals_uninterrupted(tmp_path: Path, recipe: str):
    overrides = ("backend=fake", "loop.steps=12", "eval.every=3")
    whole = tmp_path / "whole"
    process = start(tmp_path, f"recipe={recipe}", *LITTLE, *overrides, f"run_dir={whole}", stdout=subprocess.DEVNULL)
    wait_for(whole / "console.log", process)
    process.communicate()
    assert process.returncode == 0
    duration = json.loads((whole / "summary.json").read_text())["wall_s"]
    moments = random.Random(recipe)
    for index, number in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL)):
        ending = Ending(recipe, number, moments.uniform(0, duration), copy=index % 2 == 0)
        ending.check(whole, tmp_path / str(index), *overrides)
