"""The loop over fixed data: SFT and training on preferences are tasks given to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_args

from omegaconf import MISSING

from cookbook.core.clients import APIFuture, Capabilities
from cookbook.core.datums import Truncation, supervised_datum
from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Conversation, LabelledCompletion, Message, PreferencePair
from cookbook.core.rollouts import Metrics
from cookbook.core.schedules import SCHEDULES, learning_rate_factor
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.data.bad_rows import PLACES_SHOWN, BadRow
from cookbook.data.order import Batches, order_index
from cookbook.data.rendering import TrainOn
from cookbook.loops.common import CommonComponents, Stopwatch
from cookbook.loops.config import LoopConfig, RunConfig, require, require_at_least, require_choice
from cookbook.loops.rows import RowCheck, is_checked_at_once
from cookbook.loops.run import Run, open_run

Rendered = TypeVar("Rendered")
"""A row as tokens: what a task makes its datums of."""


@dataclass
class SupervisedConfig(LoopConfig):
    """The settings of loops over fixed data. `steps` null means `epochs` passes over the training data.

    The last batch of an epoch has the rows that are left, so every epoch trains on each row once.
    """

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


class Task(Protocol[Rendered]):
    """What is a kind of training's own: from rows to datums, the gradient, and the evaluation."""

    rows: Rows

    def render(self, row: Any) -> Rendered:
        """A row as tokens. Raises BadRow where it cannot be trained on."""
        ...

    def datums(self, rendered: Sequence[Rendered]) -> list[Datum]:
        """The datums of a batch; a loss over them is a mean."""
        ...

    def gradient(self, data: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        """Enqueue the gradient of the loss."""
        ...

    def metrics(self, output: ForwardBackwardOutput) -> Metrics:
        """What a step reports of its batch."""
        ...

    def evaluate(self, data: Sequence[Datum]) -> Metrics:
        """Metrics on held-out datums, without a gradient."""
        ...


def run(
    config: RunConfig,
    components: CommonComponents,
    dataset: Any,
    make_task: Callable[[Run], Task[Any]],
    headline: Sequence[str],
) -> float | None:
    """Train `config.model` on `dataset.train` and measure it on `dataset.test`. Leaves everything in `config.run_dir`.

    Args:
        dataset: rows of one kind in two splits.
        headline: the metrics of a step that its line on the console shows.

    Returns:
        The headline metric of the evaluation after training, negated for a loss; None where nothing was evaluated.

    Raises:
        DataError: no training row, or none of the held-out ones, can be used.
        BudgetExceeded: the run reached `budget`; a checkpoint is saved.
    """
    loop: SupervisedConfig = config.loop
    train = dataset.train

    with open_run(config, components, dataset, loop.steps or loop.epochs * len(train), headline) as run:
        task = make_task(run)
        check = RowCheck(dataset, lambda _, row: task.render(row), Path(config.run_dir))
        batches = _batches(check, train, loop, config.seed)
        held_out = [task.render(row) for row in check.first("test", dataset.test, config.eval.examples)]
        held_out_data = task.datums(held_out) if held_out else []
        steps = loop.steps or loop.epochs * batches.steps_per_epoch
        run.set_total_steps(steps)
        used = {"train": min(batches.rows_per_epoch, steps * loop.batch_size), "test": len(held_out)}
        run.report_rows(check, used, dataset, _plan(batches, steps))
        task.rows.report_tools(run)
        warmup_steps = round(loop.warmup_fraction * steps)

        for step in range(run.next_step, steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {}

            # 1. Evaluate on held-out rows, before the first step and every `eval.every` steps.
            if run.evaluation_due(step):
                _evaluate(run, task, step, held_out_data)
                metrics["time/eval"] = lap.lap()

            # 2. Choose the rows of this step (a seeded shuffle of every epoch, addressed by position) and render them.
            rows = batches.at(step)
            data = task.datums([task.render(train[index]) for index in rows])

            # 3. Update; the optimizer step is enqueued before the gradient is awaited.
            learning_rate = config.optim.learning_rate * learning_rate_factor(loop.schedule, step, steps, warmup_steps)
            gradient = task.gradient(data)
            update = run.optim_step(replace(config.optim, learning_rate=learning_rate))
            metrics |= task.metrics(gradient.result())
            metrics |= {f"optim/{key}": value for key, value in update.result().metrics.items()}

            # 4. Record and save.
            trained = sum(datum.model_input.length for datum in data)
            run.ledger.add(trained=trained)
            metrics |= {"optim/lr": learning_rate, "tokens/trained": trained, "rows": float(len(rows))}
            metrics |= {"epoch": step / batches.steps_per_epoch}
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


def _batches(check: RowCheck[Any], train: Sequence[Any], loop: SupervisedConfig, seed: int) -> Batches:
    """The batches over the rows that the run can use. A large split is checked only as far as `loop.steps` go."""
    order = range(len(train))
    wanted = len(train)
    if not is_checked_at_once(train):
        order = (order_index(position, len(train), seed) for position in order)
        wanted = loop.steps * loop.batch_size if loop.steps else wanted
    left_out, usable = set[int](), 0
    for index in order:
        if usable == wanted:
            break
        if check.is_usable("train", train[index]):
            usable += 1
        else:
            left_out.add(index)
    if not usable:
        raise check.nothing_left("train")
    return Batches(len(train), left_out, loop.batch_size, seed)


def _plan(batches: Batches, steps: int) -> str:
    """For example "batches: 10 rows in 3 steps per epoch, the last of 2 rows; 6 steps in all"."""
    rows, size = batches.rows_per_epoch, batches.batch_size
    if rows < size:
        each = f"each of all {rows} rows, fewer than loop.batch_size={size}"
        return f"batches: {steps} step{'s' * (steps != 1)}, {each}"
    tail = f", the last of {rows % size}" if rows % size else ""
    return f"batches: {batches.steps_per_epoch:,} steps of {size} rows per epoch{tail}; {steps:,} steps in all"


class Rows:
    """Renders the messages of rows for training, within the limits of the run."""

    def __init__(self, run: Run, train_on: TrainOn) -> None:
        loop: SupervisedConfig = run.config.loop
        self._renderer = run.renderer
        self._train_on: TrainOn = train_on
        self._truncation: Truncation = cast(Truncation, loop.truncation)
        self._without_tools: dict[str, str] = {}  # ids and places
        context = run.policy.context_length
        self._max_length = loop.max_length if context is None else min(loop.max_length, context)
        self._limit = "loop.max_length" if self._max_length == loop.max_length else "the model's context"

    def datum(
        self, row: Conversation | PreferencePair | LabelledCompletion, messages: Sequence[Message]
    ) -> tuple[Datum, bool]:
        """The datum of a row's conversation, with weight 1 where it is trained on, and whether it was truncated.

        Raises:
            BadRow: the format refuses it, it is too long, or nothing of it is trained on.
        """
        try:
            tokens, loss_mask = self._renderer.supervised(messages, self._train_on, row.tools)
            if row.tools and not self._renderer.writes_tools(messages, row.tools):
                self._without_tools[row.id] = row.source or row.id
        except (DataError, ConfigError) as error:
            raise BadRow("the chat format cannot write it", str(error)) from error
        datum = supervised_datum(tokens, loss_mask, self._max_length, self._truncation)
        truncated = len(tokens) > self._max_length
        if datum is None:
            limit = f"{self._limit} of {self._max_length} tokens"
            if truncated and self._truncation == "drop":
                raise BadRow(
                    "too long",
                    f"{len(tokens)} tokens, more than {limit}; raise it, or set loop.truncation=left or right",
                )
            if truncated:
                raise BadRow(
                    "nothing to train on after truncation", f"{len(tokens)} tokens, more than {limit}; raise it"
                )
            raise BadRow("nothing to train on", "no assistant's message of it is trained on")
        return datum, truncated

    def report_tools(self, run: Run) -> None:
        """Say how many of the rows rendered so far have tools that the chat format does not write."""
        run.rows["without_tools"] = count = len(self._without_tools)
        if count:
            places = ", ".join([*self._without_tools.values()][:PLACES_SHOWN])
            run.tracker.say(
                f"warning: the chat format does not write the tools of {count:,} rows ({places}"
                f"{', ...' if count > PLACES_SHOWN else ''}); they are used without their tools"
            )
