"""The tracker: the object through which a loop records metrics, rollouts and the end of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from cookbook.core.errors import CookbookError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Metrics, Trajectory, TrajectoryGroup, Transition
from cookbook.tracking.console import RunConsole
from cookbook.tracking.loggers import Logger
from cookbook.tracking.plots import draw_curves
from cookbook.tracking.records import append_lines, cut, plain, plain_number, redact, write_atomically
from cookbook.tracking.report import write_report

CONSOLE_METRICS = ("kl/sample_train", "tokens/sampled", "tokens/trained")
"""Shown after the headline on the line of a step, if the step has them; `time/step` ends the line."""

WHEN = {"before": "before training", "step": "after {step}/{total} steps", "after": "after training"}


class Tracker:
    """Writes `metrics.jsonl`, `rollouts.jsonl`, `console.log`, and at the end `summary.json`, curves and `report.html`.

    A context manager: an exception that leaves the block before `finish` is recorded by `fail`.

    The order within step k of a loop is: evaluate if due (logged with step k), train, `log(k)`, checkpoint with next
    step k + 1. A run that starts at `next_step` therefore keeps the lines of earlier steps unchanged and writes the
    others again; at 0 both files start empty. `summary.json` of an earlier run is removed: it exists only for runs that
    have ended.

    Args:
        run_dir: created if missing.
        config: the resolved configuration; secrets are redacted before a logger or the report gets it.
        loggers: further sinks, started here.
        total_steps: the N of "step k/N".
        headline: metrics that come first on the line of a step and get a curve. `eval/accuracy` always gets a curve.
        next_step: the 0-based index of the first step of this run.

    Raises:
        CheckpointError: a complete line in a file of an earlier run is damaged.
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

    @property
    def output_closed(self) -> bool:
        """Whether the reader of stdout is gone, as after `| head`."""
        return self._console.closed

    def set_total_steps(self, total_steps: int) -> None:
        """Set the N of "step k/N", where it is known only after the start."""
        self._total_steps = total_steps
        self._console.set_total_steps(total_steps)

    def say(self, text: str) -> None:
        """Print a line on the console and append it to `console.log`."""
        self._console.say(text)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one training step. Only those under `time/` may depend on the clock."""
        self._record(step, metrics)
        self._steps_done = step + 1
        parts = [f"step {step + 1:>{len(str(self._total_steps))}}/{self._total_steps}"]
        parts += [shown(name, metrics[name]) for name in (*self._headline, *CONSOLE_METRICS) if name in metrics]
        if "time/step" in metrics:
            parts.append(f"{metrics['time/step']:.1f} s")
        self.say("  ".join(parts))
        self._update_bar({name: metrics[name] for name in self._headline if name in metrics})
        for name in (name for name in metrics if name.endswith("/skipped_steps") and metrics[name]):
            self.say(
                f"warning: {name} {metrics[name]:g}: the gradient was not finite, so the weights stayed as they were; "
                "lower the learning rate, or look for extreme values in the data"
            )

    def log_evaluation(self, when: Literal["before", "step", "after"], step: int, metrics: Metrics) -> None:
        """Record the metrics of an evaluation after `step` steps. Names except `time/...` get the prefix `eval/`.

        The console shows the headline metrics and those without `/` in their names.
        """
        self._record(
            step, {name if name.startswith("time/") else f"eval/{name}": value for name, value in metrics.items()}
        )
        results = {name: value for name, value in metrics.items() if "/" not in name or name in self._headline}
        label = f"evaluation {WHEN[when].format(step=step, total=self._total_steps)}:"
        self.say("  ".join([label, *(shown(name, value) for name, value in results.items())]))
        self._update_bar({f"held-out {name}": value for name, value in results.items() if name == "accuracy"})

    def log_rollouts(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Append a line to `rollouts.jsonl` for each trajectory of a step."""
        append_lines(self._rollouts_path, rollout_records(step, groups))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the run: write `summary.json`, curves and report, end the loggers. `status` "completed" is success."""
        self._ended = True
        self._console.stop_bar()
        summary = redact(summary)
        text = json.dumps(summary, indent=2, default=plain) + "\n"
        try:
            curves = draw_curves(self._run_dir, (*self._headline, "eval/accuracy"))
            write_report(self._run_dir, summary, self._config, curves)
        finally:  # the last file: where it says "completed", nothing is missing
            write_atomically(self._run_dir / "summary.json", text.encode())
        for logger in self._loggers:
            logger.finish(summary)

    def fail(self, error: BaseException, summary: Mapping[str, Any] | None = None) -> None:
        """End the run like `finish`, with the error and status "failed", or "interrupted" for Ctrl-C.

        `summary` holds what is known about the run so far.
        """
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        known = {"steps": self._steps_done, **(summary or {})}
        with suppress(CookbookError, OSError):  # such as a disk that is full, which is what ended the run
            self.finish({**known, "status": status, "error": f"{type(error).__name__}: {error}"})

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
    """One trajectory. With several turns, `completion` joins them, `parts` are sums, and `turns` has each turn."""
    turns = [turn_record(transition) for transition in trajectory.transitions]
    record = {
        "step": step,
        "example": example.id,
        "sample": sample,
        "prompt": prompt_text(example),
        "answer": example.answer,
        "completion": "\n\n".join(transition.text for transition in trajectory.transitions),
        "reward": plain_number(trajectory.reward),
        "parts": {name: plain_number(value) for name, value in trajectory.metrics.items()},
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
    """The details that a reward gave besides its value, such as the status of every test."""
    return {"details": dict(transition.reward.details)} if transition.reward.details else {}


def prompt_text(example: Example) -> str:
    """A single message as it is; several with their roles."""
    if len(example.messages) == 1:
        return example.messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in example.messages)
