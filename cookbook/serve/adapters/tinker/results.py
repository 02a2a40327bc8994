"""The wire form of results and errors of operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cookbook.core.errors import CookbookError
from cookbook.core.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse
from cookbook.serve.adapters.tinker.paths import format_path
from cookbook.serve.adapters.tinker.wire import encode_forward_backward, encode_sample
from cookbook.serve.core.errors import NotFound, OperationFailed, ServiceError, ShuttingDown
from cookbook.serve.core.operations import CreateModel, CreateModelFromState, Load, Operation, Save, Snapshot


def encode_protobuf(result: ForwardBackwardOutput | SampleResponse) -> bytes:
    return encode_sample(result) if isinstance(result, SampleResponse) else encode_forward_backward(result)


def result_json(operation: Operation, result: Any) -> dict[str, Any]:
    """The result as JSON. For a forward pass or a sample only clients without protobuf ask for it.

    Raises:
        NotFound: the operation does not belong to this API.
    """
    match operation:
        case CreateModel():
            return {"type": "create_model", "model_id": result}
        case CreateModelFromState(key):
            return {"type": "load_weights", "path": format_path(key), "model_id": result}
        case Load(key):
            return {"type": "load_weights", "path": format_path(key)}
        case Save(kind=kind):
            return {
                "type": "save_weights" if kind == "weights" else "save_weights_for_sampler",
                "path": format_path(result),
            }
        case Snapshot():
            return {"type": "save_weights_for_sampler", "sampling_session_id": result}
    match result:
        case OptimStepResponse(metrics):
            return {"type": "optim_step", "metrics": metrics}
        case ForwardBackwardOutput(outputs, metrics):
            arrays = [{name: _tensor_json(array) for name, array in datum.items()} for datum in outputs]
            return {
                "type": "forward_backward",
                "loss_fn_output_type": "ArrayRecord",
                "loss_fn_outputs": arrays,
                "metrics": metrics,
            }
        case SampleResponse():
            return {"type": "sample", **_sample_json(result)}
    raise NotFound(
        f"this is not an operation of the tinker API ({type(operation).__name__}); use the API that it was sent to"
    )


def error_json(error: BaseException) -> dict[str, str]:
    """A failed operation. Its category says whose fault it is; the SDK raises both kinds and retries neither."""
    text = error.text(format_path) if isinstance(error, ServiceError) else str(error)
    user = isinstance(error, CookbookError) and not isinstance(error, OperationFailed | ShuttingDown)
    return {"error": text or type(error).__name__, "category": "user" if user else "server"}


def _tensor_json(array: np.ndarray) -> Mapping[str, Any]:
    return {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}


def _sample_json(response: SampleResponse) -> dict[str, Any]:
    sequences = [
        {"stop_reason": "length" if s.stop_reason == "length" else "stop", "tokens": s.tokens, "logprobs": s.logprobs}
        for s in response.sequences
    ]
    return {
        "sequences": sequences,
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
    }
