"""The protobuf messages against those of the SDK, in both directions."""

import contextlib
import random

import numpy as np
import pytest
import torch

from cookbook.core.errors import CookbookError, DataError
from cookbook.core.types import ForwardBackwardOutput, SampledSequence, SampleResponse
from cookbook.serve.adapters.tinker import wire
from cookbook.serve.core.errors import InvalidRequest
from cookbook.serve.core.operations import Forward

tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed: pip install -e '.[tinker]'")
sdk = pytest.importorskip("tinker.proto.tinker_public_pb2")
request_conv, response_conv = (
    pytest.importorskip("tinker.proto.request_conv"),
    pytest.importorskip("tinker.proto.response_conv"),
)


def request_bytes(*data, loss_fn="cross_entropy", config=None, forward_only=False) -> bytes:
    asked = tinker.types.ForwardBackwardInput(data=list(data), loss_fn=loss_fn, loss_fn_config=config)
    message = request_conv.forward_backward_request_to_proto(
        tinker.types.ForwardBackwardRequest(forward_backward_input=asked, model_id="s:train:0", seq_id=7)
    )
    message.forward_only = forward_only
    return message.SerializeToString()


def datum(tokens, **inputs):
    return tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def read(body: bytes) -> Forward:
    return wire.forward_operation(wire.parse_forward_backward(body))


def test_reads_dense_datums_and_settings() -> None:
    body = request_bytes(
        datum([1, 2, 3], target_tokens=[2, 3, 4], logprobs=[-0.5, -1.0, 0.0], advantages=[0.0, 1.5, -2.0]),
        datum([9], target_tokens=[8], logprobs=[-3.0], advantages=[1.0]),
        loss_fn="ppo",
        config={"clip_low_threshold": 0.9},
    )
    message = wire.parse_forward_backward(body)
    assert (message.model_id, message.seq_id) == ("s:train:0", 7)
    forward = wire.forward_operation(message)
    assert (forward.loss_fn, forward.loss_fn_config, forward.backward) == ("ppo", {"clip_low_threshold": 0.9}, True)
    assert [d.model_input.tokens for d in forward.data] == [(1, 2, 3), (9,)]
    np.testing.assert_array_equal(forward.data[0].loss_fn_inputs["target_tokens"], [2, 3, 4])
    np.testing.assert_array_equal(forward.data[0].loss_fn_inputs["advantages"], np.float32([0, 1.5, -2]))
    assert not read(request_bytes(datum([1], target_tokens=[1]), forward_only=True)).backward


def test_reads_settings_of_sdks_that_know_only_numbers() -> None:
    message = sdk.ForwardBackwardRequest.FromString(request_bytes(datum([1], target_tokens=[1]), config={"beta": 0.25}))
    message.loss_fn_config_v2.clear()
    assert read(message.SerializeToString()).loss_fn_config == {"beta": 0.25}


def test_sparse_tensors_are_the_dense_ones_they_came_from() -> None:
    targets = torch.zeros(40, 20, dtype=torch.int64)
    weights = torch.zeros(40, 20)
    targets[3, 5], targets[3, 0], targets[39, 19] = 17, 4, 9
    weights[3, 5], weights[39, 19] = 0.25, -1.0
    sent = datum(list(range(40)), target_tokens=targets, weights=weights)
    assert sent.loss_fn_inputs["weights"].sparse_crow_indices is not None, "the SDK sends these sparse"
    inputs = read(request_bytes(sent)).data[0].loss_fn_inputs
    np.testing.assert_array_equal(inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(inputs["weights"], weights.numpy())


def test_dense_soft_targets_keep_their_shape() -> None:
    targets = np.arange(1, 7).reshape(3, 2)
    inputs = (
        read(request_bytes(datum([1, 2, 3], target_tokens=targets, weights=np.full((3, 2), 0.5, np.float32))))
        .data[0]
        .loss_fn_inputs
    )
    np.testing.assert_array_equal(inputs["target_tokens"], targets)
    assert inputs["weights"].shape == (3, 2)


def test_mask_becomes_a_factor_of_the_weights() -> None:
    mask = np.float32([0, 1, 1])
    with_weights = read(
        request_bytes(datum([1, 2, 3], target_tokens=[1, 2, 3], weights=[2.0, 3.0, 4.0], mask=mask))
    ).data[0]
    np.testing.assert_array_equal(with_weights.loss_fn_inputs["weights"], [0, 3, 4])
    alone = read(request_bytes(datum([1, 2, 3], target_tokens=np.ones((3, 2), np.int64), mask=mask))).data[0]
    np.testing.assert_array_equal(alone.loss_fn_inputs["weights"], [[0, 0], [1, 1], [1, 1]])
    assert "mask" not in alone.loss_fn_inputs


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        (sdk.DTYPE_INT32, np.int32([3, -1]).tobytes(), [3, -1]),
        (sdk.DTYPE_INT64, np.int64([3, -1]).tobytes(), [3, -1]),
        (sdk.DTYPE_FLOAT32, np.float32([0.5, -1]).tobytes(), [0.5, -1]),
        (sdk.DTYPE_BFLOAT16, (np.float32([0.5, -1]).view(np.uint32) >> 16).astype(np.uint16).tobytes(), [0.5, -1]),
    ],
)
def test_reads_every_dtype(dtype: int, data: bytes, expected: list[float]) -> None:
    message = sdk.ForwardBackwardRequest.FromString(request_bytes(datum([1, 2], target_tokens=[1, 2])))
    message.data[0].loss_fn_inputs["weights"].CopyFrom(sdk.Tensor(dense=data, dtype=dtype))
    np.testing.assert_array_equal(read(message.SerializeToString()).data[0].loss_fn_inputs["weights"], expected)


