"""The report of a run, `report.html`: one self-contained page. All text is escaped, and the page loads nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cookbook.tracking.records import plain, read_lines, write_atomically

SAMPLES_SHOWN = 2
LONGEST_TEXT = 4000
"""Characters shown of a prompt or completion; rollouts.jsonl has the full text."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid #ddd; }}
pre {{ background: #f5f5f5; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>{summary}</table>
{curves}
{rollouts}
<details><summary>Configuration</summary><pre>{config}</pre></details>
</body>
</html>
"""


def write_report(run_dir: Path, summary: Mapping[str, Any], config: Mapping[str, Any], curves: Sequence[Path]) -> None:
    """Write `report.html` from a summary and a configuration (both redacted), PNG files, and `rollouts.jsonl`."""
    page = PAGE.format(
        title=escape(f"{summary.get('recipe', run_dir.name)}: {summary.get('status', 'unknown')}"),
        summary="".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in flatten(summary)
        ),
        curves="".join(curve_html(path) for path in curves),
        rollouts=rollouts_html(run_dir / "rollouts.jsonl"),
        config=escape(json.dumps(config, indent=2, ensure_ascii=False, default=plain)),
    )
    write_atomically(run_dir / "report.html", page.encode("utf-8", "backslashreplace"))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and formatted values of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)


def curve_html(path: Path) -> str:
    image, name = base64.b64encode(path.read_bytes()).decode("ascii"), escape(path.stem)
    return f'<h2>{name}</h2><img alt="{name} over training steps" src="data:image/png;base64,{image}">'


def rollouts_html(path: Path) -> str:
    """The best and the worst trajectories of the last step; empty for a run without rollouts."""
    last: list[dict[str, Any]] = []
    for rollout in read_lines(path):
        if last and rollout["step"] != last[0]["step"]:
            last = []
        last.append(rollout)
    graded = sorted(
        (rollout for rollout in last if rollout["reward"] is not None and rollout["status"] != "error"),
        key=lambda rollout: -rollout["reward"],
    )
    if not graded:
        return ""
    best, rest = graded[:SAMPLES_SHOWN], graded[SAMPLES_SHOWN:]
    worst = rest[-SAMPLES_SHOWN:]
    heading = f"<h2>Rollouts of step {last[0]['step'] + 1}: best {len(best)} and worst {len(worst)} of {len(last)}</h2>"
    return heading + "".join(rollout_html(rollout) for rollout in best + worst)


def rollout_html(rollout: Mapping[str, Any]) -> str:
    facts = " · ".join(
        [
            f"reward {rollout['reward']:g}",
            str(rollout["status"]),
            f"ends by {rollout['stop_reason']}",
            f"{rollout['tokens']} tokens",
            f"expected {shorten(rollout['answer'], 200)}",
            f"example {rollout['example']}",
            *(f"{name} {value}" for name, value in rollout["parts"].items()),
        ]
    )
    texts = "".join(f"<pre>{escape(shorten(rollout[name]))}</pre>" for name in ("prompt", "completion"))
    return f"<p>{escape(facts)}</p>{texts}"


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest} more characters)"
