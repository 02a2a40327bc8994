"""The loss of a critic."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cookbook.losses.base import LossFunction, TokenBatch, TokenLosses


def value(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """w * max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 per token: regression to the return, in which a
    value gains nothing by moving further than c = `clip_range` from the one at rollout time (PPO2 of OpenAI baselines;
    Engstrom et al. 2020, arXiv:2005.12729, section 3). 0 turns clipping off.

    Inputs are `values` (v, the critic's prediction, with gradient), `old_values` (v_old), `returns` (R) and `weights`;
    the batch's logprobs are not read. A position with w = 0 contributes exactly zero.
    """
    weights = batch.inputs["weights"]
    trained = weights != 0
    values, old_values, returns = (
        torch.where(trained, batch.inputs[key], 0.0) for key in ("values", "old_values", "returns")
    )
    clip_range = config["clip_range"]
    squares = (values - returns).square()
    metrics = {"value:mean": values, "value_error:mean": squares}
    if clip_range:
        clipped = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns).square()
        metrics["value_clip_fraction:mean"] = (clipped > squares).float()
        squares = torch.maximum(squares, clipped)
    return TokenLosses(weights * squares / 2, {key: entry.detach() for key, entry in metrics.items()})


VALUE = LossFunction(value, ("target_tokens", "old_values", "returns"), ("weights",), {"clip_range": 0.2})
"""`value` as a built-in loss of a critic session, which computes `values` itself."""
