"""The negative log-likelihood."""

from __future__ import annotations

from collections.abc import Mapping

from cookbook.losses.base import TokenBatch, TokenLosses


def cross_entropy(batch: TokenBatch, config: Mapping[str, float]) -> TokenLosses:
    """-w * lp per token. With K soft targets the sum over them; with w the teacher's probabilities, its
    cross-entropy."""
    return TokenLosses(-batch.inputs["weights"] * batch.logprobs)
