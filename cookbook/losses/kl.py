"""A policy loss plus a KL penalty towards a reference policy, as a custom loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cookbook.core.clients import CustomLoss
from cookbook.core.types import Datum
from cookbook.losses.base import TokenBatch
from cookbook.losses.builtin import resolve_loss
from cookbook.losses.spec import BuiltinLoss


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(lp - ref)^2 / 2 (Schulman 2020, "Approximating KL divergence"): on-policy, its gradient is that of KL(policy ||
    reference)."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(ref - lp) - 1 - (ref - lp), the penalty of GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 4): on-policy, its
    gradient is that of KL(reference || policy)."""
    gap = ref_logprobs - logprobs
    return gap.expm1() - gap


ESTIMATORS = {"k2": k2, "k3": k3}


def with_kl_penalty(loss: BuiltinLoss, estimator: str, coef: float) -> CustomLoss:
    """`loss` + coef * sum of w * estimator(lp, ref). Datums need `ref_logprobs` besides the inputs of the loss."""
    function, config = resolve_loss(loss.name, loss.config)
    penalty = ESTIMATORS[estimator]

    def penalised(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        lp = torch.cat(list(logprobs))

        def gathered(key: str) -> torch.Tensor:
            return torch.cat([torch.from_numpy(datum.loss_fn_inputs[key]) for datum in data]).to(lp.device)

        inputs = {key: gathered(key) for key in ("logprobs", "advantages", "weights", "ref_logprobs")}
        segments = torch.repeat_interleave(
            torch.arange(len(data)), torch.tensor([len(values) for values in logprobs])
        ).to(lp.device)
        policy = function.compute(TokenBatch(lp, inputs, segments), config).values.sum()
        trained = inputs["weights"] != 0
        divergence = torch.where(trained, inputs["weights"] * penalty(lp, inputs["ref_logprobs"]), 0.0).sum()
        total = policy + coef * divergence
        return total, {"loss:sum": float(total.detach()), "kl_reference:sum": float(divergence.detach())}

    return penalised
