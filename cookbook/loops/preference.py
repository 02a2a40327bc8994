"""Training on preferences: DPO and its family on pairs, KTO on labelled completions.

The loss compares the policy's logprobs with those of a frozen reference: the policy as it was before the first step.
Losses without a reference never compute it. The loop is `cookbook.loops.supervised`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import numpy as np

from cookbook.core.clients import APIFuture
from cookbook.core.datums import Truncation, only_inputs, supervised_datum, with_inputs
from cookbook.core.errors import ConfigError
from cookbook.core.examples import LabelledCompletion, Message, PreferencePair
from cookbook.core.kinds import Kinds
from cookbook.core.rollouts import Metrics
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.data.kinds import LabelledDataset, PreferenceDataset
from cookbook.data.preference.labelled import mismatched
from cookbook.loops import supervised
from cookbook.loops.common import CommonComponents, forward_backward_custom
from cookbook.loops.config import RunConfig
from cookbook.loops.run import REFERENCE_FILE, Run, reference_sampler
from cookbook.losses.spec import PreferenceLoss
from cookbook.rl.reference import ReferenceLogprobs


@dataclass
class PreferenceConfig(supervised.SupervisedConfig):
    """The settings of training on preferences."""

    _target_: str = "cookbook.loops.preference.run"


@dataclass(frozen=True)
class Components(CommonComponents):
    """Pairs with a loss over pairs, or labelled completions with a loss over those."""

    dataset: Annotated[PreferenceDataset | LabelledDataset, Kinds("pairs", "labelled")]
    loss: Annotated[PreferenceLoss, Kinds("pairs", "labelled")]

    def __post_init__(self) -> None:
        holds_pairs = isinstance(self.dataset.train[0], PreferencePair)
        if holds_pairs and self.loss.kind == "labelled":
            raise ConfigError(
                "loss=kto: takes labelled completions, but the dataset holds pairs; choose dataset=kto or loss=dpo"
            )
        if not holds_pairs and self.loss.kind == "pairs":
            raise ConfigError(
                "loss: takes pairs, but the dataset holds labelled completions; choose dataset=preference or loss=kto"
            )


def run(config: RunConfig, components: Components) -> float | None:
    """Train on preferences: see `cookbook.loops.supervised.run`."""
    headline = ("loss", "accuracy/train", "eval/accuracy", "eval/margin")
    task = Pairs if components.loss.kind == "pairs" else Labelled
    return supervised.run(config, components, components.dataset, lambda run: task(run, components.loss), headline)


class _PreferenceTask:
    """What pairs and labelled completions share: the reference, the gradient, and the evaluation."""

    def __init__(self, run: Run, loss: PreferenceLoss) -> None:
        self._run, self._loss = run, loss
        self._loop: PreferenceConfig = run.config.loop
        self._reference = None
        if loss.needs_reference:
            file = Path(run.config.run_dir) / REFERENCE_FILE
            self._reference = ReferenceLogprobs(reference_sampler(run.config, run.service), file)

    def _with_reference(self, data: list[Datum]) -> list[Datum]:
        return self._reference(data) if self._reference is not None and data else data

    def _completion(self, prompt: Sequence[Message], completion: Sequence[Message]) -> Datum | None:
        tokens, loss_mask = self._run.renderer.supervised([*prompt, *completion], "last_assistant")
        return supervised_datum(tokens, loss_mask, self._loop.max_length, cast(Truncation, self._loop.truncation))

    def gradient(self, data: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        return forward_backward_custom(self._run.policy, self._run.service, data, self._loss)

    def metrics(self, rows: Sequence[object], data: Sequence[Datum], output: ForwardBackwardOutput) -> Metrics:
        return supervised.custom_metrics(output)

    def evaluate(self, data: Sequence[Datum]) -> Metrics:
        """The loss and its metrics on held-out rows."""
        inputs = [only_inputs(datum, ("target_tokens", "weights")) for datum in data]
        outputs = self._run.policy.forward(inputs, "cross_entropy").result().loss_fn_outputs
        metrics = self._loss.measure(data, [output["logprobs"] for output in outputs])
        return {"loss" if key == "loss:sum" else key.partition(":")[0]: value for key, value in metrics.items()}


class Pairs(_PreferenceTask):
    """DPO and its family: chosen and rejected in turn, each weighing 1 / (number of pairs): the loss is a mean."""

    def datums(self, rows: Sequence[PreferencePair]) -> list[Datum]:
        """A pair of which either side does not fit is left out."""
        pairs = []
        for row in rows:
            chosen, rejected = self._completion(row.prompt, row.chosen), self._completion(row.prompt, row.rejected)
            if chosen is not None and rejected is not None:
                pairs.append((chosen, rejected))
        return self._with_reference([_weighted(datum, 1 / len(pairs)) for pair in pairs for datum in pair])


class Labelled(_PreferenceTask):
    """KTO: completions marked as desirable or not, and mismatched ones for its baseline if the loss needs them."""

    def datums(self, rows: Sequence[LabelledCompletion]) -> list[Datum]:
        fitting = [(row, datum) for row in rows if (datum := self._completion(row.prompt, row.completion)) is not None]
        data = [
            _filled(_weighted(datum, 1 / len(fitting)), "desirable", float(row.desirable)) for row, datum in fitting
        ]
        if self._loss.needs_mismatched and len(fitting) > 1:
            swapped = [self._completion(row.prompt, row.completion) for row in mismatched([row for row, _ in fitting])]
            data += [_filled(datum, "mismatched", 1.0) for datum in swapped if datum is not None]
        return self._with_reference(data)


def _weighted(datum: Datum, weight: float) -> Datum:
    return with_inputs(datum, weights=datum.loss_fn_inputs["weights"] * np.float32(weight))


def _filled(datum: Datum, key: str, value: float) -> Datum:
    return with_inputs(datum, **{key: np.full(datum.model_input.length, value, dtype=np.float32)})
