"""The folder of a run, and whether it starts or continues there: run_dir and resume."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.cli.run_dir import choose, claim, held, is_finished
from cookbook.core.errors import CheckpointError, ConfigError
from cookbook.loops.algorithms.grpo import GRPOConfig
from cookbook.loops.config import ModelConfig, RunConfig
from cookbook.loops.sft import SFTConfig
from cookbook.tracking.checkpoints import Checkpoint, CheckpointLog
from cookbook.tracking.lock import locked


def configured(run_dir: Path, **changes) -> RunConfig:
    config = RunConfig(
        recipe="test",
        run_dir=str(run_dir),
        model=ModelConfig(name="fake"),
        loop=GRPOConfig(steps=2, groups_per_batch=1, group_size=2, max_tokens=4),
        backend={"_target_": "x", "state_dir": f"{run_dir}/checkpoints"},
        dataset={"_target_": "x", "api_key": "secret"},
        logger={"_target_": "x"},
    )
    return replace(config, **changes)


def start_run(run_dir: Path, checkpoint: bool = False, status: str | None = None, started: int = 0) -> Path:
    claim(configured(run_dir))
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    os.utime(run_dir / "config.yaml", (started, started))
    if checkpoint:
        CheckpointLog(run_dir).append(Checkpoint(1, {"policy": "state"}), keep=1)
    if status is not None:
        (run_dir / "summary.json").write_text(json.dumps({"status": status}))
    return run_dir


def test_never_takes_a_fresh_folder_and_refuses_one_that_holds_a_run(tmp_path: Path):
    assert choose(tmp_path / "new", given=True, resume="never") == tmp_path / "new"
    used = start_run(tmp_path / "used")
    with pytest.raises(CheckpointError, match=r"already holds a run; add resume=auto"):
        choose(used, given=True, resume="never")


def test_a_folder_with_checkpoints_but_no_configuration_holds_a_run_too(tmp_path: Path):
    used = start_run(tmp_path / "used", checkpoint=True)
    (used / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="already holds a run"):
        choose(used, given=True, resume="never")
    with pytest.raises(CheckpointError, match="missing from a run with checkpoints"):
        claim(configured(used))


def test_auto_takes_the_given_folder_whatever_is_in_it(tmp_path: Path):
    start_run(tmp_path / "other", checkpoint=True)
    assert choose(tmp_path / "new", given=True, resume="auto") == tmp_path / "new"


def test_auto_without_a_folder_takes_the_newest_unfinished_run(tmp_path: Path):
    fresh = tmp_path / "fresh"
    assert choose(fresh, given=False, resume="auto") == fresh
    start_run(tmp_path / "finished", status="completed", started=40)
    assert choose(fresh, given=False, resume="auto") == fresh
    start_run(tmp_path / "z-older", status="failed", started=20)
    newest = start_run(tmp_path / "newer", started=30)
    assert choose(fresh, given=False, resume="auto") == newest


def test_auto_does_not_join_a_run_that_is_alive(tmp_path: Path):
    older = start_run(tmp_path / "older", started=20)
    newest = start_run(tmp_path / "newest", started=30)
    with locked(newest):
        assert choose(tmp_path / "fresh", given=False, resume="auto") == older
    assert choose(tmp_path / "fresh", given=False, resume="auto") == newest


def test_runs_that_start_together_have_folders_of_their_own(tmp_path: Path):
    place = tmp_path / "runs" / "now"
    with held(place, new=True) as first, held(place, new=True) as second, held(place, new=True) as third:
        assert [folder.name for folder in (first, second, third)] == ["now", "now-2", "now-3"]
        (second / "config.yaml").write_text("recipe: test")
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "now-2"]


def test_a_folder_in_which_nothing_was_written_is_gone_but_not_one_that_was_there(tmp_path: Path):
    with held(tmp_path / "a" / "b", new=False):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with held(tmp_path / "mine", new=False), pytest.raises(CheckpointError, match="has been running there since"):
        held(tmp_path / "mine", new=False).__enter__()
    assert (tmp_path / "mine").is_dir()


def test_a_path_must_be_a_run_and_agree_with_run_dir(tmp_path: Path):
    run = start_run(tmp_path / "first")
    assert choose(tmp_path / "fresh", given=False, resume=str(run)) == run
    with pytest.raises(CheckpointError, match=r"is not a run \(did you mean first\?\)"):
        choose(tmp_path / "fresh", given=False, resume=str(tmp_path / "frist"))
    with pytest.raises(ConfigError, match="are two folders"):
        choose(tmp_path / "fresh", given=True, resume=str(run))


def test_a_run_that_failed_before_its_first_step_does_not_claim_its_folder(tmp_path: Path):
    run = start_run(tmp_path / "run", status="failed")
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5, "time/eval": 1.0}\n')
    assert choose(run, given=True, resume="never") == run
    claim(configured(run, seed=1))
    assert "seed: 1" in (run / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match="seed was 1, is now 2"):  # its evaluation is not thrown away unasked
        claim(configured(run, seed=2, resume="auto"))


def test_a_run_with_steps_but_no_checkpoint_keeps_its_settings_too(tmp_path: Path):
    run = start_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="seed was 0, is now 1"):
        claim(configured(run, seed=1, resume="auto"))
    assert (run / "metrics.jsonl").read_text()


def test_fewer_steps_than_were_taken_are_refused(tmp_path: Path):
    run = start_run(tmp_path / "run", checkpoint=True)
    CheckpointLog(run).append(Checkpoint(8, {"policy": "state"}), keep=1)
    loop = GRPOConfig(steps=6, groups_per_batch=1, group_size=2, max_tokens=4)
    before = (run / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match=r"loop\.steps=6: the run in .* has already taken 8 steps"):
        claim(configured(run, loop=loop))
    assert (run / "config.yaml").read_text() == before


def test_a_resumed_run_keeps_its_settings_except_those_that_change_no_step(tmp_path: Path):
    run = start_run(tmp_path / "run", checkpoint=True)
    longer = configured(
        run,
        loop=GRPOConfig(steps=9, groups_per_batch=1, group_size=2, max_tokens=4),
        debug=True,
        logger={"_target_": "y"},
    )
    claim(longer)
    with pytest.raises(CheckpointError) as raised:
        claim(replace(longer, seed=7, dataset={"_target_": "x", "api_key": "other secret", "new": 1}))
    assert "seed was 0, is now 7" in str(raised.value)
    assert "dataset.new was not set, is now 1" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_the_number_of_steps_is_fixed_where_the_learning_rate_follows_it(tmp_path: Path):
    loops = [SFTConfig(batch_size=1, max_length=4, steps=steps, schedule="linear") for steps in (2, 3)]
    claim(configured(tmp_path, loop=loops[0]))
    CheckpointLog(tmp_path).append(Checkpoint(1, {"policy": "state"}), keep=1)
    with pytest.raises(CheckpointError, match=r"loop\.steps was 2, is now 3"):
        claim(configured(tmp_path, loop=loops[1]))


def test_a_pipeline_that_has_a_stage_to_go_on_with_keeps_its_settings(tmp_path: Path):
    run = start_run(tmp_path / "run")
    start_run(run / "1-sft", checkpoint=True)
    claim(configured(run))
    with pytest.raises(CheckpointError, match="seed was 0, is now 1"):
        claim(configured(run, seed=1))


def test_a_moved_run_goes_on(tmp_path: Path):
    run = start_run(tmp_path / "here", checkpoint=True)
    run.rename(tmp_path / "there")
    claim(configured(tmp_path / "there"))
    assert "state_dir: ${run_dir}/checkpoints" in (tmp_path / "there" / "config.yaml").read_text()


def test_a_completed_run_is_finished_unless_more_steps_are_asked_for(tmp_path: Path):
    assert not is_finished(configured(tmp_path / "run"))
    run = start_run(tmp_path / "run", checkpoint=True)
    assert not is_finished(configured(run))
    start_run(run, status="completed")
    assert is_finished(configured(run))
    assert not is_finished(configured(run, loop=GRPOConfig(steps=9, groups_per_batch=1, group_size=2, max_tokens=4)))
    with pytest.raises(CheckpointError, match="seed was 0, is now 1"):
        is_finished(configured(run, seed=1))


def test_an_unwritable_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"run_dir=.*file/run: cannot be written \(Not a directory\)"):
        claim(configured(tmp_path / "file" / "run"))
