"""PPO (Schulman et al. 2017, arXiv:1707.06347) with a critic, or without one, on any backend that has what it takes.

Per step: sample completions, pay each token (a KL penalty along the way, the reward at the end), turn payments into
advantages per token, and go over the batch several times in minibatches. The critic is a second training client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cookbook.core.clients import SamplingClient, TrainingClient
from cookbook.core.datums import only_inputs, policy_datums, scale_weights, with_inputs
from cookbook.core.rollouts import Metrics, Reward, Trajectory, TrajectoryGroup
from cookbook.core.types import Datum, SamplingParams
from cookbook.data.curriculum import CurriculumMaker
from cookbook.data.kinds import PromptDataset
from cookbook.envs.base import EnvMaker
from cookbook.loops.common import (
    CommonParts,
    Stopwatch,
    evaluate_policy,
    evaluation_due,
    open_session,
    reference_sampler,
)
from cookbook.loops.config import PPOConfig, RunConfig
from cookbook.loops.policy_steps import (
    correct_sampler,
    graded_rewards,
    like_for_like,
    loss_config,
    shares,
    stop_if_grading_fails,
    update_metrics,
    warn_if_stuck,
)
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import GroupAdvantage, has_signal
from cookbook.rl.batch import mismatch_metrics, reference_logprobs, rollout_metrics
from cookbook.rl.gae import GAE, ReinforcePP, group_token_advantages, whiten
from cookbook.rl.rollouts import collect

POLICY_INPUTS = ("target_tokens", "logprobs", "advantages", "weights")
CRITIC_INPUTS = ("target_tokens", "old_values", "returns", "weights")
"""What each of the two losses reads of a datum."""


@dataclass(frozen=True)
class Parts(CommonParts):
    """What this loop is built from. An `advantage` other than GAE needs no critic."""

    dataset: PromptDataset
    env: EnvMaker
    reward: Reward
    loss: BuiltinLoss
    advantage: GAE | ReinforcePP | GroupAdvantage
    curriculum: CurriculumMaker


def run(config: RunConfig, parts: Parts) -> None:
    """Train `config.model` with PPO. Leaves everything in `config.run_dir`.

    Raises:
        RewardError: more than `loop.max_reward_error_rate` of a step's completions could not be graded; a checkpoint is left.
        BudgetExceeded: the run reached `budget`; a checkpoint is left.
    """
    loop: PPOConfig = config.loop
    sampling_params = SamplingParams(loop.max_tokens, loop.temperature, loop.top_p, loop.top_k)
    curriculum = parts.curriculum(parts.dataset.train, config.seed)

    with open_session(config, parts, loop.steps, curriculum=curriculum) as session:
        policy, tracker = session.policy, session.tracker
        if parts.dataset.bad_rows.total:
            tracker.say(f"dataset: {parts.dataset.bad_rows}")
        critic = session.critic() if isinstance(parts.advantage, GAE) else None
        make_env = partial(
            parts.env, renderer=session.renderer, reward=parts.reward, reward_retries=loop.reward_retries
        )
        reference = reference_sampler(config, parts.service) if loop.kl_penalty_coef else None
        sampler = policy.save_weights_and_get_sampling_client()

        for step in range(session.next_step, loop.steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {"optim/lr": config.optim.learning_rate}

            # 0. Held-out accuracy, before the first step and every `eval.every` steps.
            if evaluation_due(config, step):
                evaluate_policy(session, parts.dataset.test, step, sampler, make_env, loop.max_tokens)
                metrics["time/eval"] = lap.lap()

            # 1. The curriculum chooses the problems of this step.
            indices = curriculum.choose(loop.groups_per_batch)
            examples = [parts.dataset.train[index] for index in indices]

            # 2. Sample completions; every one is scored as it arrives.
            rollouts = collect(
                sampler, examples, make_env, loop.group_size, sampling_params, (config.seed, "rollout", step)
            )
            session.record_rollouts(step, rollouts)
            metrics |= rollout_metrics(rollouts.trajectories)
            metrics |= {"time/sample": rollouts.sample_s, "time/reward_wait": rollouts.reward_wait_s}
            stop_if_grading_fails(session, step, metrics["reward/error"])
            rewards_PG = graded_rewards(rollouts.groups)
            curriculum.record(indices, rewards_PG)
            metrics |= curriculum.metrics()
            lap.lap()

            # 3. Pay every sampled token: minus the KL penalty where it is, the trajectory's reward at its last token.
            episodes = [
                _Episode(trajectory, place)
                for place, group in enumerate(rollouts.groups)
                for trajectory in _graded(group)
            ]
            metrics |= _pay(episodes, reference, loop.kl_penalty_coef)

            # 4. Values by the critic, advantages and returns per token.
            if critic is not None:
                _value(episodes, critic)
            metrics |= _advantages(episodes, parts.advantage)
            metrics["groups/total"] = float(len(rollouts.groups))
            metrics["groups/without_signal"] = float(sum(not has_signal(rewards_G) for rewards_G in rewards_PG))
            data = [datum for episode in episodes for datum in episode.datums()]
            metrics["time/advantages"] = lap.lap()

            # 5. Train: `num_epochs` passes over the batch in `num_minibatches` optimizer steps each, all enqueued before any is awaited.
            if data:
                data = like_for_like(data, policy, parts.service, loop.temperature)
                data, importance_metrics = correct_sampler(data, session, parts.service)
                metrics |= _train(policy, critic, data, config, parts, step) | importance_metrics
                session.ledger.add(
                    trained=loop.num_epochs
                    * (1 + (critic is not None))
                    * sum(datum.model_input.length for datum in data)
                )
            metrics["time/train"] = lap.lap()

            # 6. The next step samples from the new weights.
            sampler = policy.save_weights_and_get_sampling_client()

            # 7. Record and save.
            metrics |= {"tokens/prefill": rollouts.num_prefill_tokens, "tokens/sampled": rollouts.num_sampled_tokens}
            metrics["time/step"] = total.lap()
            tracker.log(step, metrics)
            warn_if_stuck(session, metrics)
            session.step_done(step + 1)

        # 8. After: the same held-out problems as before.
        evaluate_policy(session, parts.dataset.test, loop.steps, sampler, make_env, loop.max_tokens)


class _Episode:
    """A trajectory as datums, and per-token arrays `[T]` over its sampled tokens in the order they were sampled."""

    def __init__(self, trajectory: Trajectory, group: int) -> None:
        self.group = group
        self.stretches = policy_datums(trajectory, 1.0)
        self._sampled = [datum.loss_fn_inputs["weights"] != 0 for datum in self.stretches]
        self.sampling_logprobs = self.gather([datum.loss_fn_inputs["logprobs"] for datum in self.stretches])
        self.rewards = np.zeros(len(self.sampling_logprobs))
        self.rewards[-1] = trajectory.reward
        self.values = np.zeros(len(self.rewards))
        self.advantages = np.zeros(len(self.rewards))
        self.returns = np.zeros(len(self.rewards))

    def gather(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The values at the sampled tokens of per-datum arrays."""
        return np.concatenate([array[sampled] for array, sampled in zip(arrays, self._sampled, strict=True)]).astype(
            np.float64
        )

    def datums(self) -> list[Datum]:
        """The datums, their prompt positions holding 0 in every array."""
        data, start = [], 0
        for datum, sampled in zip(self.stretches, self._sampled, strict=True):
            end = start + int(sampled.sum())
            arrays = {}
            for key, values in (
                ("advantages", self.advantages),
                ("returns", self.returns),
                ("old_values", self.values),
            ):
                arrays[key] = np.zeros(len(sampled), dtype=np.float32)
                arrays[key][sampled] = values[start:end]
            data.append(with_inputs(datum, **arrays))
            start = end
        return data


