"""Truncated importance sampling, for a sampler whose probabilities differ from the trainer's (engine, precision)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from cookbook.core.errors import ConfigError
from cookbook.core.rollouts import Metrics
from cookbook.core.types import Datum

ImportanceLevel = Literal["token", "sequence", "geometric_mean"]

SMALLEST_LOG_RATIO = -20.0
"""The smallest log ratio, so that no weight becomes zero, which would mask its token."""


def truncated_importance_sampling(
    data: Sequence[Datum],
    training_logprobs: Sequence[np.ndarray],
    cap: float,
    level: ImportanceLevel = "token",
) -> tuple[list[Datum], Metrics]:
    """Replace the sampler's logprobs by the trainer's own old ones, and correct for the difference in the weights.

    With p the logprobs in `training_logprobs` and q the sampler's in `logprobs`, the returned datums have `logprobs` =
    p and `weights` * min(exp(p - q), cap) (truncated importance sampling, Ionides 2008; for this mismatch, Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training"). Positions with w = 0 stay as they
    were. Only the datums change, so it works on every backend. Apply it after `scale_weights`: the denominator counts
    tokens, not ratios.

    Args:
        training_logprobs: per datum, the logprobs `[length]` of a forward pass of the weights that sampled.
        cap: the largest weight, at least 1 (2 is common).
        level: whose ratio weighs a token: its own; the product of its datum's, unbiased for whole sequences but growing
            with their length; or their geometric mean.

    Raises:
        ConfigError: cap is below 1, or the level is unknown.
    """
    if not cap >= 1:
        raise ConfigError(f"importance weight cap {cap}: must be at least 1, or on-policy tokens would be cut too")
    if level not in ("token", "sequence", "geometric_mean"):
        raise ConfigError(f"importance weight level {level!r}: must be token, sequence or geometric_mean")
    truncated, all_ratios = [], []
    for datum, training in zip(data, training_logprobs, strict=True):
        sampling, weights = datum.loss_fn_inputs["logprobs"], datum.loss_fn_inputs["weights"]
        trained = weights != 0
        gaps = training[trained].astype(np.float64) - sampling[trained]
        if level == "sequence":
            gaps = np.full(len(gaps), gaps.sum())
        elif level == "geometric_mean":
            gaps = np.full(len(gaps), gaps.sum() / max(len(gaps), 1))
        ratios = np.exp(np.clip(gaps, SMALLEST_LOG_RATIO, np.log(cap)))
        new_weights, new_logprobs = weights.copy(), sampling.copy()
        new_weights[trained] *= ratios
        new_logprobs[trained] = training[trained]
        truncated.append(
            Datum(datum.model_input, {**datum.loss_fn_inputs, "logprobs": new_logprobs, "weights": new_weights})
        )
        all_ratios.append((ratios, gaps > np.log(cap)))
    ratios = np.concatenate([ratios for ratios, _ in all_ratios])
    capped = np.concatenate([capped for _, capped in all_ratios])
    return truncated, {"importance/weight_mean": float(ratios.mean()), "importance/capped": float(capped.mean())}
