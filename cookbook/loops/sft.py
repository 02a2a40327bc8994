"""Supervised fine-tuning on conversations, on any backend.

Per step: render a batch of conversations, and take a step down the mean negative log-likelihood of the tokens to be learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from cookbook.core.datums import Truncation, scale_weights, supervised_datum
from cookbook.core.errors import DataError
from cookbook.core.examples import Conversation
from cookbook.core.rollouts import Metrics
from cookbook.core.schedules import learning_rate_factor
from cookbook.core.types import Datum
from cookbook.data.kinds import ConversationDataset
from cookbook.data.order import draw
from cookbook.data.rendering import Renderer, TrainOn
from cookbook.loops.common import CommonParts, Session, Stopwatch, evaluation_due, held_out, open_session
from cookbook.loops.config import RunConfig, SFTConfig

NOTHING_TO_LEARN = "no conversation leaves anything to learn; raise loop.max_length or change loop.truncation"


@dataclass(frozen=True)
class Parts(CommonParts):
    """What this loop is built from."""

    dataset: ConversationDataset


def run(config: RunConfig, parts: Parts) -> None:
    """Train `config.model` on `dataset.train` and measure it on `dataset.test`. Leaves everything in `config.run_dir`.

    Raises:
        DataError: no conversation of a batch, or none of the held-out ones, leaves anything to learn.
        BudgetExceeded: the run reached `budget`; a checkpoint is left.
    """
    loop: SFTConfig = config.loop
    train = parts.dataset.train
    steps_per_epoch = max(1, len(train) // loop.batch_size)
    steps = loop.steps or loop.epochs * steps_per_epoch
    warmup_steps = round(loop.warmup_fraction * steps)

    with open_session(config, parts, steps, headline=("nll/train", "eval/nll")) as session:
        policy, tracker, renderer = session.policy, session.tracker, session.renderer
        if parts.dataset.bad_rows.total:
            tracker.say(f"dataset: {parts.dataset.bad_rows}")
        held_out_data = _datums(held_out(parts.dataset.test, config.eval.examples), renderer, loop)
        if config.eval.examples and not held_out_data:
            raise DataError(f"dataset.test: {NOTHING_TO_LEARN}")

        for step in range(session.next_step, steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {}

            # 0. Held-out loss, before the first step and every `eval.every` steps.
            if evaluation_due(config, step):
                _evaluate(session, step, held_out_data)
                metrics["time/eval"] = lap.lap()

            # 1. Draw the conversations of this step: a seeded shuffle of every epoch, addressed by position.
            conversations = draw(train, step, loop.batch_size, config.seed)

            # 2. Render: exactly the tokens that the model has to write carry weight.
            data = _datums(conversations, renderer, loop)
            metrics["datums/left_out"] = float(len(conversations) - len(data))
            if not data:
                raise DataError(f"step {step}: {NOTHING_TO_LEARN}")

            # 3. Train on the mean over tokens; the update is enqueued before the gradient is awaited.
            learning_rate = config.optim.learning_rate * learning_rate_factor(loop.schedule, step, steps, warmup_steps)
            gradient = policy.forward_backward(scale_weights(data, "token_mean", loop.max_length), "cross_entropy")
            update = policy.optim_step(replace(config.optim, learning_rate=learning_rate))
            metrics |= {"nll/train": gradient.result().metrics["loss:sum"], "optim/lr": learning_rate}
            metrics |= {f"optim/{key}": value for key, value in update.result().metrics.items()}

            # 4. Record and save.
            trained = sum(datum.model_input.length for datum in data)
            session.ledger.add(trained=trained)
            metrics |= {
                "tokens/trained": trained,
                "epoch": step / steps_per_epoch,
                "time/train": lap.lap(),
                "time/step": total.lap(),
            }
            tracker.log(step, metrics)
            session.step_done(step + 1)

        # 5. After: the same held-out conversations as before.
        _evaluate(session, steps, held_out_data)


def _datums(conversations: Sequence[Conversation], renderer: Renderer, loop: SFTConfig) -> list[Datum]:
    """The datums of all conversations that leave something to learn."""
    train_on, truncation = cast(TrainOn, loop.train_on), cast(Truncation, loop.truncation)
    data = []
    for conversation in conversations:
        try:
            tokens, learnt = renderer.supervised(conversation.messages, train_on, conversation.tools)
        except DataError as error:
            raise DataError(f"{conversation.source or conversation.id}: {error}") from error
        datum = supervised_datum(tokens, learnt, loop.max_length, truncation)
        if datum is not None:
            data.append(datum)
    return data


def _evaluate(session: Session, step: int, data: Sequence[Datum]) -> None:
    """Held-out negative log-likelihood (nats per token) and perplexity."""
    if not data:
        return
    num_tokens = sum(float(datum.loss_fn_inputs["weights"].sum()) for datum in data)
    loss = session.policy.forward(data, "cross_entropy").result().metrics["loss:sum"]
    session.ledger.add(trained=sum(datum.model_input.length for datum in data))
    nll = loss / num_tokens
    session.record_evaluation(step, {"nll": nll, "perplexity": float(np.exp(nll)), "examples": float(len(data))})
