"""Preference losses: custom losses over the logprobs of whole completions.

A datum is one prompt and completion. Its `weights` are zero at tokens that are not part of the completion; elsewhere
they all hold the same number, the weight of the example. A loss is the sum over examples of weight * loss, so a mean
over the examples of one `optim_step` is a weight of 1 / n in every one of them, and any split of those examples over
calls gives the same gradient. `weights` is 1 everywhere where a datum has none.

Pairs come interleaved: chosen 0, rejected 0, chosen 1, rejected 1, and so on, equally weighted. Losses with
`needs_reference` read the frozen reference's logprob of each target token from `ref_logprobs`; the others do not.

Notation: pi(y) is the sum over the completion's tokens of their logprobs, ref(y) the reference's, |y| their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.types import Datum
from cookbook.losses.kl import k2

LARGEST_MEAN_LOGPROB = -1e-7
"""The largest mean logprob that ORPO uses: its odds p / (1 - p) are infinite at p = 1, which rounding reaches."""


class CompletionLoss(ABC):
    """A custom loss over whole completions (`cookbook.losses.spec.PreferenceLoss`)."""

    kind: ClassVar[str] = "pairs"
    needs_reference: bool = True
    needs_mismatched: bool = False

    @abstractmethod
    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss and its metrics.

        Raises:
            DataError: a datum lacks an array, its weights differ, or the datums do not come in the order that the loss
                takes.
        """

    def measure(self, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics, `loss:sum` among them, at given logprobs and without a gradient."""
        loss, metrics = self(data, [torch.tensor(values) for values in logprobs])
        return {"loss:sum": float(loss), **metrics}


class DPO(CompletionLoss):
    """-log sigmoid(m) with m = beta * ((pi(chosen) - ref(chosen)) - (pi(rejected) - ref(rejected))) (Rafailov et al.
    2023, arXiv:2305.18290, eq. 7).

    `label_smoothing` e is the share of pairs that are assumed to be labelled the wrong way round: -(1 - e) log
    sigmoid(m) - e log sigmoid(-m) (conservative DPO, Mitchell 2023, "A note on DPO with noisy preferences").

    Raises:
        ConfigError: beta is not above 0, or label_smoothing is not in [0, 0.5).
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        _require(beta > 0, f"loss.beta={beta}: must be above 0")
        _require(0 <= label_smoothing < 0.5, f"loss.label_smoothing={label_smoothing}: must be in [0, 0.5)")
        self.beta, self.label_smoothing = beta, label_smoothing

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        weights = _pair_weights(data, logprobs)
        rewards = self.beta * _per_datum(data, logprobs, minus_reference=True)
        margins = rewards[0::2] - rewards[1::2]
        losses = -(1 - self.label_smoothing) * logsigmoid(margins) - self.label_smoothing * logsigmoid(-margins)
        return (weights * losses).sum(), {**_pair_metrics(rewards), **_reference_metrics(data, logprobs)}


class IPO(CompletionLoss):
    """(h - 1 / (2 beta))^2 with h = (pi(chosen) - ref(chosen)) - (pi(rejected) - ref(rejected)) (Azar et al. 2023,
    arXiv:2310.12036, eq. 17, whose tau is `beta`).

    `average_logprobs` divides pi and ref by |y|, which the paper's equation does not and TRL does.

    Raises:
        ConfigError: beta is not above 0.
    """

    def __init__(self, beta: float = 0.1, average_logprobs: bool = False) -> None:
        _require(beta > 0, f"loss.beta={beta}: must be above 0")
        self.beta, self.average_logprobs = beta, average_logprobs

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        weights = _pair_weights(data, logprobs)
        log_ratios = _per_datum(data, logprobs, minus_reference=True, average=self.average_logprobs)
        losses = (log_ratios[0::2] - log_ratios[1::2] - 1 / (2 * self.beta)).square()
        return (weights * losses).sum(), {**_pair_metrics(self.beta * log_ratios), **_reference_metrics(data, logprobs)}


class SimPO(CompletionLoss):
    """-log sigmoid(beta / |chosen| * pi(chosen) - beta / |rejected| * pi(rejected) - gamma) (Meng et al. 2024,
    arXiv:2405.14734, eq. 6).

    `gamma` is the margin of the rewards themselves, beta included, that a pair should have.

    Raises:
        ConfigError: beta is not above 0, or gamma is negative.
    """

    needs_reference = False

    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        _require(beta > 0, f"loss.beta={beta}: must be above 0")
        _require(gamma >= 0, f"loss.gamma={gamma}: must be 0 or more")
        self.beta, self.gamma = beta, gamma

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        weights = _pair_weights(data, logprobs)
        rewards = self.beta * _per_datum(data, logprobs, average=True)
        losses = -logsigmoid(rewards[0::2] - rewards[1::2] - self.gamma)
        return (weights * losses).sum(), _pair_metrics(rewards)


class ORPO(CompletionLoss):
    """-pi(chosen) / |chosen| - beta * log sigmoid(o(chosen) - o(rejected)) (Hong et al. 2024, arXiv:2403.07691, eq. 6
    and 7, whose lambda is `beta`).

    o(y) = log(p / (1 - p)) with p = exp(pi(y) / |y|); the metrics call it the reward.

    Raises:
        ConfigError: beta is negative.
    """

    needs_reference = False

    def __init__(self, beta: float = 0.1) -> None:
        _require(beta >= 0, f"loss.beta={beta}: must be 0 or more")
        self.beta = beta

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        weights = _pair_weights(data, logprobs)
        means = _per_datum(data, logprobs, average=True)
        below_zero = means.clamp(max=LARGEST_MEAN_LOGPROB)
        log_odds = below_zero - torch.log(-torch.expm1(below_zero))
        nll = -means[0::2]
        losses = nll - self.beta * logsigmoid(log_odds[0::2] - log_odds[1::2])
        return (weights * losses).sum(), {**_pair_metrics(log_odds), "nll_chosen:mean": float(nll.detach().mean())}


class KTO(CompletionLoss):
    """Kahneman-Tversky optimisation of single completions that are desirable or not (Ethayarajh et al. 2024,
    arXiv:2402.01306, eq. 7 and 8). The array `desirable`, filled with 1 or with 0, holds the label.

    With r = pi(y) - ref(y), the loss of a desirable completion is lambda_D * (1 - sigmoid(beta * (r - z0))), that of an
    undesirable one lambda_U * (1 - sigmoid(beta * (z0 - r))); lambda_D and lambda_U are `desirable_weight` and
    `undesirable_weight`; with unequal numbers of both, the paper keeps lambda_D * n_D at 1 to 4/3 of lambda_U * n_U.

    The baseline z0 carries no gradient. With `baseline="mismatched"`, the paper's, it is max(0, mean of r) over datums
    that hold a prompt with another prompt's completion, marked by an array `mismatched` filled with 1; these have no
    loss of their own. Without any, as in a batch of a single prompt, z0 is 0. It is an estimate over one call: give
    the examples of an `optim_step` in one call, which a
    backend may split as it likes. With `baseline="zero"` z0 is 0, there are no such datums, and any split of the
    examples over calls gives the same gradient.

    Raises:
        ConfigError: beta is not above 0, a weight is negative, or the baseline is unknown.
    """

    kind: ClassVar[str] = "labelled"

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        baseline: Literal["mismatched", "zero"] = "mismatched",
    ) -> None:
        _require(beta > 0, f"loss.beta={beta}: must be above 0")
        _require(desirable_weight >= 0, f"loss.desirable_weight={desirable_weight}: must be 0 or more")
        _require(undesirable_weight >= 0, f"loss.undesirable_weight={undesirable_weight}: must be 0 or more")
        _require(baseline in ("mismatched", "zero"), f"loss.baseline={baseline}: must be mismatched or zero")
        self.beta, self.baseline = beta, baseline
        self.needs_mismatched = baseline == "mismatched"
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        labels = [_label(index, datum) for index, datum in enumerate(data)]
        examples = [index for index, label in enumerate(labels) if label is not None]
        if not examples:
            raise DataError("KTO: no datum has an array 'desirable'; every example needs one, filled with 1 or with 0")
        example_data, example_logprobs = [data[i] for i in examples], [logprobs[i] for i in examples]
        log_ratios = _per_datum(example_data, example_logprobs, minus_reference=True)
        z0 = self._baseline(data, logprobs, [index for index, label in enumerate(labels) if label is None])
        desirable = torch.tensor([labels[i] for i in examples], device=log_ratios.device)
        advantages = torch.where(desirable, log_ratios - z0, z0 - log_ratios)
        scale = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        weights = torch.tensor([_example_weight(i, data[i]) for i in examples]).to(log_ratios)
        loss = (weights * scale * torch.sigmoid(-self.beta * advantages)).sum()
        rewards = self.beta * log_ratios.detach()
        metrics = {
            "accuracy:mean": _share_above_zero(advantages),
            "kl_baseline:mean": z0,
            **_reference_metrics(example_data, example_logprobs),
        }
        for name, labelled in (("desirable", desirable), ("undesirable", ~desirable)):
            if labelled.any():
                metrics[f"reward_{name}:mean"] = float(rewards[labelled].mean())
        if desirable.any() and not desirable.all():
            metrics["margin:mean"] = metrics["reward_desirable:mean"] - metrics["reward_undesirable:mean"]
        return loss, metrics

    def _baseline(self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor], mismatched: Sequence[int]) -> float:
        if self.baseline == "zero":
            if mismatched:
                raise DataError(
                    f"KTO: datum {mismatched[0]} is marked 'mismatched', but loss.baseline=zero reads none; remove it"
                )
            return 0.0
        if not mismatched:
            return 0.0
        log_ratios = _per_datum(
            [data[i] for i in mismatched], [logprobs[i].detach() for i in mismatched], minus_reference=True
        )
        return max(0.0, float(log_ratios.mean()))


