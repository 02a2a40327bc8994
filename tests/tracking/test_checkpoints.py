"""The checkpoint log of a run."""

import pytest

from cookbook.core.errors import CheckpointError
from cookbook.tracking.checkpoints import Checkpoint, CheckpointLog


def save(tmp_path, step):
    folder = tmp_path / f"step-{step}"
    folder.mkdir()
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
