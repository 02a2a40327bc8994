"""A loss of one's own over the SDK's two-pass helper, which calls it between the passes, in the order of the operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cookbook.core.clients import CustomLoss
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.losses.custom import differentiate


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
        except Exception as error:  # it belongs to whoever waits
            self._error = error
            slopes = [torch.zeros_like(each) for each in logprobs]
        terms = [(each * slope).sum() for each, slope in zip(logprobs, slopes, strict=True)]
        return torch.stack(terms).sum(), {}

    def output(self, _: Any) -> ForwardBackwardOutput:
        """The loss's own metrics, and the logprobs that it was given.

        Raises:
            CookbookError: see `differentiate`.
        """
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def _run(self, logprobs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in logprobs]
        slopes, metrics = differentiate(self._loss_fn, self._data, leaves)
        outputs = [{"logprobs": np.asarray(leaf.detach().numpy(), np.float32)} for leaf in leaves]
        self._output = ForwardBackwardOutput(outputs, metrics)
        return slopes
