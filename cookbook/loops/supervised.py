"""The loop over fixed data: SFT and training on preferences are tasks given to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

from omegaconf import MISSING

from cookbook.core.clients import APIFuture, Capabilities
from cookbook.core.datums import Truncation
from cookbook.core.errors import DataError
from cookbook.core.rollouts import Metrics
from cookbook.core.schedules import SCHEDULES, learning_rate_factor
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.data.order import batch_at
from cookbook.loops.common import CommonComponents, Stopwatch, held_out
from cookbook.loops.config import LoopConfig, RunConfig, require, require_at_least, require_choice
from cookbook.loops.run import Run, open_run


@dataclass
class SupervisedConfig(LoopConfig):
    """The settings of loops over fixed data. `steps` null means `epochs` passes over the training data."""

    batch_size: int = MISSING
    steps: int | None = None
    epochs: int = 1
    max_length: int = MISSING
    truncation: str = "drop"
    schedule: str = "linear"
    warmup_fraction: float = 0.0

    def check(self, config: RunConfig, capabilities: Capabilities) -> None:
        require_at_least(1, "loop", self, "batch_size", "epochs")
        require(
            self.steps is None or self.steps >= 1,
            f"loop.steps={self.steps}: must be null (use loop.epochs) or at least 1",
        )
        require(
            self.max_length >= 2,
            f"loop.max_length={self.max_length}: must be at least 2, an input token and its target",
        )
        warmup = self.warmup_fraction
        require(0 <= warmup <= 1, f"loop.warmup_fraction={warmup}: must be in [0, 1]")
        require_choice("loop.truncation", self.truncation, get_args(Truncation))
        require_choice("loop.schedule", self.schedule, SCHEDULES)


class Task(Protocol):
    """What is a kind of training's own: from rows to datums, the gradient, and the evaluation."""

    def datums(self, rows: Sequence[Any]) -> list[Datum]:
        """The datums of the rows that fit; a loss over them is a mean."""
        ...

    def gradient(self, data: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        """Enqueue the gradient of the loss."""
        ...

    def metrics(self, rows: Sequence[Any], data: Sequence[Datum], output: ForwardBackwardOutput) -> Metrics:
        """What a step reports of its batch."""
        ...

    def evaluate(self, data: Sequence[Datum]) -> Metrics:
        """Metrics on held-out datums, without a gradient."""
        ...


def run(
    config: RunConfig,
    components: CommonComponents,
    dataset: Any,
    make_task: Callable[[Run], Task],
    headline: Sequence[str],
) -> float | None:
    """Train `config.model` on `dataset.train` and measure it on `dataset.test`. Leaves everything in `config.run_dir`.

    Args:
        dataset: rows of one kind in two splits.
        headline: the metrics of a step that its line on the console shows.

    Returns:
        The headline metric of the evaluation after training, negated for a loss; None where nothing was evaluated.

    Raises:
        DataError: no row of a batch, or none of the held-out ones, leaves anything to train on.
        BudgetExceeded: the run reached `budget`; a checkpoint is saved.
    """
    loop: SupervisedConfig = config.loop
    train = dataset.train
    steps_per_epoch = max(1, len(train) // loop.batch_size)
    steps = loop.steps or loop.epochs * steps_per_epoch
    warmup_steps = round(loop.warmup_fraction * steps)

    with open_run(config, components, dataset, steps, headline) as run:
        task = make_task(run)
        held_out_data = task.datums(held_out(dataset.test, config.eval.examples))
        if config.eval.examples and not held_out_data:
            raise _nothing_to_train_on("dataset.test")

        for step in range(run.next_step, steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {}

            # 1. Evaluate on held-out rows, before the first step and every `eval.every` steps.
            if run.evaluation_due(step):
                _evaluate(run, task, step, held_out_data)
                metrics["time/eval"] = lap.lap()

            # 2. Choose the rows of this step (a seeded shuffle of every epoch, addressed by position) and render them.
            rows = batch_at(train, step, loop.batch_size, config.seed)
            data = task.datums(rows)
            if not data:
                raise _nothing_to_train_on(f"step {step}")

            # 3. Update; the optimizer step is enqueued before the gradient is awaited.
            learning_rate = config.optim.learning_rate * learning_rate_factor(loop.schedule, step, steps, warmup_steps)
            gradient = task.gradient(data)
            update = run.optim_step(replace(config.optim, learning_rate=learning_rate))
            metrics |= task.metrics(gradient.result())
            metrics |= {f"optim/{key}": value for key, value in update.result().metrics.items()}

            # 4. Record and save.
            trained = sum(datum.model_input.length for datum in data)
            run.ledger.add(trained=trained)
            metrics |= {"optim/lr": learning_rate, "tokens/trained": trained, "epoch": step / steps_per_epoch}
            metrics |= {"time/train": lap.lap(), "time/step": total.lap()}
            run.tracker.log(step, metrics)
            run.step_done(step + 1)

        # 5. Evaluate after training, on the same held-out rows as before.
        _evaluate(run, task, steps, held_out_data)
        return run.objective


def custom_metrics(output: ForwardBackwardOutput) -> Metrics:
    """The metrics of a custom loss under the names that a step reports: `loss`, and `<name>/train` for the others."""
    named = {key: "loss" if key == "loss:sum" else f"{key.partition(':')[0]}/train" for key in output.metrics}
    return {name: output.metrics[key] for key, name in named.items()}


def _evaluate(run: Run, task: Task, step: int, data: Sequence[Datum]) -> None:
    if data:
        metrics = task.evaluate(data)
        run.ledger.add(trained=sum(datum.model_input.length for datum in data))
        run.record_evaluation(step, metrics)


def _nothing_to_train_on(where: str) -> DataError:
    return DataError(f"{where}: no row leaves anything to train on; raise loop.max_length or change loop.truncation")
