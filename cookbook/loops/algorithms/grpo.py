"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

Each completion is compared with the others of its problem; the policy takes a gradient step towards those that did
better. The loop is `cookbook.loops.policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from cookbook.core.clients import APIFuture, Capabilities
from cookbook.core.datums import scale_weights, with_inputs
from cookbook.core.kinds import Kinds
from cookbook.core.rollouts import Metrics, TrajectoryGroup
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.loops import policy
from cookbook.loops.common import forward_backward_custom
from cookbook.loops.config import RunConfig, require, require_at_least
from cookbook.loops.run import Run, reference_sampler
from cookbook.loops.updates import policy_gradient, split_into_minibatches, update_metrics
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import GroupAdvantage
from cookbook.rl.batch import group_datums, kl_per_trajectory, mismatch_metrics, reference_logprobs

KL_COMBINATIONS = {("k1", "reward"), ("k2", "loss"), ("k3", "loss")}
"""Estimator and placement of the KL penalty whose gradient is that of a KL divergence (see docs/losses.md).

k1 in the loss has an expected gradient of zero; k2 and k3 in the reward differentiate something that is no divergence.
"""


@dataclass
class GRPOConfig(policy.PolicyConfig):
    """The settings of GRPO."""

    _target_: str = "cookbook.loops.algorithms.grpo.run"
    num_substeps: int = 1
    kl_estimator: str = "k1"
    kl_placement: str = "reward"

    def check(self, config: RunConfig, capabilities: Capabilities) -> None:
        super().check(config, capabilities)
        require_at_least(1, "loop", self, "num_substeps")
        if self.kl_penalty_coef > 0:
            choices = ", ".join(f"{estimator} in the {placement}" for estimator, placement in sorted(KL_COMBINATIONS))
            require(
                (self.kl_estimator, self.kl_placement) in KL_COMBINATIONS,
                f"loop.kl_estimator={self.kl_estimator} with loop.kl_placement={self.kl_placement}: its gradient is "
                f"not that of a KL divergence; choose {choices}",
            )
            require(
                self.kl_placement == "reward" or not policy.uses_custom_loss(config),
                "loop.kl_placement=loss: is added to a built-in loss only; set loop.kl_placement=reward "
                "loop.kl_estimator=k1",
            )


@dataclass(frozen=True)
class Components(policy.Components):
    """What GRPO is built from."""

    advantage: Annotated[GroupAdvantage, Kinds("group")]


def run(config: RunConfig, components: Components) -> float | None:
    """Train with GRPO: see `cookbook.loops.policy.run`."""
    return policy.run(config, components, GRPO)


class GRPO:
    """Credit by comparison within a group, one pass over the batch in `loop.num_substeps` optimizer steps."""

    def __init__(self, run: Run, components: policy.Components) -> None:
        self._run, self._loss = run, components.loss
        self._advantage: GroupAdvantage = components.advantage
        self._loop: GRPOConfig = run.config.loop
        self._reference = reference_sampler(run.config, run.service) if self._loop.kl_penalty_coef else None
        self._kl_in_loss = self._reference is not None and self._loop.kl_placement == "loss"

    def credit(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[Datum], Metrics]:
        """Advantages: each reward against its group. Groups whose rewards are all the same are left out."""
        penalties, metrics = None, {}
        if self._reference is not None and self._loop.kl_placement == "reward":
            kl = kl_per_trajectory(groups, self._reference)
            penalties = [[self._loop.kl_penalty_coef * value for value in group] for group in kl]
            metrics["kl/reference"] = float(np.mean([value for group in kl for value in group]))
        data, batch_metrics = group_datums(groups, self._advantage, penalties)
        return data, metrics | batch_metrics

    def datums(self, credit: list[Datum]) -> list[Datum]:
        """The credited datums, with the reference's logprobs where the loss needs them."""
        if self._reference is None or not self._kl_in_loss:
            return credit
        references = reference_logprobs(credit, self._reference)
        return [with_inputs(datum, ref_logprobs=values) for datum, values in zip(credit, references, strict=True)]

    def update(self, data: list[Datum], step: int) -> Metrics:
        """Optimizer steps, each on its own part of the batch; all are enqueued before any is awaited."""
        loop, run = self._loop, self._run
        minibatches = [
            scale_weights(minibatch, loop.loss_agg, loop.max_tokens)
            for minibatch in split_into_minibatches(data, loop.num_substeps, run.config.seed, "substeps", step)
        ]
        updates = [(self._gradient(minibatch), run.optim_step(run.config.optim)) for minibatch in minibatches]
        metrics = update_metrics(updates) | mismatch_metrics(minibatches[0], updates[0][0].result())
        trained = sum(datum.model_input.length for datum in data)
        run.ledger.add(trained=trained)
        return metrics | {"tokens/trained": float(trained), "optim/substeps": float(len(updates))}

    def _gradient(self, data: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        loop = self._loop
        if not self._kl_in_loss:
            return policy_gradient(self._run, data, self._loss)
        from cookbook.losses.kl import with_kl_penalty  # imported here because it needs torch

        assert isinstance(self._loss, BuiltinLoss)
        loss = with_kl_penalty(self._loss, loop.kl_estimator, loop.kl_penalty_coef)
        return forward_backward_custom(self._run.policy, self._run.service, data, loss)
