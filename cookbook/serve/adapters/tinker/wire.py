"""The protobuf messages of the tinker SDK, from a descriptor of this project's own.

The wire has only field numbers and types, so a schema with other names, and without the fields that this server does
not read, is compatible. Fields that the schema does not have (provenance spans) are ignored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from cookbook.core.errors import DataError
from cookbook.core.types import Datum, ForwardBackwardOutput, ModelInput, SampleResponse
from cookbook.serve.core.errors import InvalidRequest
from cookbook.serve.core.operations import Forward

_FieldTypes = descriptor_pb2.FieldDescriptorProto

_SCALARS = {
    "string": _FieldTypes.TYPE_STRING,
    "bytes": _FieldTypes.TYPE_BYTES,
    "bool": _FieldTypes.TYPE_BOOL,
    "double": _FieldTypes.TYPE_DOUBLE,
    "int32": _FieldTypes.TYPE_INT32,
    "uint32": _FieldTypes.TYPE_UINT32,
    "int64": _FieldTypes.TYPE_INT64,
}

# Each field is number, name and type; `*` means repeated. Enums are int32 here, and maps are repeated entries of key
# and value: both are the same on the wire.
_SCHEMA = {
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 5 loss_fn_config NumberEntry*, "
        "6 forward_only bool, 7 loss_fn_config_v2 SettingEntry*"
    ),
    "SettingEntry": "1 key string, 2 value Setting",
    "Setting": "1 number double, 2 text string",
    "NumberEntry": "1 key string, 2 value double",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs TensorEntry*",
    "Chunk": "1 encoded_text EncodedText, 2 image Media, 3 audio Media",
    "EncodedText": "1 tokens bytes",
    "Media": "",
    "TensorEntry": "1 key string, 2 value Tensor",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics NumberEntry*",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedTensorEntry*, 3 num_datums int64",
    "BatchedTensorEntry": "1 key string, 2 value BatchedTensor",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
}

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
_NUMPY = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4"), BFLOAT16: np.dtype("<u2")}

_STOP, _LENGTH = 0, 1

NO_LOGPROB = -99999.0
"""The logprob that, with token 0, fills an empty place in a matrix of top-k tokens."""

MAX_SPARSE_ENTRIES = 2**26
"""The limit for one request, since a few bytes can describe a tensor of any size."""


def _message_classes() -> dict[str, Any]:
    # proto2, because there every field has presence. The bytes are the same as with proto3.
    file = descriptor_pb2.FileDescriptorProto(
        name="cookbook/tinker_wire.proto", package="cookbook_wire", syntax="proto2"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (entry.split() for entry in fields.split(",") if entry.strip()):
            label = _FieldTypes.LABEL_REPEATED if kind.endswith("*") else _FieldTypes.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in _SCALARS:
                message.field.add(name=field, number=int(number), label=label, type=_SCALARS[kind])
            else:
                type_name = f".{file.package}.{kind}"
                message.field.add(
                    name=field, number=int(number), label=label, type=_FieldTypes.TYPE_MESSAGE, type_name=type_name
                )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{file.package}.{name}") for name in _SCHEMA}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


MESSAGES = _message_classes()


def parse_forward_backward(body: bytes) -> Any:
    """The request's message. Raises InvalidRequest: the body is no such message."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the body is not a ForwardBackwardRequest protobuf ({error}); send what the tinker SDK sends"
        ) from error
    if not message.model_id or not isinstance(message.model_id, str) or message.seq_id < 1:
        raise InvalidRequest(
            "the ForwardBackwardRequest has no model_id or no seq_id; seq_id counts the operations of a model from 1"
        )
    return message


def forward_operation(message: Any) -> Forward:
    """The operation of a request. Raises DataError."""
    return Forward(_data(message), _text(message.loss_fn), _loss_config(message), backward=not message.forward_only)


