"""PPO: proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), with a critic or without one.

Every sampled token has a reward (a KL penalty along the way, the trajectory's reward at the end). Those become
advantages per token, and the batch is trained on several times in minibatches. The critic is a second training client.
The loop is `cookbook.loops.policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from omegaconf import MISSING

from cookbook.core.clients import Capabilities
from cookbook.core.datums import only_inputs, scale_weights
from cookbook.core.errors import CapabilityError
from cookbook.core.kinds import Kinds
from cookbook.core.rollouts import Metrics, TrajectoryGroup
from cookbook.core.types import Datum
from cookbook.loops import policy
from cookbook.loops.config import RunConfig, require, require_at_least
from cookbook.loops.run import Run, reference_sampler
from cookbook.loops.updates import policy_gradient, split_into_minibatches, update_metrics
from cookbook.rl.advantages import GroupAdvantage
from cookbook.rl.batch import mismatch_metrics
from cookbook.rl.episodes import Episode, assign_advantages, estimate_values, groups_with_signal, subtract_kl_penalty
from cookbook.rl.gae import GAE, ReinforcePP

GAE_TARGET = f"{GAE.__module__}.{GAE.__qualname__}"
"""The advantage that needs a critic."""

POLICY_INPUTS = ("target_tokens", "logprobs", "advantages", "weights")
CRITIC_INPUTS = ("target_tokens", "old_values", "returns", "weights")
"""What each of the two losses reads of a datum."""


@dataclass
class PPOConfig(policy.PolicyConfig):
    """The settings of PPO. The KL penalty is k1, a part of the reward of every token."""

    _target_: str = "cookbook.loops.algorithms.ppo.run"
    num_epochs: int = 1
    num_minibatches: int = 1
    critic_learning_rate: float = MISSING
    value_clip_range: float = 0.2

    def check(self, config: RunConfig, capabilities: Capabilities) -> None:
        super().check(config, capabilities)
        require_at_least(1, "loop", self, "num_epochs", "num_minibatches")
        require_at_least(0, "loop", self, "value_clip_range")
        rate = self.critic_learning_rate
        require(rate > 0, f"loop.critic_learning_rate={rate}: must be above 0")
        has_critic = config.advantage is not None and config.advantage["_target_"] == GAE_TARGET
        if has_critic and not capabilities.critic:
            raise CapabilityError(
                "advantage=gae needs a critic, which this backend lacks; choose advantage=reinforce_pp, rloo or "
                "mean_centered, or backend=local"
            )
        rounds = self.dynamic_sampling_rounds
        require(
            rounds == 0 or not has_critic,
            f"loop.dynamic_sampling_rounds={rounds} with advantage=gae: with a critic, groups whose rewards are the "
            "same teach too; set loop.dynamic_sampling_rounds=0",
        )


@dataclass(frozen=True)
class Components(policy.Components):
    """What PPO is built from. An advantage other than GAE needs no critic."""

    advantage: Annotated[GAE | ReinforcePP | GroupAdvantage, Kinds("critic", "returns", "group")]


def run(config: RunConfig, components: Components) -> float | None:
    """Train with PPO: see `cookbook.loops.policy.run`."""
    return policy.run(config, components, PPO)


class PPO:
    """Credit per token, and `loop.num_epochs` passes over the batch in `loop.num_minibatches` optimizer steps each."""

    def __init__(self, run: Run, components: policy.Components) -> None:
        self._run, self._loss = run, components.loss
        self._advantage: GAE | ReinforcePP | GroupAdvantage = components.advantage
        self._loop: PPOConfig = run.config.loop
        self._critic = run.create_critic() if isinstance(self._advantage, GAE) else None
        self._reference = reference_sampler(run.config, run.service) if self._loop.kl_penalty_coef else None

    def credit(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[Episode], Metrics]:
        """Rewards per token, values by the critic, and from both advantages and returns.

        With a group advantage, groups whose rewards are all the same are left out, as in GRPO. With a critic or
        REINFORCE++ they teach like any other.
        """
        episodes = [Episode(each, place) for place, group in enumerate(groups) for each in group.graded]
        metrics: Metrics = {}
        if episodes and self._reference is not None:
            metrics |= subtract_kl_penalty(episodes, self._reference, self._loop.kl_penalty_coef)
        with_signal = groups_with_signal(episodes)
        metrics["groups/total"] = float(len(groups))
        metrics["groups/without_signal"] = float(len(groups) - len(with_signal))
        if not isinstance(self._advantage, GAE | ReinforcePP):
            episodes = [episode for episode in episodes if episode.group in with_signal]
        if episodes and self._critic is not None:
            estimate_values(episodes, self._critic)
        if episodes:
            metrics |= assign_advantages(episodes, self._advantage)
        return episodes, metrics

    def datums(self, credit: list[Episode]) -> list[Datum]:
        return [datum for episode in credit for datum in episode.datums()]

    def update(self, data: list[Datum], step: int) -> Metrics:
        """All optimizer steps of policy and critic; all are enqueued before any is awaited."""
        loop, run, critic = self._loop, self._run, self._critic
        critic_adam = replace(run.config.optim, learning_rate=loop.critic_learning_rate)
        first: list[Datum] = []
        updates, critic_updates = [], []
        for epoch in range(loop.num_epochs):
            seed_path = (run.config.seed, "minibatches", step, epoch)
            for part in split_into_minibatches(data, loop.num_minibatches, *seed_path):
                minibatch = scale_weights(part, loop.loss_agg, loop.max_tokens)
                first = first or minibatch
                inputs = [only_inputs(datum, POLICY_INPUTS) for datum in minibatch]
                updates.append((policy_gradient(run, inputs, self._loss), run.optim_step(run.config.optim)))
                if critic is not None:
                    inputs = [only_inputs(datum, CRITIC_INPUTS) for datum in minibatch]
                    gradient = critic.forward_backward(inputs, "value", {"clip_range": loop.value_clip_range})
                    critic_updates.append((gradient, run.optim_step(critic_adam, "critic")))
        metrics = update_metrics(updates) | mismatch_metrics(first, updates[0][0].result())
        if critic_updates:
            metrics |= update_metrics(critic_updates, "critic")
        trained = loop.num_epochs * sum(datum.model_input.length for datum in data)
        run.ledger.add(trained=trained * (2 if critic is not None else 1))
        return metrics | {"tokens/trained": float(trained), "optim/substeps": float(len(updates))}
