"""Sweeps: a folder for each job that depends on nothing but its settings, and a table at the end."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from cookbook.cli.compose import OVERRIDE
from cookbook.cli.run_dir import read_summary

UNNAMED = ("recipe", "run_dir", "resume", "debug", "sweep")
"""Settings that do not tell the jobs of a sweep apart."""

LONGEST_NAME = 150


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `status` "skipped" means that it had completed before."""

    settings: Sequence[str]
    run_dir: Path | None
    status: Literal["completed", "skipped", "failed"]
    error: Exception | None = None


def job_settings(overrides: Sequence[str]) -> list[str]:
    """The overrides that distinguish a job, sorted."""
    named = ((match["key"], override) for override in overrides if (match := OVERRIDE.fullmatch(override)))
    return sorted(
        override.lstrip("+") for key, override in named if key not in UNNAMED and not key.startswith("scale/")
    )


def job_name(overrides: Sequence[str]) -> str:
    """The folder name of a job: its settings, shortened with a digest where they are long.

    The same settings in any order give the same name; different ones give different names.
    """
    settings = ",".join(job_settings(overrides))
    name = re.sub(r"[^\w.=,+-]", "_", settings)
    if name == settings and len(name) <= LONGEST_NAME:
        return name or "defaults"
    digest = hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()
    return f"{name[:LONGEST_NAME]}-{digest}"


def print_table(outcomes: Sequence[Outcome]) -> None:
    """One line for each job: its settings, how it ended, and held-out accuracy before and after."""
    table = Table(
        "job", "status", "accuracy before", "after", title=f"sweep of {len(outcomes)} jobs", title_justify="left"
    )
    for outcome in outcomes:
        evaluations = read_summary(outcome.run_dir).get("eval", {}) if outcome.run_dir is not None else {}
        accuracies = [evaluations.get(when, {}).get("accuracy") for when in ("before", "after")]
        shown = ["-" if accuracy is None else f"{accuracy:.3f}" for accuracy in accuracies]
        table.add_row(" ".join(outcome.settings), outcome.status, *shown)
    Console().print(table)