def _loss_config(message: Any) -> dict[str, float]:
    if not message.loss_fn_config_v2:
        return {_text(entry.key): entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        if entry.value.HasField("text"):
            raise DataError(
                f"loss_fn_config[{entry.key!r}] is the text {entry.value.text[:80]!r}; "
                "the losses of this server take numbers only"
            )
    return {_text(entry.key): entry.value.number for entry in message.loss_fn_config_v2}


def _text(value: str | bytes) -> str:
    """A string of a message; proto2 gives bytes if it is not valid UTF-8. Raises DataError."""
    if isinstance(value, bytes):
        raise DataError(f"the message has the text {value[:80]!r}, which is not UTF-8; send what the tinker SDK sends")
    return value


def _data(message: Any) -> tuple[Datum, ...]:
    check_sparse_entries(
        entry.value.shape
        for datum in message.data
        for entry in datum.loss_fn_inputs
        if entry.value.HasField("sparse_csr")
    )
    data = []
    for index, datum in enumerate(message.data):
        try:
            inputs = {_text(entry.key): _tensor(entry.key, entry.value) for entry in datum.loss_fn_inputs}
            data.append(Datum(_tokens(datum.model_input), with_mask(inputs)))
        except DataError as error:
            raise DataError(f"datum {index}: {error}") from error
    return tuple(data)


def check_sparse_entries(shapes: Iterable[Sequence[int]]) -> None:
    """Check the total size of a request's sparse tensors before any is made dense. Raises DataError."""
    if sum(max(0, math.prod(shape)) for shape in shapes) > MAX_SPARSE_ENTRIES:
        raise DataError(
            f"the sparse tensors have more than {MAX_SPARSE_ENTRIES} entries once dense; send fewer datums at once"
        )


def with_mask(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs with `mask`, which the datums of tinker-cookbook have, multiplied into `weights` (1 if absent)."""
    result = dict(inputs)
    mask = result.pop("mask", None)
    if mask is None:
        return result
    for like in ("weights", "target_tokens"):
        other = result.get(like)
        if other is not None and other.ndim == 2 and mask.shape == other.shape[:1]:
            mask = np.broadcast_to(mask[:, None], other.shape)
    weights = result.get("weights")
    if weights is not None and weights.shape != mask.shape:
        raise DataError(
            f"loss_fn_inputs['mask'] has shape {mask.shape}, but weights has {weights.shape}; they must be equal"
        )
    return {**result, "weights": mask if weights is None else mask * weights}


def dense_from_csr(key: str, shape: Sequence[int], values: np.ndarray, crow: np.ndarray, col: np.ndarray) -> np.ndarray:
    """The `[rows, columns]` array of a compressed-sparse-row tensor; entries not listed are 0. Raises DataError."""
    if len(shape) != 2 or min(shape) < 0:
        raise DataError(
            f"loss_fn_inputs[{key!r}] is sparse with shape {list(shape)}; a sparse tensor needs two dimensions"
        )
    rows, columns = shape
    counts = np.diff(crow)
    consistent = (
        len(crow) == rows + 1 and crow[0] == 0 and crow[-1] == len(values) == len(col) and not (counts < 0).any()
    )
    if not consistent or (len(col) and not 0 <= col.min() <= col.max() < columns):
        raise DataError(
            f"loss_fn_inputs[{key!r}] is sparse with indices that do not fit its shape {list(shape)} "
            f"and {len(values)} values"
        )
    dense = np.zeros((rows, columns), values.dtype)
    dense[np.repeat(np.arange(rows), counts), col] = values
    return dense


def _tokens(chunks: Iterable[Any]) -> ModelInput:
    tokens: list[int] = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            raise DataError(
                "model_input has a chunk that is not text; this server takes tokens only, no images or audio"
            )
        tokens += _numbers("model_input", chunk.encoded_text.tokens, INT32).tolist()
    return ModelInput(tuple(tokens))


def _tensor(key: str, tensor: Any) -> np.ndarray:
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        crow, col = _numbers(key, csr.crow_indices, INT64), _numbers(key, csr.col_indices, INT64)
        return dense_from_csr(key, tensor.shape, _numbers(key, csr.values, tensor.dtype), crow, col)
    return shaped(key, _numbers(key, tensor.dense, tensor.dtype), tensor.shape)


def shaped(key: str, values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The values in that shape; no shape means one dimension. Raises DataError."""
    if not shape:
        return values
    if min(shape) < 0 or math.prod(shape) != values.size:
        raise DataError(f"loss_fn_inputs[{key!r}] has {values.size} values, but its shape is {list(shape)}")
    return values.reshape(tuple(shape))


def _numbers(key: str, data: bytes, dtype: int) -> np.ndarray:
    if dtype not in _NUMPY:
        raise DataError(
            f"{key!r} has the unknown dtype {dtype}; "
            "this server reads float32 (1), int64 (2), int32 (3) and bfloat16 (4)"
        )
    if len(data) % _NUMPY[dtype].itemsize:
        raise DataError(f"{key!r} has {len(data)} bytes, which is not a whole number of values")
    array = np.frombuffer(data, _NUMPY[dtype])
    return (array.astype("<u4") << 16).view("<f4") if dtype == BFLOAT16 else array


def encode_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """ForwardBackwardOutput. Consecutive datums whose arrays end in the same shape share a record."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for metric, value in output.metrics.items():
        message.metrics.add(key=metric, value=value)

    def layout(datum: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
        return {name: array.shape[1:] for name, array in datum.items()}

    for shapes, group in itertools.groupby(output.loss_fn_outputs, layout):
        datums = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(datums))
        for name, trailing_shape in shapes.items():
            parts = [np.ascontiguousarray(datum[name], "<f4").tobytes() for datum in datums]
            offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
            tensor = record.fields.add(key=name).value
            tensor.data, tensor.offsets, tensor.dtype = b"".join(parts), offsets, FLOAT32
            tensor.trailing_shape.extend(trailing_shape)
    return message.SerializeToString()


def encode_sample(response: SampleResponse) -> bytes:
    """SampleResponse. A missing logprob, such as that of the first token, is NaN."""
    message = MESSAGES["SampleResponse"]()
    for sequence in response.sequences:
        message.sequences.add(
            stop_reason=_LENGTH if sequence.stop_reason == "length" else _STOP,
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
    if response.prompt_logprobs is not None:
        logprobs = [np.nan if logprob is None else logprob for logprob in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(logprobs, "<f4").tobytes()
    if response.topk_prompt_logprobs is not None:
        k = max((len(pairs) for pairs in response.topk_prompt_logprobs if pairs), default=0)
        token_ids = np.zeros((len(response.topk_prompt_logprobs), k), "<i4")
        logprobs = np.full(token_ids.shape, NO_LOGPROB, "<f4")
        for row, pairs in enumerate(response.topk_prompt_logprobs):
            for column, (token, logprob) in enumerate(pairs or ()):
                token_ids[row, column], logprobs[row, column] = token, logprob
        topk = message.topk_prompt_logprobs
        topk.token_ids, topk.logprobs, topk.k, topk.length = token_ids.tobytes(), logprobs.tobytes(), k, len(token_ids)
    return message.SerializeToString()
