"""Training on preferences: DPO and its family on pairs, KTO on labelled completions.

The loss compares the policy's logprobs with those of a frozen reference: the policy as it was before the first step.
Losses without a reference never compute it. The loop is `cookbook.loops.supervised`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from cookbook.core.clients import APIFuture, CustomLoss
from cookbook.core.datums import only_inputs, with_inputs
from cookbook.core.errors import ConfigError
from cookbook.core.examples import LabelledCompletion, PreferencePair
from cookbook.core.kinds import Kinds
from cookbook.core.rollouts import Metrics
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.data.bad_rows import BadRow
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
    loss: Annotated[PreferenceLoss | CustomLoss, Kinds("pairs", "labelled", "custom")]

    @property
    def holds_pairs(self) -> bool:
        return isinstance(self.dataset.train[0], PreferencePair)

    def __post_init__(self) -> None:
        if not isinstance(self.loss, PreferenceLoss):
            return
        if self.holds_pairs and self.loss.kind == "labelled":
            raise ConfigError(
                "loss=kto: takes labelled completions, but the dataset holds pairs; choose dataset=kto or loss=dpo"
            )
        if not self.holds_pairs and self.loss.kind == "pairs":
            raise ConfigError(
                "loss: takes pairs, but the dataset holds labelled completions; choose dataset=preference or loss=kto"
            )


def run(config: RunConfig, components: Components) -> float | None:
    """Train on preferences: see `cookbook.loops.supervised.run`."""
    headline = ("loss", "accuracy/train", "eval/accuracy", "eval/margin")
    task = Pairs if components.holds_pairs else Labelled
    return supervised.run(config, components, components.dataset, lambda run: task(run, components.loss), headline)


class _PreferenceTask:
    """What pairs and labelled completions share: the reference, the gradient, and the evaluation."""

    def __init__(self, run: Run, loss: PreferenceLoss | CustomLoss) -> None:
        self._run, self._loss = run, loss
        self.rows = supervised.Rows(run, "last_assistant")
        self._reference = None
        if not isinstance(loss, PreferenceLoss) or loss.needs_reference:  # a function may read `ref_logprobs`
            file = Path(run.config.run_dir) / REFERENCE_FILE
            self._reference = ReferenceLogprobs(reference_sampler(run.config, run.service), file)

    def _with_reference(self, data: list[Datum]) -> list[Datum]:
        return self._reference(data) if self._reference is not None else data

    def gradient(self, data: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        return forward_backward_custom(self._run.policy, self._run.service, data, self._loss)

    def metrics(self, output: ForwardBackwardOutput) -> Metrics:
        return supervised.custom_metrics(output)

    def evaluate(self, data: Sequence[Datum]) -> Metrics:
        """The loss and its metrics on held-out rows."""
        inputs = [only_inputs(datum, ("target_tokens", "weights")) for datum in data]
        outputs = self._run.policy.forward(inputs, "cross_entropy").result().loss_fn_outputs
        logprobs = [output["logprobs"] for output in outputs]
        if isinstance(self._loss, PreferenceLoss):
            metrics = self._loss.measure(data, logprobs)
        else:
            from cookbook.losses.custom import measure  # imported here because it needs torch

            metrics = measure(self._loss, data, logprobs)
        return {"loss" if key == "loss:sum" else key.partition(":")[0]: value for key, value in metrics.items()}


class Pairs(_PreferenceTask):
    """DPO and its family: chosen and rejected in turn, each weighing 1 / (number of pairs): the loss is a mean."""

    def render(self, row: PreferencePair) -> tuple[Datum, Datum]:
        """Both sides. A pair is left out whole, also where truncation leaves nothing that tells them apart."""
        chosen, chosen_cut = self.rows.datum(row, [*row.prompt, *row.chosen])
        rejected, rejected_cut = self.rows.datum(row, [*row.prompt, *row.rejected])
        if (chosen_cut or rejected_cut) and np.array_equal(_trained(chosen), _trained(rejected)):
            raise BadRow("both sides are the same after truncation", "raise loop.max_length, or change loop.truncation")
        return chosen, rejected

    def datums(self, rendered: Sequence[tuple[Datum, Datum]]) -> list[Datum]:
        return self._with_reference([_weighted(datum, 1 / len(rendered)) for pair in rendered for datum in pair])


class Labelled(_PreferenceTask):
    """KTO: completions marked as desirable or not, and mismatched ones for its baseline if the loss needs them.

    A mismatched completion that is too long after its new prompt is left out of the estimate.
    """

    def render(self, row: LabelledCompletion) -> tuple[LabelledCompletion, Datum]:
        datum, _ = self.rows.datum(row, [*row.prompt, *row.completion])
        return row, datum

    def datums(self, rendered: Sequence[tuple[LabelledCompletion, Datum]]) -> list[Datum]:
        data = [
            _filled(_weighted(datum, 1 / len(rendered)), "desirable", float(row.desirable)) for row, datum in rendered
        ]
        if isinstance(self._loss, PreferenceLoss) and self._loss.needs_mismatched:
            for row in mismatched([row for row, _ in rendered]):
                with suppress(BadRow):  # too long together
                    data.append(_filled(self.render(row)[1], "mismatched", 1.0))
        return self._with_reference(data)


def _trained(datum: Datum) -> np.ndarray:
    return datum.loss_fn_inputs["target_tokens"][datum.loss_fn_inputs["weights"] > 0]


def _weighted(datum: Datum, weight: float) -> Datum:
    return with_inputs(datum, weights=datum.loss_fn_inputs["weights"] * np.float32(weight))


def _filled(datum: Datum, key: str, value: float) -> Datum:
    return with_inputs(datum, **{key: np.full(datum.model_input.length, value, dtype=np.float32)})
