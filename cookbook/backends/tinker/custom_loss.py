"""Custom losses over the SDK's two-pass helper, which calls the function between the passes, in call order."""

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

    The SDK's client refuses all later operations once a loss function has raised. So this object keeps the error, gives
    the second pass a gradient of zero, and raises the error from `output`.
    """

    def __init__(self, loss_fn: CustomLoss, data: Sequence[Datum]) -> None:
        self._loss_fn, self._data = loss_fn, data
        self._error: Exception | None = None
        self._output: ForwardBackwardOutput | None = None

    def __call__(self, _: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """What the SDK differentiates: a function linear in all logprobs, with the gradient of the loss."""
        try:
            slopes = self._run(logprobs)
        except Exception as error:  # `output` raises it
            self._error = error
            slopes = [torch.zeros_like(each) for each in logprobs]
        terms = [(each * slope).sum() for each, slope in zip(logprobs, slopes, strict=True)]
        return torch.stack(terms).sum(), {}

    def output(self, _: Any) -> ForwardBackwardOutput:
        """The metrics of the loss, and the logprobs that it was given.

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
