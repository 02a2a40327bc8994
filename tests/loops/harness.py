"""What the loop tests share: runs on the fake backend, and how to compare what two of them left behind."""

import json
from pathlib import Path

from cookbook.tracking.checkpoints import CheckpointLog


class Killed(BaseException):
    """Stands for kill -9 at the point where it is raised."""


def metric_lines(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl without wall-clock values."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def final_save(run_dir: Path) -> dict[str, bytes]:
    """The files of the last checkpoint: weights and optimizer of every client."""
    checkpoint = CheckpointLog(run_dir).latest()
    assert checkpoint is not None
    return {
        f"{role}/{path.name}": path.read_bytes()
        for role, state in checkpoint.states.items()
        for path in Path(state).iterdir()
    }


def assert_same_run(first: Path, second: Path) -> None:
    """Two runs left the same numbers: metrics, rollouts where there are any, weights, optimizer and summary."""
    assert metric_lines(first) == metric_lines(second)
    if (first / "rollouts.jsonl").exists():
        assert (first / "rollouts.jsonl").read_text() == (second / "rollouts.jsonl").read_text()
    assert list(final_save(first).values()) == list(final_save(second).values())
    for key in ("eval", "tokens", "steps", "status"):
        assert summary(first)[key] == summary(second)[key]
