"""Settings and fixtures of all tests: no network, few threads, an in-process command line, a table of skipped tests."""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Set before anything imports the libraries that read them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "2")

SMALL = (
    "backend=fake",
    "loop.steps=2",
    "loop.groups_per_batch=2",
    "loop.group_size=2",
    "loop.max_tokens=8",
    "eval.examples=2",
)
"""Overrides that make a recipe of rollouts end within a second."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one table of what was skipped and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.section("skipped: tests and reason")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    status: int
    out: str
    err: str

    def line(self) -> str:
        """The one line of an error. Fails where there is more on stderr, or a traceback."""
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert self.status != 0
        return lines[0]


CommandLine = Callable[..., Ran]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Runs `python -m cookbook.run` in this process, with a temporary folder as the working directory."""
    from cookbook.run import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A local copy, for `dataset.path`, with the columns of every kind of dataset: four rows in each split."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(_row(number)) + "\n" for number in range(4)))
    return folder


def _row(number: int) -> dict[str, object]:
    prompt, good, bad = f"What is {number} plus 1?", f"It is {number + 1}.", "No idea."
    return {
        "question": prompt,
        "answer": f"{number} + 1 = <<{number}+1={number + 1}>>{number + 1}\n#### {number + 1}",
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": good}],
        "prompt": prompt,
        "chosen": good,
        "rejected": bad,
        "completion": good if number % 2 else bad,
        "label": bool(number % 2),
    }
