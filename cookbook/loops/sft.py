"""SFT: supervised fine-tuning on conversations by cross-entropy over the tokens that the loss mask keeps.

The loop is `cookbook.loops.supervised`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast, get_args

import numpy as np

from cookbook.core.clients import APIFuture, Capabilities, CustomLoss
from cookbook.core.datums import scale_weights
from cookbook.core.examples import Conversation
from cookbook.core.kinds import Kinds
from cookbook.core.rollouts import Metrics
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.data.kinds import ConversationDataset
from cookbook.data.rendering import TrainOn
from cookbook.loops import supervised
from cookbook.loops.common import CommonComponents, forward_backward_custom
from cookbook.loops.config import RunConfig, require_choice
from cookbook.loops.run import Run


@dataclass
class SFTConfig(supervised.SupervisedConfig):
    """The settings of SFT. `train_on` says which messages of a conversation the loss mask keeps."""

    _target_: str = "cookbook.loops.sft.run"
    train_on: str = "all_assistant"

    def check(self, config: RunConfig, capabilities: Capabilities) -> None:
        super().check(config, capabilities)
        require_choice("loop.train_on", self.train_on, get_args(TrainOn))


@dataclass(frozen=True)
class Components(CommonComponents):
    """What SFT is built from. Without a `loss` it is cross-entropy."""

    dataset: Annotated[ConversationDataset, Kinds("chat")]
    loss: Annotated[CustomLoss | None, Kinds("custom")] = None


def run(config: RunConfig, components: Components) -> float | None:
    """Fine-tune on conversations: see `cookbook.loops.supervised.run`."""
    headline = ("nll/train", "eval/nll") if components.loss is None else ("loss", "eval/nll")
    return supervised.run(config, components, components.dataset, lambda run: SFT(run, components.loss), headline)


class SFT:
    """Renders conversations, and trains on the mean over the tokens of a batch."""

    def __init__(self, run: Run, loss: CustomLoss | None) -> None:
        self._run, self._loss = run, loss
        self._loop: SFTConfig = run.config.loop
        self.rows = supervised.Rows(run, cast(TrainOn, self._loop.train_on))

    def render(self, row: Conversation) -> Datum:
        datum, _ = self.rows.datum(row, row.messages)
        return datum

    def datums(self, rendered: Sequence[Datum]) -> list[Datum]:
        return [*rendered]

    def gradient(self, data: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        scaled = scale_weights(data, "token_mean", self._loop.max_length)
        if self._loss is not None:
            return forward_backward_custom(self._run.policy, self._run.service, scaled, self._loss)
        return self._run.policy.forward_backward(scaled, "cross_entropy")

    def metrics(self, output: ForwardBackwardOutput) -> Metrics:
        return {"nll/train": output.metrics["loss:sum"]} if self._loss is None else supervised.custom_metrics(output)

    def evaluate(self, data: Sequence[Datum]) -> Metrics:
        """Held-out negative log-likelihood (nats per token) and perplexity."""
        num_tokens = sum(float(datum.loss_fn_inputs["weights"].sum()) for datum in data)
        loss = self._run.policy.forward(data, "cross_entropy").result().metrics["loss:sum"]
        nll = loss / num_tokens
        return {"nll": nll, "perplexity": float(np.exp(nll)), "examples": float(len(data))}
