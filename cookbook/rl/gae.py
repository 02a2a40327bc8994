"""Advantages per token: with a critic by GAE, without one from returns or from groups.

A trajectory is an array over its T sampled tokens, in the order they were sampled. Its rewards are zero except where
a reward was given: a KL penalty at every token, the score at the last one. After the last token the value is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from cookbook.core.errors import ConfigError
from cookbook.rl.advantages import GroupAdvantage

Variance = Literal["sample", "population"]

WHITENING_EPS = 1e-8
"""Added to the variance, so that equal values give finite results."""


def gae(
    rewards_T: np.ndarray, values_T: np.ndarray, gamma: float = 1.0, lam: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16) of one trajectory.

    A_t = sum over l of (gamma * lam)^l * delta_(t+l), with delta_t = r_t + gamma * V_(t+1) - V_t and V_T = 0.

    Returns:
        Advantages `[T]` and returns, A + V `[T]`, which are what the critic is trained on; both float64.
    """
    values = np.asarray(values_T, dtype=np.float64)
    deltas = np.asarray(rewards_T, dtype=np.float64) + gamma * np.append(values[1:], 0.0) - values
    advantages = discounted_sums(deltas, gamma * lam)
    return advantages, advantages + values


def discounted_sums(values_T: np.ndarray, discount: float) -> np.ndarray:
    """S_t = sum over l >= 0 of discount^l * x_(t+l), `[T]`, float64.

    By doubling: once S covers k terms, adding discount^k * S_(t+k) makes it cover 2k: log2(T) vector operations.
    """
    sums = np.array(values_T, dtype=np.float64)
    covered = 1
    while covered < len(sums):
        sums[:-covered] = sums[:-covered] + discount**covered * sums[covered:]
        covered *= 2
    return sums


def whiten(values: Sequence[np.ndarray], variance: Variance = "sample", shift_mean: bool = True) -> list[np.ndarray]:
    """(x - mean) / sqrt(var + 1e-8) with the mean and variance over all tokens of all trajectories.

    Libraries differ in the variance: `sample` divides by N - 1 (verl), `population` by N (OpenRLHF). With a single
    token only the mean is subtracted. `shift_mean` False keeps the mean, as for rewards.
    """
    flat = np.concatenate([np.asarray(array, dtype=np.float64) for array in values])
    mean = flat.mean()
    ddof = 1 if variance == "sample" and len(flat) > 1 else 0
    scale = 1 / np.sqrt(flat.var(ddof=ddof) + WHITENING_EPS)
    return [(array - mean) * scale + (0.0 if shift_mean else mean) for array in values]


@dataclass(frozen=True)
class GAE:
    """`gae` with its settings. Needs a critic.

    `whiten`: advantages are whitened over all tokens of a batch before they are trained on; returns never are.

    Raises:
        ConfigError: gamma or lam is not in [0, 1].
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    kind: ClassVar[str] = "critic"

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"advantage.{name}={getattr(self, name)}: must be in [0, 1]")

    def __call__(self, rewards_T: np.ndarray, values_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return gae(rewards_T, values_T, self.gamma, self.lam)


@dataclass(frozen=True)
class ReinforcePP:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): the discounted return from each token on, whitened over the whole batch.

    Needs neither a critic nor groups. `variance` is that of `whiten`.

    Raises:
        ConfigError: gamma is not in [0, 1], or the variance is unknown.
    """

    gamma: float = 1.0
    variance: Variance = "sample"
    kind: ClassVar[str] = "returns"

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"advantage.gamma={self.gamma}: must be in [0, 1]")
        if self.variance not in ("sample", "population"):
            raise ConfigError(f"advantage.variance={self.variance}: must be sample or population")

    def __call__(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        """From the rewards `[T]` of every trajectory of a batch to its advantages `[T]`."""
        return whiten([discounted_sums(rewards_T, self.gamma) for rewards_T in rewards], self.variance)


def group_token_advantages(rewards_G: Sequence[np.ndarray], advantage: GroupAdvantage) -> list[np.ndarray]:
    """The group advantage (RLOO, ...) of each trajectory's summed rewards, the same for all of its tokens.

    Args:
        rewards_G: of each trajectory of one group, its rewards `[T]`.
    """
    totals = [float(np.sum(rewards_T)) for rewards_T in rewards_G]
    return [np.full(len(rewards_T), value) for rewards_T, value in zip(rewards_G, advantage(totals), strict=True)]
