"""Runs in processes of their own that are ended at some moment, moved, and resumed."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.loops.harness import assert_same_run

REPOSITORY = Path(__file__).resolve().parents[2]

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

LITTLE = (
    "loop.steps=4",
    "loop.groups_per_batch=4",
    "loop.group_size=2",
    "loop.max_tokens=24",
    "eval.examples=4",
    "checkpoint.every=1",
)

STATUS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


def start(folder: Path, *overrides: str, **options) -> subprocess.Popen:
    """`cookbook run` in a folder, which other processes of the machine do not share."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cookbook.run", *overrides]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, **given)


def wait_for(file: Path, process: subprocess.Popen, lines: int = 1) -> None:
    """Until a file of the run has that many lines, or the run has ended."""
    while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= lines):
        time.sleep(0.01)


def fingerprint(folder: Path) -> dict[str, str]:
    """The content of every file."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@dataclass(frozen=True)
class Ending:
    """A run that gets `number` when `delay_s` have passed since its first line, and goes on elsewhere."""

    recipe: str
    number: signal.Signals
    delay_s: float
    copy: bool

    def check(self, whole: Path, place: Path, *overrides: str) -> str:
        """Run, end, move or copy, resume, and compare with the run in `whole`. Returns what happened."""
        first, second = place / "first" / "run", place / "second" / "moved"
        process = start(place, f"recipe={self.recipe}", *LITTLE, *overrides, f"run_dir={first}")
        wait_for(first / "console.log", process)
        time.sleep(self.delay_s)
        process.send_signal(self.number)
        process.communicate()
        status, steps = process.returncode, _lines(first / "checkpoints.jsonl")
        if self.number != signal.SIGKILL:
            ended = json.loads((first / "summary.json").read_text())["status"]
            assert (first / "report.html").exists()
            assert (ended, status) in (("interrupted", STATUS[self.number]), ("completed", status))
        second.parent.mkdir(parents=True)
        if self.copy:
            shutil.copytree(first, second, symlinks=True)
        else:
            first.rename(second)
        before = fingerprint(place / "first")
        resumed = start(place, f"resume={second}")
        _, errors = resumed.communicate()
        assert resumed.returncode == 0, errors
        assert fingerprint(place / "first") == before
        assert_same_run(whole, second)
        return f"{self.recipe} {self.number.name} after {self.delay_s:.2f} s: exit {status}, checkpoints {steps}"


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
