"""Policy-gradient losses over tokens.

Throughout, lp is the logprob of a token under the weights being trained, q (`logprobs`) the one it was sampled with,
A its advantage, w its weight and r = exp(lp - q). A position with w = 0 contributes exactly zero, value and gradient,
for any q there; in all losses but `dro` so does one with A = 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cookbook.core.errors import ConfigError
from cookbook.losses.base import TokenBatch, TokenLosses


def importance_sampling(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """-w * r * A per token: the policy gradient corrected for the weights that sampled."""
    coefficient, log_ratio = _coefficient_and_log_ratio(batch)
    ratio = log_ratio.exp()
    return TokenLosses(-coefficient * ratio, _ratio_metrics(ratio))


def ppo(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """-w * min(r * A, clip(r, lo, hi) * A) per token (Schulman et al. 2017, arXiv:1707.06347, eq. 7), lo and hi
    absolute ratios.

    A `dual_clip` c above 1 bounds the loss of a negative advantage: there the surrogate is max(min(...), c * A) (Ye et
    al. 2020, arXiv:1912.09729). 0 turns it off.
    """
    dual_clip = config["dual_clip"]
    if dual_clip != 0 and dual_clip <= 1:
        raise ConfigError(
            f"loss_fn_config of 'ppo': dual_clip is {dual_clip}; it must be 0 (off) or a ratio above 1, such as 3"
        )
    coefficient, log_ratio = _coefficient_and_log_ratio(batch)
    return _clipped_surrogate(coefficient, log_ratio, batch.inputs["advantages"], config, dual_clip)


def cispo(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """-w * sg(clip(r, lo, hi)) * A * lp per token (MiniMax-M1, arXiv:2506.13585, eq. 4): the clipped ratio is a
    constant."""
    coefficient, log_ratio = _coefficient_and_log_ratio(batch)
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    metrics = {**_ratio_metrics(ratio), "clip_fraction:mean": (clipped != ratio).float()}
    return TokenLosses(-coefficient * clipped * batch.logprobs, metrics)


def dro(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """-w * (A * lp - beta / 2 * (lp - q)^2) per token: the policy gradient with a quadratic penalty that pulls towards
    the sampling policy (DRO, Richemond et al. 2024, arXiv:2405.19107, with the advantage in place of its value
    function)."""
    weights = batch.inputs["weights"]
    logprobs = torch.where(weights == 0, 0.0, batch.logprobs)
    log_ratio = torch.where(weights == 0, 0.0, batch.logprobs - batch.inputs["logprobs"])
    values = batch.inputs["advantages"] * logprobs - config["beta"] / 2 * log_ratio.square()
    return TokenLosses(-weights * values, _ratio_metrics(log_ratio.detach().exp()))


def gspo(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """-w * min(s * A, clip(s, lo, hi) * A) per token, with the sequence ratio s = exp(mean of lp - q over the datum's
    tokens with w != 0), through which the gradient goes (GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7).

    With weights of 1 / (n |y|), `loop.loss_agg=sequence_mean`, it is the paper's mean over n sequences.
    """
    coefficient, log_ratio = _coefficient_and_sequence_log_ratio(batch)
    return _clipped_surrogate(coefficient, log_ratio, batch.inputs["advantages"], config)


def gspo_token(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """`gspo` with the ratio sg(s) * p / sg(p) for each token: the value of the sequence ratio, the gradient of the
    token (eq. 13 and 14). Its gradient is that of `gspo` where w * A is the same for all tokens of a datum."""
    coefficient, log_ratio = _coefficient_and_sequence_log_ratio(batch)
    logprobs = torch.where(coefficient == 0, 0.0, batch.logprobs)
    return _clipped_surrogate(
        coefficient, log_ratio.detach() + logprobs - logprobs.detach(), batch.inputs["advantages"], config
    )


def _clipped_surrogate(
    coefficient: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    config: Mapping[str, float],
    dual_clip: float = 0.0,
) -> TokenLosses:
    """-w * min(r * A, clip(r, lo, hi) * A) with r = exp(log_ratio), and at least dual_clip * A where A is negative and
    `dual_clip` is on."""
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    clip_binds = clipped * advantages < ratio * advantages
    metrics = {**_ratio_metrics(ratio), "clip_fraction:mean": clip_binds.float()}
    if dual_clip:
        dual_clip_binds = (advantages < 0) & (ratio > dual_clip)
        clipped = torch.where(dual_clip_binds, dual_clip, clipped)
        clip_binds = clip_binds | dual_clip_binds
        metrics["dual_clip_fraction:mean"] = dual_clip_binds.float()
    # The unclipped branch sees a ratio of 1 where it is not chosen: an overflowing one would turn its zero gradient
    # into NaN.
    unclipped = torch.where(clip_binds, 0.0, log_ratio).exp()
    return TokenLosses(-coefficient * torch.where(clip_binds, clipped, unclipped), metrics)


def _coefficient_and_log_ratio(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """w * A, and lp - q with 0 in place of positions where w * A is 0."""
    coefficient = batch.inputs["weights"] * batch.inputs["advantages"]
    return coefficient, torch.where(coefficient == 0, 0.0, batch.logprobs - batch.inputs["logprobs"])


def _coefficient_and_sequence_log_ratio(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """w * A, and at each position the mean of lp - q over its datum's positions with w != 0; 0 where w * A is 0."""
    weights = batch.inputs["weights"]
    log_ratio = torch.where(weights == 0, 0.0, batch.logprobs - batch.inputs["logprobs"])
    # A row per datum: unlike scattered additions, sums over rows come out the same every time on CUDA.
    lengths = torch.bincount(batch.segments)
    starts = lengths.cumsum(0) - lengths
    cells = batch.segments, torch.arange(len(batch.segments), device=lengths.device) - starts[batch.segments]
    rows = log_ratio.new_zeros(len(lengths), int(lengths.max()))
    totals = rows.index_put(cells, log_ratio).sum(1)
    counts = rows.index_put(cells, (weights != 0).to(rows.dtype)).sum(1)
    coefficient = weights * batch.inputs["advantages"]
    return coefficient, torch.where(coefficient == 0, 0.0, (totals / counts.clamp(min=1))[batch.segments])


def _ratio_metrics(ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"ratio:mean": ratio, "ratio:max": ratio}
