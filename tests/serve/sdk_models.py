"""Data, steps and comparisons for a model trained through the tinker SDK and the same model in this process."""

from __future__ import annotations

import numpy as np
import pytest

from cookbook.core import types as ours

RANK, ALPHA, SEED = 8, 32, 3
ADAM = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
PROMPT = [40, 41, 42, 43, 44]

TARGETS = {"target_tokens": [41, 42, 43, 44], "weights": [0.0, 1.0, 0.5, 2.0]}
POLICY = {
    "target_tokens": [41, 42, 43, 44],
    "logprobs": [0.0, -4.0, -6.0, -3.0],
    "advantages": [0.0, 1.0, -0.5, 0.7],
}


def theirs(inputs: dict, count: int = 2) -> list:
    import tinker

    return [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(PROMPT[:4]), loss_fn_inputs=dict(inputs))
        for _ in range(count)
    ]


def mine(inputs: dict, count: int = 2) -> list[ours.Datum]:
    return [ours.Datum(ours.ModelInput.from_ints(PROMPT[:4]), inputs) for _ in range(count)]


def assert_same(remote, local) -> None:
    """Equal outputs, except logprobs that the loss does not read: the in-process backend returns 0.0 for those."""
    assert remote.metrics == pytest.approx(local.metrics, rel=1e-5, abs=1e-5)
    for got, expected in zip(remote.loss_fn_outputs, local.loss_fn_outputs, strict=True):
        values, computed = got["logprobs"].to_numpy(), expected["logprobs"] != 0.0
        assert values.shape == expected["logprobs"].shape and computed.any()
        np.testing.assert_allclose(values[computed], expected["logprobs"][computed], atol=1e-4)
        assert (values < 0).all(), "the server computes all of them"


def step(pair) -> None:
    """One step of both, so that the LoRA adapters have an effect."""
    import tinker

    remote, local = pair
    remote.forward_backward(theirs(TARGETS), "cross_entropy")
    ending = remote.optim_step(tinker.AdamParams(**ADAM))
    local.forward_backward(mine(TARGETS), "cross_entropy")
    expected = local.optim_step(ours.AdamParams(**ADAM)).result()
    assert ending.result(timeout=60).metrics == pytest.approx(expected.metrics, rel=1e-4)
