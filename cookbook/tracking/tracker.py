"""The tracker: the one object a loop tells what happened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from cookbook.core.examples import Example
from cookbook.core.rollouts import Metrics, Trajectory, TrajectoryGroup, Transition
from cookbook.tracking.console import RunConsole
from cookbook.tracking.loggers import Logger
from cookbook.tracking.plots import draw_curves
from cookbook.tracking.records import append_lines, cut, plain, plain_number, redact, write_atomically
from cookbook.tracking.report import write_report

CONSOLE_METRICS = ("kl/sample_train", "tokens/sampled", "tokens/trained")
"""Shown on the line of a step after the headline, where the step has them; `time/step` ends the line."""

WHEN = {"before": "before training", "step": "after {step}/{total} steps", "after": "after training"}


class Tracker:
    """Writes `metrics.jsonl`, `rollouts.jsonl`, `console.log`, and at the end `summary.json`, curves and `report.html`.

    A context manager: an exception that leaves the block before `finish` is recorded by `fail`.

    The loop's order within step k is: evaluate if due (logged with step k), train, `log(k)`, checkpoint with next step k + 1.
    A run that starts at `next_step` therefore keeps the lines of earlier steps, byte for byte, and writes the others again;
    at 0 it starts both files afresh. `summary.json` of an earlier attempt is removed: where there is one, the run has ended.

    Args:
        run_dir: made where missing.
        config: the resolved configuration; secrets are redacted before a logger or the report sees it.
        loggers: further sinks, started here.
        total_steps: the N of "step k/N".
        headline: the metrics that lead a step's line and get a curve. `eval/accuracy` always gets one.
        next_step: the 0-based index of the first step to come.

    Raises:
        CheckpointError: a line of an earlier attempt's file is damaged, other than a half-written last one.
        ConfigError: a logger cannot start.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        loggers: Sequence[Logger],
        total_steps: int,
        headline: Sequence[str] = ("reward/mean",),
        next_step: int = 0,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._config = redact(config)
        self._loggers = loggers
        self._total_steps = total_steps
        self._headline = tuple(headline)
        self._steps_done = next_step
        self._latest: dict[str, float] = {}
        self._ended = False
        self._metrics_path = run_dir / "metrics.jsonl"
        self._rollouts_path = run_dir / "rollouts.jsonl"
        cut(self._metrics_path, next_step)
        cut(self._rollouts_path, next_step)
        (run_dir / "summary.json").unlink(missing_ok=True)
        self._console = RunConsole(run_dir / "console.log", total_steps, next_step)
        for logger in loggers:
            if line := logger.start(run_dir, self._config, next_step):
                self.say(line)
        self._console.start_bar()

    def say(self, text: str) -> None:
        """A line on the console and in `console.log`."""
        self._console.say(text)

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of one training step. Wall-clock values belong under `time/`, so that all others are reproducible."""
        self._record(step, metrics)
        self._steps_done = step + 1
        parts = [f"step {step + 1:>{len(str(self._total_steps))}}/{self._total_steps}"]
        parts += [shown(name, metrics[name]) for name in (*self._headline, *CONSOLE_METRICS) if name in metrics]
        if "time/step" in metrics:
            parts.append(f"{metrics['time/step']:.1f} s")
        self.say("  ".join(parts))
        self._update_bar({name: metrics[name] for name in self._headline if name in metrics})

    def log_evaluation(self, when: Literal["before", "step", "after"], step: int, metrics: Metrics) -> None:
        """The metrics of one evaluation, after `step` training steps; their names get `eval/` in front, those under `time/` stay.

        The console shows the headline and what has no `/` in its name."""
        self._record(
            step, {name if name.startswith("time/") else f"eval/{name}": value for name, value in metrics.items()}
        )
        results = {name: value for name, value in metrics.items() if "/" not in name or name in self._headline}
        label = f"evaluation {WHEN[when].format(step=step, total=self._total_steps)}:"
        self.say("  ".join([label, *(shown(name, value) for name, value in results.items())]))
        self._update_bar({f"held-out {name}": value for name, value in results.items() if name == "accuracy"})

    def log_rollouts(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """A line of `rollouts.jsonl` for each trajectory of a step."""
        append_lines(self._rollouts_path, rollout_records(step, groups))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the run: `summary.json` first, then curves, `report.html`, and the loggers. `status` "completed" is success."""
        self._ended = True
        self._console.stop_bar()
        summary = redact(summary)
        write_atomically(self._run_dir / "summary.json", (json.dumps(summary, indent=2, default=plain) + "\n").encode())
        curves = draw_curves(self._run_dir, (*self._headline, "eval/accuracy"))
        write_report(self._run_dir, summary, self._config, curves)
        for logger in self._loggers:
            logger.finish(summary)

    def fail(self, error: BaseException, summary: Mapping[str, Any] | None = None) -> None:
        """End the run as `finish` does, with status "failed", or "interrupted" for Ctrl-C, and the error; `summary` is what is known."""
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self.finish(
            {
                "steps": self._steps_done,
                **(summary or {}),
                "status": status,
                "error": f"{type(error).__name__}: {error}",
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._console.stop_bar()
        if error is not None and not self._ended:
            self.fail(error)

    def _update_bar(self, latest: Metrics) -> None:
        self._latest |= latest
        text = "  ".join(shown(name, value) for name, value in self._latest.items())
        self._console.update_bar(self._steps_done, text)

    def _record(self, step: int, metrics: Metrics) -> None:
        append_lines(
            self._metrics_path, [{"step": step, **{name: plain_number(metrics[name]) for name in sorted(metrics)}}]
        )
        for logger in self._loggers:
            logger.log(step, metrics)


def shown(name: str, value: float) -> str:
    """A metric on the console: `reward 0.5125`, `tokens/sampled 12,345`."""
    return f"{name.removesuffix('/mean')} " + (f"{value:,}" if isinstance(value, int) else f"{value:.4g}")


def rollout_records(step: int, groups: Sequence[TrajectoryGroup]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for sample, trajectory in enumerate(group.trajectories):
            yield rollout_record(step, group.example, sample, trajectory)


def rollout_record(step: int, example: Example, sample: int, trajectory: Trajectory) -> dict[str, Any]:
    """One trajectory. With several turns, `completion` joins them, `parts` are sums, and `turns` holds each by itself."""
    turns = [turn_record(transition) for transition in trajectory.transitions]
    parts: Metrics = {}
    for transition in trajectory.transitions:
        for name, value in transition.reward.metrics.items():
            parts[name] = parts.get(name, 0) + value
    record = {
        "step": step,
        "example": example.id,
        "sample": sample,
        "prompt": prompt_text(example),
        "answer": example.answer,
        "completion": "\n\n".join(transition.text for transition in trajectory.transitions),
        "reward": plain_number(trajectory.reward),
        "parts": {name: plain_number(value) for name, value in parts.items()},
        "status": trajectory.status,
        "stop_reason": trajectory.transitions[-1].stop_reason,
        "tokens": trajectory.num_sampled_tokens,
    }
    return record | ({"turns": turns} if len(turns) > 1 else details(trajectory.transitions[0]))


def turn_record(transition: Transition) -> dict[str, Any]:
    return {
        "completion": transition.text,
        "reward": plain_number(transition.reward.value),
        "parts": {name: plain_number(value) for name, value in transition.reward.metrics.items()},
        "status": transition.reward.status,
        "stop_reason": transition.stop_reason,
        "tokens": len(transition.completion_tokens),
    } | details(transition)


def details(transition: Transition) -> dict[str, Any]:
    """What a reward had to say beyond its score, such as the status of every test."""
    return {"details": dict(transition.reward.details)} if transition.reward.details else {}


def prompt_text(example: Example) -> str:
    """A single message as it is; several with their roles."""
    if len(example.messages) == 1:
        return example.messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in example.messages)
