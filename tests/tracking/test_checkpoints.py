"""The checkpoint log of a run."""

import json
import shutil
from pathlib import Path

import pytest

from cookbook.core.errors import CheckpointError
from cookbook.tracking.checkpoints import Checkpoint, CheckpointLog


def save(tmp_path, step):
    folder = tmp_path / f"step-{step}"
    folder.mkdir()
    (folder / "weights").write_text(f"weights of step {step}")
    return Checkpoint(step, {"policy": str(folder)}, {"tokens": step})


def test_latest_is_what_was_appended_last(tmp_path):
    log = CheckpointLog(tmp_path)
    assert log.latest() is None
    for step in (5, 10):
        log.append(save(tmp_path, step), keep=2)
    assert log.latest() == Checkpoint(10, {"policy": str(tmp_path / "step-10")}, {"tokens": 10})


def test_old_saves_are_dropped_and_their_folders_deleted(tmp_path):
    log = CheckpointLog(tmp_path)
    for step in (5, 10, 15):
        log.append(save(tmp_path, step), keep=2)
    assert [record.next_step for record in log.read()] == [10, 15]
    assert not (tmp_path / "step-5").exists()
    assert (tmp_path / "step-10").exists()


def test_a_save_named_twice_is_not_deleted_with_its_older_record(tmp_path):
    log = CheckpointLog(tmp_path)
    first = save(tmp_path, 5)
    log.append(first, keep=1)
    log.append(first, keep=1)
    assert (tmp_path / "step-5").exists()


def stored_paths(run_dir: Path) -> list[str]:
    lines = (run_dir / "checkpoints.jsonl").read_text().splitlines()
    return [path for line in lines for path in json.loads(line)["states"].values()]


def test_a_run_that_was_copied_has_its_own_saves_and_leaves_the_other_ones_alone(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    log = CheckpointLog(first)
    for step in (5, 10):
        log.append(save(first, step), keep=2)
    assert stored_paths(first) == ["step-5", "step-10"]
    shutil.copytree(first, second)
    copy = CheckpointLog(second)
    checkpoint, warnings = copy.latest_intact()
    assert checkpoint is not None and not warnings
    assert checkpoint.states == {"policy": str(second / "step-10")}
    copy.append(save(second, 15), keep=1)
    assert sorted(path.name for path in first.glob("step-*")) == ["step-10", "step-5"]
    assert [path.name for path in second.glob("step-*")] == ["step-15"]


@pytest.mark.parametrize("how", ["outside", "linked", "parent linked"])
def test_nothing_outside_of_the_run_is_ever_deleted(tmp_path, how):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    kept = save(outside, 5).states["policy"]
    if how == "linked":
        (run / "step-5").symlink_to(kept)
    elif how == "parent linked":
        (run / "saves").symlink_to(outside)
    place = {"outside": Path(kept), "linked": run / "step-5", "parent linked": run / "saves" / "step-5"}[how]
    log = CheckpointLog(run)
    log.append(Checkpoint(5, {"policy": str(place)}), keep=1)
    log.append(save(run, 10), keep=1)
    assert [record.next_step for record in log.read()] == [10]
    assert (Path(kept) / "weights").exists()


def test_a_save_that_holds_a_needed_one_or_the_run_itself_is_not_deleted(tmp_path):
    log = CheckpointLog(tmp_path)
    log.append(Checkpoint(4, {"policy": str(tmp_path)}), keep=2)
    (tmp_path / "step-5").mkdir()
    log.append(Checkpoint(5, {"policy": str(tmp_path / "step-5")}), keep=2)
    log.append(save(tmp_path / "step-5", 10), keep=1)
    assert (tmp_path / "step-5" / "step-10" / "weights").exists()


def test_a_stage_of_a_pipeline_has_its_saves_in_the_folder_of_the_pipeline(tmp_path):
    (tmp_path / "config.yaml").write_text("recipe: p")
    stage = tmp_path / "1-sft"
    stage.mkdir()
    log = CheckpointLog(stage)
    for step in (5, 10):
        log.append(save(tmp_path, step), keep=1)
    assert stored_paths(stage) == ["../step-10"]
    assert not (tmp_path / "step-5").exists()
    assert log.latest_intact()[0] == Checkpoint(10, {"policy": str(tmp_path / "step-10")}, {"tokens": 10})


def test_a_path_of_a_service_is_kept_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = CheckpointLog(tmp_path)
    log.append(Checkpoint(5, {"policy": "tinker://run/weights/5"}), keep=1)
    checkpoint, _ = log.latest_intact()
    assert checkpoint is not None and checkpoint.states == {"policy": "tinker://run/weights/5"}


@pytest.mark.parametrize("damage", ["truncated", "missing file", "missing folder", "line"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_warning(tmp_path, damage):
    log = CheckpointLog(tmp_path)
    for step in (5, 10):
        log.append(save(tmp_path, step), keep=2)
    newest = tmp_path / "step-10"
    if damage == "truncated":
        (newest / "weights").write_text("wei")
    elif damage == "missing file":
        (newest / "weights").unlink()
    elif damage == "missing folder":
        shutil.rmtree(newest)
    else:
        lines = (tmp_path / "checkpoints.jsonl").read_text().splitlines()
        (tmp_path / "checkpoints.jsonl").write_text(f"{lines[0]}\n{lines[1][:50]}")
    checkpoint, [warning] = log.latest_intact()
    assert checkpoint is not None and checkpoint.next_step == 5
    assert warning.startswith("warning: ") and "continuing from an older one" in warning
    log.append(save(tmp_path, 7), keep=3)
    assert [record.next_step for record in log.read()] == [5, 7]
    assert log.latest_intact()[1] == []


def test_where_no_checkpoint_is_intact_nothing_begins_anew_unasked(tmp_path):
    log = CheckpointLog(tmp_path)
    log.append(save(tmp_path, 5), keep=1)
    shutil.rmtree(tmp_path / "step-5")
    with pytest.raises(CheckpointError, match=r"no checkpoint of this run can be used .*step-5 is missing"):
        log.latest_intact()
    (tmp_path / "checkpoints.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints\.jsonl:1: is not a checkpoint"):
        log.latest_intact()


def test_an_incomplete_last_line_is_ignored(tmp_path):
    log = CheckpointLog(tmp_path)
    log.append(save(tmp_path, 5), keep=2)
    with (tmp_path / "checkpoints.jsonl").open("a") as stream:
        stream.write('{"next_step": 10, "sta')
    latest = log.latest()
    assert latest is not None and latest.next_step == 5


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path):
    (tmp_path / "checkpoints.jsonl").write_text("nonsense\n")
    with pytest.raises(CheckpointError, match=r"checkpoints\.jsonl:1"):
        CheckpointLog(tmp_path).latest()
