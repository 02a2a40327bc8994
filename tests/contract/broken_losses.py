"""Custom losses that must be refused, each with what its error says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cookbook.core.types import Datum

if TYPE_CHECKING:
    import torch

Data = Sequence[Datum]
Logprobs = Sequence["torch.Tensor"]


def total(logprobs: Logprobs) -> Any:
    return -sum(each.sum() for each in logprobs)


def raises(data: Data, logprobs: Logprobs) -> Any:
    return total(logprobs) / data[0].loss_fn_inputs["no such input"]


def returns_the_loss_alone(data: Data, logprobs: Logprobs) -> Any:
    return total(logprobs)


def returns_nothing(data: Data, logprobs: Logprobs) -> Any:
    total(logprobs)


def returns_a_loss_per_datum(data: Data, logprobs: Logprobs) -> Any:
    import torch

    return torch.stack([each.sum() for each in logprobs]), {}


def returns_a_number(data: Data, logprobs: Logprobs) -> Any:
    return total(logprobs).item(), {}


def has_no_gradient(data: Data, logprobs: Logprobs) -> Any:
    return total([each.detach() for each in logprobs]), {}


def depends_on_something_else(data: Data, logprobs: Logprobs) -> Any:
    import torch

    return torch.ones(3, requires_grad=True).sum(), {}


def changes_in_place(data: Data, logprobs: Logprobs) -> Any:
    ratio = logprobs[0].exp()
    loss = ratio.square().sum()
    ratio *= 2
    return loss, {}


def metrics(extra: Mapping[Any, Any]) -> Any:
    def names_its_metrics_wrongly(data: Data, logprobs: Logprobs) -> Any:
        return total(logprobs), extra

    return names_its_metrics_wrongly


BROKEN_LOSSES: list[tuple[Any, str]] = [
    (raises, r"raised KeyError: 'no such input', at .*broken_losses\.py:\d+$"),
    (returns_the_loss_alone, r"returned \(a tensor of shape \(\)\); return \(loss, metrics\)"),
    (returns_nothing, r"returned \(NoneType\)"),
    (returns_a_loss_per_datum, r"returned \(a tensor of shape \(3,\), dict\)"),
    (returns_a_number, r"returned \(float, dict\)"),
    (has_no_gradient, "has no gradient.*detach"),
    (depends_on_something_else, "has no gradient"),
    (changes_in_place, "cannot be differentiated: RuntimeError"),
    (metrics({"kl:policy:mean": 1.0}), "metric 'kl:policy:mean' has no valid name; use 'name'"),
    (metrics({"kl:median": 1.0}), "metric 'kl:median' .*sum, mean, max, min"),
    (metrics({"kl:": 1.0}), "metric 'kl:' has no valid name"),
    (metrics({":mean": 1.0}), "metric ':mean' has no valid name"),
    (metrics({"kl": 1.0, "kl:mean": 2.0}), "'kl:mean' is given twice"),
    (metrics({"kl": "small"}), "metric 'kl' is a str; give a float"),
    (metrics({"kl": np.ones(2)}), "metric 'kl' is a ndarray"),
]
