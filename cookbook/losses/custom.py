"""Calls a custom loss, checks what it returns, and differentiates it by the logprobs: the same on every backend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cookbook.core.callables import callable_name, describe_exception
from cookbook.core.clients import CustomLoss
from cookbook.core.errors import BackendError, CookbookError, LossError
from cookbook.core.metrics import with_reduction
from cookbook.core.types import Datum


def differentiate(
    loss_fn: CustomLoss, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradient of a custom loss by the logprobs, and its metrics.

    Args:
        logprobs: per datum the logprobs of its `target_tokens`, in their shape: leaf tensors that require a gradient.

    Returns:
        Per datum dL/dlogprob in the shape of its logprobs, 0 where the loss does not read a logprob; and the loss's
        metrics under `name:reduction`, the loss itself as `loss:sum`.

    Raises:
        LossError: the function raised, returned something else than (scalar tensor, mapping of floats), or its loss
            does not depend on the logprobs. An error of this project's own that it raised passes through.
        BackendError: the loss is not finite.
    """
    owner = f"loss {callable_name(loss_fn)}"
    try:
        returned = loss_fn(data, logprobs)
    except CookbookError:
        raise
    except Exception as error:  # the user's code
        raise LossError(f"{owner} raised {describe_exception(error)}") from error
    loss, metrics = _checked(returned, owner)
    complete = {**with_reduction(metrics, owner), "loss:sum": loss.item()}
    if not math.isfinite(complete["loss:sum"]):
        raise BackendError(
            f"{owner} is {complete['loss:sum']}; nothing was added to the gradient "
            "(look for extreme logprobs, advantages or weights in the data)"
        )
    try:
        slopes = torch.autograd.grad(loss, list(logprobs), allow_unused=True) if loss.requires_grad else ()
    except RuntimeError as error:  # such as a tensor that was changed in place
        raise LossError(f"{owner} cannot be differentiated: {describe_exception(error)}") from error
    if all(slope is None for slope in slopes):
        raise LossError(
            f"{owner} has no gradient: its loss does not depend on the logprobs; compute it from them with torch, "
            "without item(), numpy() or detach()"
        )
    return [
        torch.zeros_like(lp) if slope is None else slope for lp, slope in zip(logprobs, slopes, strict=True)
    ], complete


def measure(loss_fn: CustomLoss, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """The metrics of a custom loss, `loss:sum` among them, at given logprobs. Raises as `differentiate`."""
    leaves = [torch.tensor(values, requires_grad=True) for values in logprobs]
    return differentiate(loss_fn, data, leaves)[1]


def _checked(returned: object, owner: str) -> tuple[torch.Tensor, Mapping[str, float]]:
    match returned:
        case (torch.Tensor() as loss, Mapping() as metrics) if loss.numel() == 1:
            return loss, metrics
    parts = returned if isinstance(returned, tuple) else (returned,)
    found = ", ".join(
        f"a tensor of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
        for part in parts
    )
    raise LossError(f"{owner} returned ({found}); return (loss, metrics): a scalar tensor and a dict of floats")
