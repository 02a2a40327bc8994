"""Forward passes with complete logprobs.

A backend does not have to compute logprobs that the loss does not read, so it may return 0.0 where a weight or an
advantage is zero. Some clients expect the logprob of every target token and would read 0.0 as probability 1: a custom
loss in the client, for example, may begin with a forward pass in which all weights are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from cookbook.core.clients import TrainingClient
from cookbook.core.types import Datum, ForwardBackwardOutput, ModelInput
from cookbook.serve.core.operations import Forward

_GATES = ("weights", "advantages")


def run_forward(client: TrainingClient, operation: Forward, logprob_losses: Collection[str]) -> ForwardBackwardOutput:
    """Run the operation. With `every_logprob`, complete the logprobs by one more pass, without gradient, where needed.

    It is needed for a loss in `logprob_losses` whose weights or advantages have zeros. The extra pass comes first: if
    it fails, no gradient has been added. It takes each datum up to the last such zero, and equal beginnings only once:
    for the samples of a prompt, that is the prompt.
    """
    data, config = operation.data, operation.loss_fn_config
    call = client.forward_backward if operation.backward else client.forward
    unread = (
        [_unread(datum) for datum in data] if operation.every_logprob and operation.loss_fn in logprob_losses else []
    )
    if not any(places.any() for places in unread):
        return call(data, operation.loss_fn, config).result()
    beginnings: dict[object, Datum] = {}
    keys: list[object] = []
    for datum, places in zip(data, unread, strict=True):
        key = None
        if places.any():
            length = int(np.argwhere(places)[:, 0].max()) + 1
            tokens, targets = datum.model_input.tokens[:length], datum.loss_fn_inputs["target_tokens"][:length]
            key = (tokens, targets.shape, targets.tobytes())
            if key not in beginnings:
                beginnings[key] = Datum(ModelInput(tokens), {"target_tokens": targets})
        keys.append(key)
    temperature = {key: config[key] for key in ("temperature",) if key in config}
    complete = client.forward([*beginnings.values()], "cross_entropy", temperature).result()
    every = {key: output["logprobs"] for key, output in zip(beginnings, complete.loss_fn_outputs, strict=True)}
    output = call(data, operation.loss_fn, config).result()
    outputs = [
        _completed(computed, every.get(key), places)
        for computed, key, places in zip(output.loss_fn_outputs, keys, unread, strict=True)
    ]
    return dataclasses.replace(output, loss_fn_outputs=outputs)


def _completed(
    computed: Mapping[str, np.ndarray], every: np.ndarray | None, places: np.ndarray
) -> Mapping[str, np.ndarray]:
    if every is None:
        return computed
    logprobs = computed["logprobs"].copy()
    beginning = logprobs[: len(every)]
    beginning[:] = np.where(places[: len(every)] & (beginning == 0.0), every, beginning)
    return {**computed, "logprobs": logprobs}


def _unread(datum: Datum) -> np.ndarray:
    """Where the loss may not read the logprob. Nowhere in a malformed datum: the loss itself reports that."""
    targets = datum.loss_fn_inputs.get("target_tokens", np.zeros(0))
    gates = [datum.loss_fn_inputs[key] == 0 for key in _GATES if key in datum.loss_fn_inputs]
    places = np.zeros(targets.shape, bool)
    for zero in gates:
        if zero.shape == targets.shape:
            places |= zero
    return places
