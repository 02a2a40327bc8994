"""Group advantages: functions from the rewards of one group to one number per trajectory.

Each is a class with `__call__(rewards) -> advantages`, chosen by `conf/advantage`. A group of one has the advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

GroupAdvantage = Callable[[Sequence[float]], list[float]]

ZERO_VARIANCE_TOLERANCE = 1e-8
"""Rewards of a group that differ by no more than this carry no signal."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether any two rewards of the whole group differ (by more than rounding)."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > ZERO_VARIANCE_TOLERANCE


class MeanCentered:
    """A_i = R_i - mean(R): no division by the spread (Dr.GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.1)."""

    kind: ClassVar[str] = "group"

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        values = np.asarray(rewards, dtype=np.float64)
        return (values - values.mean()).tolist()


class StdNormalized:
    """A_i = (R_i - mean(R)) / (std(R) + eps), with the sample standard deviation (GRPO, Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2)."""

    kind: ClassVar[str] = "group"

    def __init__(self, eps: float = 1e-4) -> None:
        self.eps = eps

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        values = np.asarray(rewards, dtype=np.float64)
        if len(values) == 1:
            return [0.0]
        return ((values - values.mean()) / (values.std(ddof=1) + self.eps)).tolist()


class RLOO:
    """A_i = R_i - mean of the others' rewards (REINFORCE leave-one-out, Ahmadian et al. 2024, arXiv:2402.14740, eq.
    8)."""

    kind: ClassVar[str] = "group"

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        values = np.asarray(rewards, dtype=np.float64)
        if len(values) == 1:
            return [0.0]
        return ((values - values.mean()) * len(values) / (len(values) - 1)).tolist()
