"""Combines the run directories of several consecutive runs into one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cookbook.tracking.plots import draw_curves
from cookbook.tracking.records import plain, read_lines, redact, write_atomically
from cookbook.tracking.report import write_report

HEADLINE = ("reward/mean", "nll/train", "eval/nll", "eval/accuracy", "accuracy/train")


def combine_runs(run_dir: Path, parts: Sequence[Path], summary: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write the metrics of all parts, with consecutive steps, and curves, report and summary into `run_dir`.

    Every line of `metrics.jsonl` names the folder of its part as `stage`. `summary.json` is written last: if it exists,
    everything else is complete.
    """
    lines, offset = [], 0
    for part in parts:
        records = list(read_lines(part / "metrics.jsonl"))
        lines += [{**record, "step": record["step"] + offset, "stage": part.name} for record in records]
        offset += max((record["step"] for record in records), default=0)
    write_atomically(run_dir / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    write_report(run_dir, redact(summary), redact(config), draw_curves(run_dir, HEADLINE))
    write_atomically(run_dir / "summary.json", (json.dumps(redact(summary), indent=2, default=plain) + "\n").encode())
