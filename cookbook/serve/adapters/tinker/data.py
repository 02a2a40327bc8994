"""The JSON bodies of the tinker API that carry tokens and tensors, and the operations that they request."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from cookbook.core.errors import DataError
from cookbook.core.types import Datum, ModelInput, SamplingParams
from cookbook.serve.adapters.tinker.requests import Body
from cookbook.serve.adapters.tinker.wire import check_sparse_entries, dense_from_csr, shaped, with_mask
from cookbook.serve.core.errors import InvalidRequest
from cookbook.serve.core.operations import Forward, Sample

MAX_NUM_SAMPLES = 1024


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(Body):
    chunks: list[Chunk]

    def model_input(self) -> ModelInput:
        """Raises DataError: a chunk is not text."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if chunk.type != "encoded_text" or chunk.tokens is None:
                raise DataError(
                    f"a chunk of type {chunk.type!r} is not supported; "
                    "this server takes tokens only, no images or audio"
                )
            tokens += chunk.tokens
        return ModelInput(tuple(tokens))


class SamplingParamsBody(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def params(self) -> SamplingParams:
        """Raises DataError, InvalidRequest."""
        if self.max_tokens is None:
            raise InvalidRequest("sampling_params.max_tokens is missing; set the maximum number of tokens")
        if self.stop == []:
            raise InvalidRequest(
                "stop=[] means sampling past the end-of-sequence token, which is not supported; remove stop"
            )
        if self.stop is not None and "" in [self.stop, *self.stop]:
            raise InvalidRequest("stop has an empty text; use at least one character")
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k, stop, self.seed)


class SampleBody(Body):
    sampling_session_id: str
    seq_id: int | None = None
    num_samples: int = 1
    prompt: Prompt
    sampling_params: SamplingParamsBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def operation(self) -> Sample:
        """Raises DataError, InvalidRequest."""
        if self.record_stability_info:
            # The default of tinker-cookbook's recipes, so the user may not know this key: the message names the loss.
            raise InvalidRequest(
                "record_stability_info is not supported: it is for loss_fn='stable_reinforce', which this server "
                "does not have; use another loss, such as loss_fn=importance_sampling"
            )
        for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported by this server; remove it")
        if not 1 <= self.num_samples <= MAX_NUM_SAMPLES:
            raise InvalidRequest(f"num_samples is {self.num_samples}; it must be from 1 to {MAX_NUM_SAMPLES}")
        prompt, params = self.prompt.model_input(), self.sampling_params.params()
        return Sample(prompt, self.num_samples, params, bool(self.prompt_logprobs), self.topk_prompt_logprobs)


class TensorBody(Body):
    data: list[float] | list[int]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def array(self, key: str) -> np.ndarray:
        """Raises DataError."""
        try:
            values = np.asarray(self.data, np.int64 if self.dtype == "int64" else np.float32)
            crow, col = (
                np.asarray(indices or [], np.int64) for indices in (self.sparse_crow_indices, self.sparse_col_indices)
            )
        except OverflowError as error:
            raise DataError(
                f"loss_fn_inputs[{key!r}] has a number that does not fit {self.dtype} or an index"
            ) from error
        if self.sparse_crow_indices is None:
            return shaped(key, values, self.shape or [])
        return dense_from_csr(key, self.shape or [], values, crow, col)


class DatumBody(Body):
    model_input: Prompt
    loss_fn_inputs: dict[str, TensorBody]


class ForwardBackwardInput(Body):
    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class ForwardBackwardBody(Body):
    """For clients without protobuf; the SDK sends the protobuf message of `wire`."""

    model_id: str
    seq_id: int | None = None
    forward_backward_input: ForwardBackwardInput
    forward_only: bool = False

    def operation(self) -> Forward:
        """Raises DataError."""
        asked = self.forward_backward_input
        tensors = (tensor for datum in asked.data for tensor in datum.loss_fn_inputs.values())
        check_sparse_entries(tensor.shape or [] for tensor in tensors if tensor.sparse_crow_indices is not None)
        data = []
        for index, datum in enumerate(asked.data):
            try:
                inputs = {key: tensor.array(key) for key, tensor in datum.loss_fn_inputs.items()}
                data.append(Datum(datum.model_input.model_input(), with_mask(inputs)))
            except DataError as error:
                raise DataError(f"datum {index}: {error}") from error
        return Forward(tuple(data), asked.loss_fn, asked.loss_fn_config or {}, backward=not self.forward_only)
