"""The lock of a run folder."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cookbook.core.errors import CheckpointError
from cookbook.tracking.lock import LOCK_FILE, holder, locked


def rewrite(folder: Path, **changes) -> None:
    """Change what the lock file says, in place."""
    found = json.loads((folder / LOCK_FILE).read_text())
    with (folder / LOCK_FILE).open("r+") as file:
        file.truncate(0)
        file.write(json.dumps({**found, **changes}))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_in_use_is_refused_with_who_uses_it(tmp_path: Path):
    with locked(tmp_path):
        found = holder(tmp_path)
        assert found is not None and (found.pid, found.host) == (os.getpid(), socket.gethostname())
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on {found.host} .* since {found.since[:10]}"):
            locked(tmp_path).__enter__()
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["dead", "another process of that number", "cut off"])
def test_the_lock_of_a_process_that_died_is_taken_over(tmp_path: Path, change: str):
    with locked(tmp_path):
        if change == "dead":
            rewrite(tmp_path, pid=dead_process())
        elif change == "cut off":
            (tmp_path / LOCK_FILE).write_text('{"pid": 1')
        else:
            rewrite(tmp_path, started=1)
        assert holder(tmp_path) is None
        with locked(tmp_path):
            assert holder(tmp_path) is not None


def test_of_a_process_on_another_host_nothing_is_known(tmp_path: Path):
    with locked(tmp_path):
        rewrite(tmp_path, pid=dead_process(), host="elsewhere")
        with pytest.raises(CheckpointError, match=rf"on elsewhere .*delete {tmp_path / LOCK_FILE}"):
            locked(tmp_path).__enter__()


def test_a_copy_of_a_folder_in_use_is_free(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    with locked(first):
        shutil.copytree(first, second)
        with locked(second):
            assert (first / LOCK_FILE).exists()
        assert holder(first) is not None


def test_a_lock_that_another_process_has_taken_over_is_not_removed(tmp_path: Path):
    with locked(tmp_path):
        found = holder(tmp_path)
        assert found is not None
        rewrite(tmp_path, **asdict(replace(found, host="elsewhere")))
    assert (tmp_path / LOCK_FILE).exists()
