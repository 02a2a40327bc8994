"""Sweeps: a folder for each job that depends on nothing but its settings, its outcome, and a table at the end."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from cookbook.cli.options import OVERRIDE
from cookbook.cli.run_dir import read_summary
from cookbook.tracking import write_atomically

UNNAMED = ("run_dir", "resume", "debug", "sweep")
"""Settings that do not tell the jobs of a sweep apart."""

LONGEST_NAME = 150

OUTCOME_FILE = "job.json"


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `status` "skipped" means that it had completed before. `metric` is the run's headline metric."""

    settings: list[str]
    run_dir: str | None
    status: Literal["completed", "skipped", "failed"]
    metric: float | None = None
    error: str | None = None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / OUTCOME_FILE, json.dumps(asdict(self)).encode())


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome that a job left in a folder."""
    file = folder / OUTCOME_FILE
    return Outcome(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes of the jobs of a sweep, in their order: `folder` is Hydra's, with a numbered folder for each job."""
    jobs = sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    return [outcome for job in jobs if (outcome := read_outcome(job)) is not None]


def job_settings(overrides: Sequence[str]) -> list[str]:
    """The overrides that distinguish a job, sorted."""
    named = ((match["key"], override) for override in overrides if (match := OVERRIDE.fullmatch(override)))
    return sorted(override.lstrip("+") for key, override in named if key not in UNNAMED)


def job_name(settings: Sequence[str]) -> str:
    """The folder name of a job: its settings, shortened with a digest where they are long or hold other characters.

    Different settings give different names.
    """
    text = ",".join(settings)
    name = re.sub(r"[^\w.=,+-]", "_", text)
    if name == text and len(name) <= LONGEST_NAME:
        return name or "defaults"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{name[:LONGEST_NAME]}-{digest}"


def differing_settings(outcomes: Sequence[Outcome]) -> list[str]:
    """For each job the settings that not all of them share; all of its settings where there is nothing else."""
    common = set.intersection(*({*outcome.settings} for outcome in outcomes)) if len(outcomes) > 1 else set()
    return [
        " ".join([setting for setting in outcome.settings if setting not in common] or outcome.settings)
        for outcome in outcomes
    ]


def print_table(outcomes: Sequence[Outcome]) -> None:
    """One line for each job: its settings, how it ended, and held-out accuracy before and after."""
    title = f"sweep of {len(outcomes)} jobs"
    table = Table("job", "status", "accuracy before", "after", title=title, title_justify="left")
    for settings, outcome in zip(differing_settings(outcomes), outcomes, strict=True):
        evaluations = read_summary(Path(outcome.run_dir)).get("eval", {}) if outcome.run_dir else {}
        accuracies = [evaluations.get(when, {}).get("accuracy") for when in ("before", "after")]
        shown = ["-" if accuracy is None else f"{accuracy:.3f}" for accuracy in accuracies]
        table.add_row(settings, outcome.status, *shown)
    Console().print(table)
