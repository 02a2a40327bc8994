"""Curves of a run as PNG files, drawn from metrics.jsonl."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from cookbook.tracking.records import read_lines, write_atomically

Curve = list[tuple[int, float]]


def draw_curves(run_dir: Path, names: Sequence[str]) -> list[Path]:
    """Draw the metrics `names` over training steps; metrics without values are skipped.

    `reward/mean` goes to `reward.png`, `eval/accuracy` to `accuracy.png`; metrics with the same stem share a figure.
    """
    curves: dict[str, Curve] = {name: [] for name in names}
    for record in read_lines(run_dir / "metrics.jsonl"):
        for name, curve in curves.items():
            if record.get(name) is not None:
                curve.append((record["step"], record[name]))
    figures: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        if curve:
            figures.setdefault(name.removeprefix("eval/").split("/")[0], {})[name] = curve
    return [draw_figure(run_dir / f"{stem}.png", figure) for stem, figure in figures.items()]


def draw_figure(path: Path, curves: dict[str, Curve]) -> Path:
    from matplotlib.figure import Figure  # no pyplot: no global state, no display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        marker = "o" if name.startswith("eval/") or len(curve) == 1 else None
        axes.plot(*zip(*curve, strict=True), marker=marker, label=name.replace("$", r"\$"))
    axes.set_xlabel("training steps done")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())
    return path