def _per_datum(
    data: Sequence[Datum], logprobs: Sequence[torch.Tensor], *, minus_reference: bool = False, average: bool = False
) -> torch.Tensor:
    """Per datum the sum (or the average) over its completion of lp, or of lp - ref; shape `[len(data)]`."""
    totals = []
    for index, (datum, lp) in enumerate(zip(data, logprobs, strict=True)):
        values = _completion(index, datum, lp, minus_reference)
        totals.append(values.mean() if average else values.sum())
    return torch.stack(totals)


def _completion(index: int, datum: Datum, lp: torch.Tensor, minus_reference: bool) -> torch.Tensor:
    """lp, or lp - ref, of the completion's tokens alone."""
    where = np.flatnonzero(_weights(datum))
    if not len(where):
        raise DataError(f"datum {index}: its weights are all zero; a completion needs at least one token")
    values = lp[torch.from_numpy(where).to(lp.device)]
    if not minus_reference:
        return values
    if "ref_logprobs" not in datum.loss_fn_inputs:
        raise DataError(
            f"datum {index}: this loss needs loss_fn_inputs 'ref_logprobs', the reference's logprob of each target"
        )
    return values - torch.from_numpy(datum.loss_fn_inputs["ref_logprobs"][where]).to(values)


def _weights(datum: Datum) -> np.ndarray:
    weights = datum.loss_fn_inputs.get("weights")
    return np.ones(datum.model_input.length, np.float32) if weights is None else weights


