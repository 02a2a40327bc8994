"""Episodes with credit per token: what an algorithm fills in between rollouts and datums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cookbook.core.clients import SamplingClient, TrainingClient
from cookbook.core.datums import only_inputs, policy_datums, with_inputs
from cookbook.core.rollouts import Metrics, Trajectory
from cookbook.core.types import Datum
from cookbook.rl.advantages import GroupAdvantage, has_signal
from cookbook.rl.batch import reference_logprobs
from cookbook.rl.gae import GAE, ReinforcePP, group_token_advantages, whiten


class Episode:
    """A trajectory with per-token arrays `[T]`, float64, over its sampled tokens in the order they were sampled.

    `rewards` is zero but for the trajectory's reward at the last token; `values`, `advantages` and `returns` begin as
    zero.
    `segments` are the trajectory's datums, of which a sampled token is one position.
    """

    def __init__(self, trajectory: Trajectory, group: int) -> None:
        self.group = group
        self.segments = policy_datums(trajectory, 1.0)
        self._sampled = [datum.loss_fn_inputs["weights"] != 0 for datum in self.segments]
        self.sampling_logprobs = self.gather([datum.loss_fn_inputs["logprobs"] for datum in self.segments])
        self.rewards = np.zeros(len(self.sampling_logprobs))
        self.rewards[-1] = trajectory.reward
        self.values = np.zeros(len(self.rewards))
        self.advantages = np.zeros(len(self.rewards))
        self.returns = np.zeros(len(self.rewards))

    def gather(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The values at the sampled tokens, `[T]`, of one array per segment."""
        at_sampled = [array[sampled] for array, sampled in zip(arrays, self._sampled, strict=True)]
        return np.concatenate(at_sampled).astype(np.float64)

    def datums(self) -> list[Datum]:
        """The segments with `advantages`, `returns` and `old_values`, all 0 at positions of the prompt."""
        data, start = [], 0
        for datum, sampled in zip(self.segments, self._sampled, strict=True):
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


def subtract_kl_penalty(episodes: Sequence[Episode], reference: SamplingClient, coef: float) -> Metrics:
    """Take coef * (log p - log p_ref), the k1 estimate of the KL divergence, from the reward of every token."""
    gaps = []
    references = _per_episode(episodes, reference_logprobs(_segments(episodes), reference))
    for episode, ref_logprobs in zip(episodes, references, strict=True):
        gap = episode.sampling_logprobs - ref_logprobs
        episode.rewards -= coef * gap
        gaps.append(gap.sum())
    return {"kl/reference": float(np.mean(gaps))}


def estimate_values(episodes: Sequence[Episode], critic: TrainingClient) -> None:
    """Fill in the critic's values. Its loss is computed along with them, against returns of zero, and not read."""
    data = []
    for datum in _segments(episodes):
        zeros = np.zeros(datum.model_input.length, dtype=np.float32)
        data.append(with_inputs(only_inputs(datum, ("target_tokens", "weights")), old_values=zeros, returns=zeros))
    outputs = critic.forward(data, "value").result().loss_fn_outputs
    values = _per_episode(episodes, [output["values"] for output in outputs])
    for episode, values_T in zip(episodes, values, strict=True):
        episode.values = values_T


def groups_with_signal(episodes: Sequence[Episode]) -> set[int]:
    """The groups in which any two episodes have different rewards, KL penalties included."""
    rewards: dict[int, list[float]] = {}
    for episode in episodes:
        rewards.setdefault(episode.group, []).append(float(np.sum(episode.rewards)))
    return {group for group, values in rewards.items() if has_signal(values)}


def assign_advantages(episodes: Sequence[Episode], advantage: GAE | ReinforcePP | GroupAdvantage) -> Metrics:
    """Fill in the advantages and, for a critic, the returns that it is trained on."""
    if isinstance(advantage, GAE):
        return _assign_gae(episodes, advantage)
    if isinstance(advantage, ReinforcePP):
        for episode, advantages in zip(episodes, advantage([each.rewards for each in episodes]), strict=True):
            episode.advantages = advantages
        return {}
    for place in {episode.group for episode in episodes}:
        group = [episode for episode in episodes if episode.group == place]
        token_advantages = group_token_advantages([episode.rewards for episode in group], advantage)
        for episode, advantages in zip(group, token_advantages, strict=True):
            episode.advantages = advantages
    return {}


def _assign_gae(episodes: Sequence[Episode], advantage: GAE) -> Metrics:
    for episode in episodes:
        episode.advantages, episode.returns = advantage(episode.rewards, episode.values)
    if advantage.whiten:
        whitened = whiten([episode.advantages for episode in episodes])
        for episode, advantages in zip(episodes, whitened, strict=True):
            episode.advantages = advantages
    values = np.concatenate([episode.values for episode in episodes])
    returns = np.concatenate([episode.returns for episode in episodes])
    variance = float(np.var(returns))
    explained = 1 - float(np.var(returns - values)) / variance if variance > 0 else 0.0
    return {
        "value/mean": float(values.mean()),
        "value/return": float(returns.mean()),
        "value/explained_variance": explained,
    }


def _segments(episodes: Sequence[Episode]) -> list[Datum]:
    """The segments of all episodes, one after the other."""
    return [datum for episode in episodes for datum in episode.segments]


def _per_episode(episodes: Sequence[Episode], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """From one array per segment of all episodes to one `[T]` per episode, over its sampled tokens."""
    remaining = iter(arrays)
    return [episode.gather([next(remaining) for _ in episode.segments]) for episode in episodes]