def test_what_is_wrong_with_a_datum_is_said_in_one_line() -> None:
    image = tinker.types.ModelInput(chunks=[tinker.types.ImageChunk(data=b"", format="png")])
    with pytest.raises(DataError, match=r"^datum 1: .*no images or audio$"):
        read(request_bytes(datum([1], target_tokens=[1]), tinker.types.Datum(model_input=image, loss_fn_inputs={})))
    with pytest.raises(DataError, match=r"^datum 0: .*'target_tokens'.* has shape \(2,\)"):
        read(request_bytes(datum([1], target_tokens=[1, 2])))
    with pytest.raises(DataError, match="numbers only"):
        read(request_bytes(datum([1], target_tokens=[1]), config={"loss_id": "abc"}))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.shape.__setitem__(0, 3),
        lambda tensor: setattr(tensor.sparse_csr, "crow_indices", np.int64([0, 2, 1]).tobytes()),
        lambda tensor: setattr(tensor.sparse_csr, "col_indices", np.int64([-1]).tobytes()),
        lambda tensor: setattr(tensor.sparse_csr, "col_indices", np.int64([4]).tobytes()),
        lambda tensor: setattr(tensor.sparse_csr, "crow_indices", b""),
        lambda tensor: setattr(tensor, "dtype", 0),
        lambda tensor: tensor.shape.__setitem__(1, 2**60),
    ],
)
def test_inconsistent_sparse_tensors_are_refused_before_they_take_memory(change) -> None:
    message = sdk.ForwardBackwardRequest.FromString(request_bytes(datum([1, 2], target_tokens=[1, 2])))
    csr = sdk.SparseCsr(
        values=np.float32([1]).tobytes(),
        crow_indices=np.int64([0, 1, 1]).tobytes(),
        col_indices=np.int64([0]).tobytes(),
    )
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.CopyFrom(sdk.Tensor(sparse_csr=csr, dtype=sdk.DTYPE_FLOAT32, shape=[2, 4]))
    change(tensor)
    with pytest.raises(DataError, match=r"^datum 0: |once dense"):
        read(message.SerializeToString())


def test_bytes_that_are_no_message_are_refused() -> None:
    body = request_bytes(datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, 1.0]))
    with pytest.raises(InvalidRequest, match="not a ForwardBackwardRequest protobuf"):
        read(b"\xff" * 20)
    with pytest.raises(InvalidRequest, match="no model_id"):
        read(b"")
    generator = random.Random(0)
    for _ in range(2000):
        broken = bytearray(body[: generator.randrange(1, len(body) + 1)])
        for _ in range(generator.randrange(3)):
            broken[generator.randrange(len(broken))] = generator.randrange(256)
        with contextlib.suppress(CookbookError):  # and nothing else
            read(bytes(broken))


def test_the_sdk_reads_our_forward_backward_output() -> None:
    outputs = [
        {"logprobs": np.float32([-1, -2, -3])},
        {"logprobs": np.float32([-4])},
        {"logprobs": np.float32([[-1, -2], [-3, -4], [-5, -6]])},
        {"logprobs": np.float32([-7, -8])},
    ]
    metrics = {"loss:sum": 12.5, "clip:mean": 0.0}
    got = response_conv.deserialize_forward_backward_output(
        wire.encode_forward_backward(ForwardBackwardOutput(outputs, metrics))
    )
    assert got.metrics == metrics
    assert [datum["logprobs"].shape for datum in got.loss_fn_outputs] == [[3], [1], [3, 2], [2]]
    for mine, theirs in zip(outputs, got.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(theirs["logprobs"].to_numpy(), mine["logprobs"])


def test_the_sdk_reads_our_sample_response() -> None:
    response = SampleResponse(
        [
            SampledSequence([5, 6], [-0.5, -0.25], "length"),
            SampledSequence([7], [-1.0], "eos"),
            SampledSequence([8], [0.0], "stop"),
        ],
        prompt_logprobs=[None, -2.5],
        topk_prompt_logprobs=[None, [(0, -0.5), (4, -1.5)]],
    )
    got = response_conv.deserialize_sample_response(wire.encode_sample(response))
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in got.sequences] == [
        ([5, 6], [-0.5, -0.25], "length"),
        ([7], [-1.0], "stop"),
        ([8], [0.0], "stop"),
    ]
    assert got.prompt_logprobs == [None, -2.5]
    assert got.topk_prompt_logprobs == [None, [(0, -0.5), (4, -1.5)]]
    bare = response_conv.deserialize_sample_response(
        wire.encode_sample(SampleResponse([SampledSequence([1], [-1.0], "eos")]))
    )
    assert bare.prompt_logprobs is None and bare.topk_prompt_logprobs is None
