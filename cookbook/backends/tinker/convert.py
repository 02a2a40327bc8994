"""Conversions between our values and those of the SDK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cookbook.backends.stops import StopStrings
from cookbook.core.errors import DataError
from cookbook.core.types import (
    Datum,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    StopReason,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")

_LARGEST_TOKEN = 2**31 - 1
"""Tokens are int32 on the wire."""


def to_datums(types: Any, data: Sequence[Datum], loss_fn: str, weights: bool) -> list[Any]:
    """The SDK's datums. Without `weights` (see `Features`) they hold the `documented_inputs` of `loss_fn`.

    Raises:
        DataError: a token does not fit int32. Checked here, because a failure within the SDK leaves a gap in its
            sequence numbers.
    """
    converted = []
    for index, datum in enumerate(data):
        tokens = datum.model_input.tokens
        if min(tokens) < 0 or max(tokens) > _LARGEST_TOKEN:
            raise DataError(
                f"datum {index}: model_input holds a token outside 0 to {_LARGEST_TOKEN}, which is in no vocabulary"
            )
        inputs = datum.loss_fn_inputs if weights else documented_inputs(datum, loss_fn)
        tensors = {key: types.TensorData.from_numpy(np.ascontiguousarray(array)) for key, array in inputs.items()}
        converted.append(types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=tensors))
    return converted


def documented_inputs(datum: Datum, loss_fn: str) -> dict[str, np.ndarray]:
    """The inputs that Tinker documents: cross_entropy must have weights, the policy losses have none.

    There the weights are multiplied into the advantages: for weights that are not negative, each of those losses is
    linear in its advantages.
    """
    inputs = dict(datum.loss_fn_inputs)
    targets = inputs.get("target_tokens")
    weights = inputs.pop("weights", None)
    if loss_fn == "cross_entropy" and targets is not None:
        ones = np.ones(targets.shape, np.float32)
        return {"target_tokens": targets, "weights": ones if weights is None else weights}
    if weights is not None and "advantages" in inputs:
        inputs["advantages"] = inputs["advantages"] * weights
    return {key: array for key, array in inputs.items() if key in _POLICY_INPUTS}


def from_forward(output: Any) -> ForwardBackwardOutput:
    outputs = [{key: _array(tensor) for key, tensor in datum.items()} for datum in output.loss_fn_outputs]
    return ForwardBackwardOutput(outputs, dict(output.metrics))


def _array(tensor: Any) -> np.ndarray:
    values = np.asarray(tensor.to_numpy(), np.float32)
    return values if tensor.shape is None else values.reshape(tensor.shape)


class Stops:
    """The stops of a completion: the wire takes strings or tokens, not both, and reports neither apart from EOS."""

    def __init__(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase, min_max_tokens: int) -> None:
        self._tokens = [stop for stop in params.stop if isinstance(stop, int)]
        strings = [stop for stop in params.stop if isinstance(stop, str)]
        self._strings = StopStrings(tokenizer, strings) if strings else None
        self._cut_at_strings = bool(self._tokens and strings)
        self._max_tokens = params.max_tokens
        self._eos = tokenizer.eos_token_id
        self.wire_max_tokens = max(params.max_tokens, min_max_tokens)
        self.wire: list[int] | list[str] | None = self._tokens or strings or None

    def sequence(self, sampled: Any) -> SampledSequence:
        """The completion up to its stop. With strings and tokens to stop at, the tokens were sent, and a string cuts
        here."""
        tokens, logprobs = list(sampled.tokens), list(sampled.logprobs or [])
        reason = self._reason(tokens) if sampled.stop_reason == "stop" else "length"
        end = len(tokens)
        if self._cut_at_strings and self._strings is not None:
            end = next((place for place in range(1, len(tokens) + 1) if self._strings.found(tokens[:place])), end)
            reason = self._reason(tokens[:end]) if end < len(tokens) else reason
        if end > self._max_tokens:
            end, reason = self._max_tokens, "length"
        return SampledSequence(tokens[:end], logprobs[:end], reason)

    def _reason(self, tokens: Sequence[int]) -> StopReason:
        """A last token that is neither a requested stop nor the tokenizer's EOS is another EOS of the model."""
        if (
            tokens
            and tokens[-1] != self._eos
            and (tokens[-1] in self._tokens or (self._strings and self._strings.found(tokens)))
        ):
            return "stop"
        return "eos"


def from_sample(
    response: Any, stops: Stops, topk_prompt_logprobs: int, include_prompt_logprobs: bool
) -> SampleResponse:
    return SampleResponse(
        [stops.sequence(sequence) for sequence in response.sequences],
        _first_unknown(response.prompt_logprobs) if include_prompt_logprobs else None,
        response.topk_prompt_logprobs if topk_prompt_logprobs else None,
    )


def _first_unknown(logprobs: Sequence[float | None]) -> list[float | None]:
    """Nothing predicts the first token, so a service's value for it is dropped."""
    return [None, *logprobs[1:]]
