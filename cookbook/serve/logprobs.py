"""Forward passes whose logprobs are complete.

A backend need not compute what no loss reads, so it may return 0.0 where a weight or an advantage is zero. Clients that expect the logprob
of every target token would take that for certainty: the tinker SDK's custom losses, for one, begin with a forward pass of weights zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from cookbook.backends.base import TrainingClient
from cookbook.backends.types import Datum, ForwardBackwardOutput
from cookbook.serve.operations import Forward

_GATES = ("weights", "advantages")


def run_forward(client: TrainingClient, operation: Forward, logprob_losses: Collection[str]) -> ForwardBackwardOutput:
    """Run the operation. With `every_logprob`, a loss among `logprob_losses` that leaves some out costs one more pass, without gradient.

    That pass comes first: if it fails, no gradient has been added.
    """
    data, config = operation.data, operation.loss_fn_config
    call = client.forward_backward if operation.backward else client.forward
    unread = [_unread(datum) for datum in data] if operation.every_logprob and operation.loss_fn in logprob_losses else []
    if not any(places.any() for places in unread):
        return call(data, operation.loss_fn, config).result()
    targets = [Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in data]
    temperature = {key: config[key] for key in ("temperature",) if key in config}
    complete = client.forward(targets, "cross_entropy", temperature).result()
    output = call(data, operation.loss_fn, config).result()
    outputs = [
        {**computed, "logprobs": np.where(places & (computed["logprobs"] == 0.0), every["logprobs"], computed["logprobs"])}
        for computed, every, places in zip(output.loss_fn_outputs, complete.loss_fn_outputs, unread, strict=True)
    ]
    return dataclasses.replace(output, loss_fn_outputs=outputs)


def _unread(datum: Datum) -> np.ndarray:
    """Where a loss may have no use for the logprob; nowhere in a datum that is malformed, which the loss itself will say."""
    targets = datum.loss_fn_inputs.get("target_tokens", np.zeros(0))
    gates = [datum.loss_fn_inputs[key] == 0 for key in _GATES if key in datum.loss_fn_inputs]
    places = np.zeros(targets.shape, bool)
    for zero in gates:
        if zero.shape == targets.shape:
            places |= zero
    return places
