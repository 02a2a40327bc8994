"""What an operation's result looks like on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cookbook.core.errors import CookbookError
from cookbook.core.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse
from cookbook.serve.adapters.tinker.wire import encode_forward_backward, encode_sample
from cookbook.serve.core.errors import NotFound, OperationFailed, ShuttingDown
from cookbook.serve.core.operations import CreateModel, CreateModelFromState, Load, Operation, Save, Snapshot


def encode_protobuf(result: ForwardBackwardOutput | SampleResponse) -> bytes:
    return encode_sample(result) if isinstance(result, SampleResponse) else encode_forward_backward(result)


def result_json(operation: Operation, result: Any) -> dict[str, Any]:
    """The JSON answer. Those of a forward pass and of a sample are for clients without protobuf: the SDK reads none.

    Raises:
        NotFound: it is not from this API.
    """
    match operation:
        case CreateModel():
            return {"type": "create_model", "model_id": result}
        case CreateModelFromState(path):
            return {"type": "load_weights", "path": path, "model_id": result}
        case Load(path):
            return {"type": "load_weights", "path": path}
        case Save(kind=kind):
            return {"type": "save_weights" if kind == "weights" else "save_weights_for_sampler", "path": result}
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
    raise NotFound(f"this is no operation of the tinker API ({type(operation).__name__}); fetch it where it was sent")


def error_json(error: BaseException) -> dict[str, str]:
    """A failed operation. Its category says whose fault it was; the SDK raises both at once and retries neither."""
    user = isinstance(error, CookbookError) and not isinstance(error, OperationFailed | ShuttingDown)
    return {"error": str(error) or type(error).__name__, "category": "user" if user else "server"}


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
