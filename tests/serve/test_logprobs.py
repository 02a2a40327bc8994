"""Completing the logprobs that a backend does not compute, with the smallest possible extra pass."""

from collections.abc import Sequence

import numpy as np
import pytest

from cookbook.backends.fake import FakeService, FakeTrainingClient
from cookbook.core.types import Datum, ModelInput
from cookbook.serve.core.logprobs import run_forward
from cookbook.serve.core.operations import Forward

LOSSES = ("cross_entropy", "importance_sampling")


class Sparing:
    """A client that, like the local one, computes no logprob where a weight or an advantage is zero.

    `forwarded` are the tokens of each forward pass.
    """

    def __init__(self) -> None:
        self.client: FakeTrainingClient = FakeService().create_lora_training_client("fake", 4, 32.0, 0)
        self.forwarded: list[int] = []

    def forward(self, data: Sequence[Datum], loss_fn: str, config=None):
        self.forwarded.append(sum(datum.model_input.length for datum in data))
        return self.client.forward(data, loss_fn, config)

    def forward_backward(self, data: Sequence[Datum], loss_fn: str, config=None):
        future = self.client.forward_backward(data, loss_fn, config)
        for datum, output in zip(data, future.result().loss_fn_outputs, strict=True):
            for gate in ("weights", "advantages"):
                if gate in datum.loss_fn_inputs:
                    output["logprobs"][datum.loss_fn_inputs[gate] == 0] = 0.0
        return future


def rollout(prompt: list[int], tokens: list[int], advantage: float) -> Datum:
    before = len(prompt) - 1
    inputs = {
        "target_tokens": np.array([*prompt[1:], *tokens]),
        "logprobs": np.array([0.0] * before + [-3.0] * len(tokens), np.float32),
        "advantages": np.array([0.0] * before + [advantage] * len(tokens), np.float32),
    }
    return Datum(ModelInput.from_ints([*prompt, *tokens[:-1]]), inputs)


def expected(data: Sequence[Datum]) -> list[np.ndarray]:
    plain = [Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in data]
    output = FakeService().create_lora_training_client("fake", 4, 32.0, 0).forward(plain, "cross_entropy").result()
    return [datum["logprobs"] for datum in output.loss_fn_outputs]


def test_the_samples_of_a_prompt_cost_one_pass_over_the_prompt() -> None:
    first, second = [5, 6, 7, 8], [9, 10, 11]
    data = (
        rollout(first, [20, 21], 1.0),
        rollout(first, [22, 23, 24], -1.0),
        rollout(second, [25, 26], 0.5),
        rollout([5], [7, 8], 1.0),
    )
    client = Sparing()
    output = run_forward(client, Forward(data, "importance_sampling", {}, backward=True, every_logprob=True), LOSSES)
    for got, every in zip(output.loss_fn_outputs, expected(data), strict=True):
        np.testing.assert_allclose(got["logprobs"], every, rtol=1e-6)
    assert client.forwarded == [3 + 2]


@pytest.mark.parametrize("weights", [[1, 0, 1, 0], [0, 0, 0, 0], [[0, 1], [1, 0], [1, 1], [1, 1]]])
def test_wherever_the_zeros_are(weights: list) -> None:
    weights_array = np.array(weights, np.float32)
    targets = np.array([6, 7, 8, 9]) if weights_array.ndim == 1 else np.array([[6, 7], [7, 8], [8, 9], [9, 10]])
    data = (Datum(ModelInput.from_ints([5, 6, 7, 8]), {"target_tokens": targets, "weights": weights_array}),)
    client = Sparing()
    output = run_forward(client, Forward(data, "cross_entropy", {}, backward=True, every_logprob=True), LOSSES)
    plain = Datum(data[0].model_input, {"target_tokens": targets, "weights": np.ones_like(weights_array)})
    every = FakeService().create_lora_training_client("fake", 4, 32.0, 0).forward([plain], "cross_entropy").result()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"], every.loss_fn_outputs[0]["logprobs"], rtol=1e-6)