def _graded(group: TrajectoryGroup) -> list[Trajectory]:
    return [trajectory for trajectory in group.trajectories if trajectory.status != "error"]


def _flat(episodes: Sequence[_Episode]) -> list[Datum]:
    return [datum for episode in episodes for datum in episode.stretches]


def _per_episode(episodes: Sequence[_Episode], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per-datum arrays of all episodes, gathered at the sampled tokens of each."""
    remaining = iter(arrays)
    return [episode.gather([next(remaining) for _ in episode.stretches]) for episode in episodes]


def _pay(episodes: Sequence[_Episode], reference: SamplingClient | None, coef: float) -> Metrics:
    """Take coef * (log p - log p_ref), the k1 estimate of the KL divergence, from the reward of every token."""
    if reference is None or not episodes:
        return {}
    gaps = []
    for episode, ref_logprobs in zip(
        episodes, _per_episode(episodes, reference_logprobs(_flat(episodes), reference)), strict=True
    ):
        gap = episode.sampling_logprobs - ref_logprobs
        episode.rewards -= coef * gap
        gaps.append(gap.sum())
    return {"kl/reference": float(np.mean(gaps))}


def _value(episodes: Sequence[_Episode], critic: TrainingClient) -> None:
    """Fill in the critic's values. Its loss is computed along with them, against returns of zero, and not read."""
    data = []
    for datum in _flat(episodes):
        zeros = np.zeros(datum.model_input.length, dtype=np.float32)
        data.append(with_inputs(only_inputs(datum, ("target_tokens", "weights")), old_values=zeros, returns=zeros))
    outputs = critic.forward(data, "value").result().loss_fn_outputs
    for episode, values in zip(episodes, _per_episode(episodes, [output["values"] for output in outputs]), strict=True):
        episode.values = values


def _advantages(episodes: Sequence[_Episode], advantage: GAE | ReinforcePP | GroupAdvantage) -> Metrics:
    """Fill in the advantages, and for a critic the returns that it is trained on."""
    if not episodes:
        return {}
    if isinstance(advantage, GAE):
        for episode in episodes:
            episode.advantages, episode.returns = advantage(episode.rewards, episode.values)
        values, returns = (
            np.concatenate([getattr(episode, name) for episode in episodes]) for name in ("values", "returns")
        )
        if advantage.whiten:
            whitened = whiten([episode.advantages for episode in episodes])
            for episode, advantages in zip(episodes, whitened, strict=True):
                episode.advantages = advantages
        variance = float(np.var(returns))
        explained = 1 - float(np.var(returns - values)) / variance if variance > 0 else 0.0
        return {
            "value/mean": float(values.mean()),
            "value/return": float(returns.mean()),
            "value/explained_variance": explained,
        }
    if isinstance(advantage, ReinforcePP):
        for episode, advantages in zip(episodes, advantage([episode.rewards for episode in episodes]), strict=True):
            episode.advantages = advantages
        return {}
    for place in {episode.group for episode in episodes}:
        group = [episode for episode in episodes if episode.group == place]
        for episode, advantages in zip(
            group, group_token_advantages([episode.rewards for episode in group], advantage), strict=True
        ):
            episode.advantages = advantages
    return {}


def _train(
    policy: TrainingClient,
    critic: TrainingClient | None,
    data: Sequence[Datum],
    config: RunConfig,
    parts: Parts,
    step: int,
) -> Metrics:
    loop: PPOConfig = config.loop
    policy_loss_config = loss_config(parts.loss, parts.service, loop.temperature)
    critic_adam = replace(config.optim, learning_rate=loop.critic_learning_rate)
    first: list[Datum] = []
    updates, critic_updates = [], []
    for epoch in range(loop.num_epochs):
        for share in shares(data, loop.num_minibatches, config.seed, "minibatches", step, epoch):
            minibatch = scale_weights(share, loop.loss_agg, loop.max_tokens)
            first = first or minibatch
            gradient = policy.forward_backward(
                [only_inputs(datum, POLICY_INPUTS) for datum in minibatch], parts.loss.name, policy_loss_config
            )
            updates.append((gradient, policy.optim_step(config.optim)))
            if critic is not None:
                inputs = [only_inputs(datum, CRITIC_INPUTS) for datum in minibatch]
                gradient = critic.forward_backward(inputs, "value", {"clip_range": loop.value_clip_range})
                critic_updates.append((gradient, critic.optim_step(critic_adam)))
    metrics = update_metrics(updates) | mismatch_metrics(first, updates[0][0].result())
    if critic_updates:
        metrics |= update_metrics(critic_updates, "critic")
    trained = sum(datum.model_input.length for datum in data) * loop.num_epochs
    return metrics | {"tokens/trained": float(trained), "optim/substeps": float(len(updates))}