def _example_weight(index: int, datum: Datum) -> float:
    """The one number that `weights` holds where it is not zero."""
    weights = _weights(datum)
    found = np.unique(weights[weights != 0])
    if not len(found):
        raise DataError(f"datum {index}: its weights are all zero; a completion needs at least one token")
    if len(found) > 1:
        raise DataError(
            f"datum {index}: its weights range from {found[0]:g} to {found[-1]:g}; a preference loss weighs examples, "
            "not tokens, so all that are not 0 must be equal"
        )
    return float(found[0])


def _pair_weights(data: Sequence[Datum], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weight of each pair, shape `[len(data) / 2]`."""
    if not data or len(data) % 2:
        raise DataError(
            f"a loss over pairs was given {len(data)} datums; give an even number: chosen 0, rejected 0, chosen 1, ..."
        )
    weights = [_example_weight(index, datum) for index, datum in enumerate(data)]
    for index, (chosen, rejected) in enumerate(zip(weights[0::2], weights[1::2], strict=True)):
        if chosen != rejected:
            raise DataError(
                f"datums {2 * index} and {2 * index + 1} are a pair with weights {chosen:g} and {rejected:g}; "
                "both must have the same weight"
            )
    return torch.tensor(weights[0::2]).to(like[0])


def _label(index: int, datum: Datum) -> bool | None:
    """Whether an example is desirable; None for a mismatched datum."""
    found = {
        key: np.unique(datum.loss_fn_inputs[key]).tolist()
        for key in ("desirable", "mismatched")
        if key in datum.loss_fn_inputs
    }
    match found:
        case {"desirable": [1.0 | 0.0 as label], **rest} if not rest:
            return label == 1
        case {"mismatched": [1.0], **rest} if not rest:
            return None
    raise DataError(
        f"datum {index}: KTO needs an array 'desirable', filled with 1 or with 0, or 'mismatched', filled with 1; it "
        f"has {' and '.join(f'{key!r} with {values[:3]}' for key, values in found.items()) or 'neither'}"
    )


def _pair_metrics(rewards: torch.Tensor) -> dict[str, float]:
    """Of the rewards of chosen and rejected in turn."""
    chosen, rejected = rewards.detach()[0::2], rewards.detach()[1::2]
    return {
        "reward_chosen:mean": float(chosen.mean()),
        "reward_rejected:mean": float(rejected.mean()),
        "margin:mean": float((chosen - rejected).mean()),
        "accuracy:mean": _share_above_zero(chosen - rejected),
    }


def _share_above_zero(margins: torch.Tensor) -> float:
    """The share of margins above 0. An exact 0, as every margin against a reference is at first, counts as half."""
    return float(torch.heaviside(margins.detach(), torch.tensor(0.5).to(margins)).mean())


def _reference_metrics(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> dict[str, float]:
    """Distance from the reference: the mean of (lp - ref)^2 / 2 over the completions' tokens."""
    gaps = torch.cat(
        [
            _completion(index, datum, lp.detach(), True)
            for index, (datum, lp) in enumerate(zip(data, logprobs, strict=True))
        ]
    )
    return {"kl_reference:mean": float(k2(gaps, torch.zeros_like(gaps)).mean())}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
