"""A loss of one's own over the SDK's two-pass helper, which calls it between the passes, in the order of the operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cookbook.core.clients import CustomLoss
from cookbook.core.errors import BackendError, DataError
from cookbook.core.types import Datum, ForwardBackwardOutput


class CustomLossCall:
    """One call of a custom loss.

    The SDK's client accepts nothing more once a loss function has raised, so this one does not: it notes the error, lets the second pass
    carry a gradient of zero, and raises it from `output`.
    """

    def __init__(self, loss_fn: CustomLoss, data: Sequence[Datum]) -> None:
        self._loss_fn, self._data = loss_fn, data
        self._error: Exception | None = None
        self._output: ForwardBackwardOutput | None = None

    def __call__(self, _: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """What the SDK differentiates: linear in the logprobs, with the gradient of the loss. Every logprob has one, if only of zero."""
        try:
            slopes = self._run(logprobs)
        except Exception as error:  # the user's code; it belongs to whoever waits
            self._error = error
            slopes = [torch.zeros_like(each) for each in logprobs]
        terms = [(each * slope).sum() for each, slope in zip(logprobs, slopes, strict=True)]
        return torch.stack(terms).sum(), {}

    def output(self, _: Any) -> ForwardBackwardOutput:
        """The loss's own metrics, and the logprobs that it was given.

        Raises:
            Exception: what the loss function raised.
        """
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def _run(self, logprobs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in logprobs]
        loss, metrics = self._loss_fn(self._data, leaves)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise DataError("forward_backward_custom: the loss function must return (scalar tensor, metrics)")
        if not math.isfinite(loss.item()):
            raise BackendError(
                f"loss 'custom' is {loss.item()}; nothing was added to the gradient (look for extreme logprobs, advantages or weights)"
            )
        slopes: Sequence[torch.Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        outputs = [{"logprobs": np.asarray(leaf.detach().numpy(), np.float32)} for leaf in leaves]
        self._output = ForwardBackwardOutput(outputs, {**metrics, "loss:sum": loss.item()})
        return slopes
