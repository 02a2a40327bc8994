"""Training on preferences (DPO and its family on pairs, KTO on labelled completions), on any backend with custom losses.

Per step: render a batch, and take a step down a loss of the policy's and a frozen reference's logprobs. The reference is
the policy as it was before the first step; losses without one never compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from cookbook.core.datums import Truncation, only_inputs, supervised_datum, with_inputs
from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import LabelledCompletion, Message, PreferencePair
from cookbook.core.rollouts import Metrics
from cookbook.core.schedules import learning_rate_factor
from cookbook.core.types import Datum
from cookbook.data.kinds import LabelledDataset, PreferenceDataset
from cookbook.data.order import draw
from cookbook.data.preference.datasets import mismatched
from cookbook.loops.common import (
    CommonParts,
    Session,
    Stopwatch,
    evaluation_due,
    forward_backward_custom,
    held_out,
    open_session,
    reference_sampler,
)
from cookbook.loops.config import PreferenceConfig, RunConfig
from cookbook.losses.spec import PreferenceLoss
from cookbook.rl.reference import ReferenceLogprobs

Rows = Sequence[PreferencePair | LabelledCompletion]


@dataclass(frozen=True)
class Parts(CommonParts):
    """What this loop is built from. Pairs go with a loss over pairs, labelled completions with one over single completions."""

    dataset: PreferenceDataset | LabelledDataset
    loss: PreferenceLoss


def run(config: RunConfig, parts: Parts) -> None:
    """Train `config.model` on `dataset.train` and measure it on `dataset.test`. Leaves everything in `config.run_dir`.

    Raises:
        ConfigError: the dataset's rows are not of the kind that the loss takes.
        DataError: no row of a batch fits into `loop.max_length`.
        BudgetExceeded: the run reached `budget`; a checkpoint is left.
    """
    loop: PreferenceConfig = config.loop
    train = parts.dataset.train
    steps_per_epoch = max(1, len(train) // loop.batch_size)
    steps = loop.steps or loop.epochs * steps_per_epoch
    warmup_steps = round(loop.warmup_fraction * steps)

    with open_session(
        config, parts, steps, headline=("loss", "accuracy/train", "eval/accuracy", "eval/margin")
    ) as session:
        policy, tracker = session.policy, session.tracker
        if parts.dataset.bad_rows.total:
            tracker.say(f"dataset: {parts.dataset.bad_rows}")
        batches = _Batches(session, parts)
        held_out_data = batches.datums(held_out(parts.dataset.test, config.eval.examples))

        for step in range(session.next_step, steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {}

            # 0. Held-out preferences, before the first step and every `eval.every` steps.
            if evaluation_due(config, step):
                _evaluate(session, parts.loss, step, held_out_data)
                metrics["time/eval"] = lap.lap()

            # 1. Draw the rows of this step: a seeded shuffle of every epoch, addressed by position.
            rows = draw(train, step, loop.batch_size, config.seed)

            # 2. Render; the completion's tokens carry the example's weight, and those of the reference its logprobs.
            data = batches.datums(rows)
            if not data:
                raise DataError(
                    f"step {step}: no row of the batch fits into loop.max_length={loop.max_length} tokens; raise it"
                )

            # 3. Train; the update is enqueued before the gradient is awaited.
            learning_rate = config.optim.learning_rate * learning_rate_factor(loop.schedule, step, steps, warmup_steps)
            gradient = forward_backward_custom(policy, parts.service, data, parts.loss)
            update = policy.optim_step(replace(config.optim, learning_rate=learning_rate))
            for key, value in gradient.result().metrics.items():
                metrics["loss" if key == "loss:sum" else f"{key.partition(':')[0]}/train"] = value
            metrics |= {f"optim/{key}": value for key, value in update.result().metrics.items()}

            # 4. Record and save.
            trained = sum(datum.model_input.length for datum in data)
            session.ledger.add(trained=trained)
            metrics |= {"optim/lr": learning_rate, "tokens/trained": trained, "epoch": step / steps_per_epoch}
            metrics |= {"time/train": lap.lap(), "time/step": total.lap()}
            tracker.log(step, metrics)
            session.step_done(step + 1)

        # 5. After: the same held-out rows as before.
        _evaluate(session, parts.loss, steps, held_out_data)


class _Batches:
    """From rows to datums, with the logprobs of the reference where the loss reads them."""

    def __init__(self, session: Session, parts: Parts) -> None:
        self._loop: PreferenceConfig = session.config.loop
        self._loss = parts.loss
        self._renderer = session.renderer
        self._reference = None
        if parts.loss.needs_reference:
            file = Path(session.config.run_dir) / "reference_logprobs.jsonl"
            self._reference = ReferenceLogprobs(reference_sampler(session.config, parts.service), file)

    def datums(self, rows: Rows) -> list[Datum]:
        """The datums of all rows that fit, each example weighing 1 / (number of examples), so that the loss is a mean."""
        data = self._pairs(rows) if self._loss.paired else self._labelled(rows)
        return self._reference(data) if self._reference is not None and data else data

    def _pairs(self, rows: Rows) -> list[Datum]:
        """Chosen and rejected in turn; a pair of which either does not fit is left out."""
        pairs = []
        for row in rows:
            if not isinstance(row, PreferencePair):
                raise ConfigError(
                    "loss: is one over pairs, but the dataset holds labelled completions; choose dataset=preference or loss=kto"
                )
            chosen, rejected = self._completion(row.prompt, row.chosen), self._completion(row.prompt, row.rejected)
            if chosen is not None and rejected is not None:
                pairs.append((chosen, rejected))
        return [_weighted(datum, 1 / len(pairs)) for pair in pairs for datum in pair]

    def _labelled(self, rows: Rows) -> list[Datum]:
        """The labelled completions, and those that KTO's baseline is estimated from where the loss asks for them."""
        labelled = [row for row in rows if isinstance(row, LabelledCompletion)]
        if len(labelled) < len(rows):
            raise ConfigError(
                "loss=kto: takes labelled completions, but the dataset holds pairs; choose dataset=kto or loss=dpo"
            )
        examples = [
            (row, datum) for row in labelled if (datum := self._completion(row.prompt, row.completion)) is not None
        ]
        data = [
            _filled(_weighted(datum, 1 / len(examples)), "desirable", float(row.desirable)) for row, datum in examples
        ]
        if self._loss.needs_mismatched and len(examples) > 1:
            swapped = [self._completion(row.prompt, row.completion) for row in mismatched([row for row, _ in examples])]
            data += [_filled(datum, "mismatched", 1.0) for datum in swapped if datum is not None]
        return data

    def _completion(self, prompt: Sequence[Message], completion: Sequence[Message]) -> Datum | None:
        tokens, learnt = self._renderer.supervised([*prompt, *completion], "last_assistant")
        return supervised_datum(tokens, learnt, self._loop.max_length, cast(Truncation, self._loop.truncation))


def _weighted(datum: Datum, weight: float) -> Datum:
    return with_inputs(datum, weights=datum.loss_fn_inputs["weights"] * np.float32(weight))


def _filled(datum: Datum, key: str, value: float) -> Datum:
    return with_inputs(datum, **{key: np.full(datum.model_input.length, value, dtype=np.float32)})


def _evaluate(session: Session, loss: PreferenceLoss, step: int, data: Sequence[Datum]) -> None:
    """The loss and its metrics on held-out rows."""
    if not data:
        return
    outputs = (
        session.policy.forward([only_inputs(datum, ("target_tokens", "weights")) for datum in data], "cross_entropy")
        .result()
        .loss_fn_outputs
    )
    session.ledger.add(trained=sum(datum.model_input.length for datum in data))
    metrics = loss.measure(data, [output["logprobs"] for output in outputs])
    named = {"loss" if key == "loss:sum" else key.partition(":")[0]: value for key, value in metrics.items()}
    session.record_evaluation(step, named)
