"""Custom losses on a backend that has only built-in ones: the gradient by the logprobs is sent as weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cookbook.core.clients import APIFuture, CustomLoss, TrainingClient
from cookbook.core.datums import with_inputs
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.losses.custom import differentiate


def forward_backward_two_pass(
    client: TrainingClient, data: Sequence[Datum], loss_fn: CustomLoss
) -> APIFuture[ForwardBackwardOutput]:
    """As `client.forward_backward_custom`, with the built-in cross_entropy alone.

    The first pass fetches the logprobs; autograd gives dL/dlogprob; the second pass is cross_entropy with weights
    -dL/dlogprob, whose gradient is that of L by the chain rule. The first pass is awaited here, the second is not.

    Raises:
        LossError, BackendError: see `cookbook.losses.custom.differentiate`.
    """
    logprobs_only = [
        Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in data
    ]
    forward = client.forward(logprobs_only, "cross_entropy").result()
    logprobs = [torch.from_numpy(outputs["logprobs"].copy()).requires_grad_() for outputs in forward.loss_fn_outputs]
    slopes, metrics = differentiate(loss_fn, data, logprobs)
    weighted = [with_inputs(datum, weights=-slope.numpy()) for datum, slope in zip(logprobs_only, slopes, strict=True)]
    answer = ForwardBackwardOutput(forward.loss_fn_outputs, metrics)
    return client.forward_backward(weighted, "cross_entropy").then(lambda _: answer)
