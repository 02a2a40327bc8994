"""What can be asked of a session. Values are those of the backend seam; no wire format reaches this far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cookbook.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    Role,
    SampleResponse,
    SamplingParams,
)

CheckpointKind = Literal["weights", "sampler_weights"]
"""`weights` hold the optimizer too and can be trained on; `sampler_weights` can only be sampled from."""


@dataclass(frozen=True)
class CreateModel:
    """A new adapter on a base model."""

    base_model: str
    rank: int | None
    alpha: float
    seed: int | None
    role: Role = "policy"


@dataclass(frozen=True)
class CreateModelFromState:
    """A new adapter from a checkpoint's `tinker://` path."""

    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class Forward:
    """A loss, with its gradient if `backward`. With `every_logprob` also the logprobs that the loss does not read, see `logprobs`."""

    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float]
    backward: bool
    every_logprob: bool = False


@dataclass(frozen=True)
class OptimStep:
    params: AdamParams


@dataclass(frozen=True)
class Save:
    """Save under `name`; an existing checkpoint of that name is an error unless `overwrite`. Its result is the `tinker://` path."""

    name: str
    kind: CheckpointKind
    overwrite: bool = False
    ttl_s: float | None = None


@dataclass(frozen=True)
class Load:
    """Replace the weights, and with `with_optimizer` the optimizer, by those of a checkpoint."""

    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class Snapshot:
    """Pin the weights as they are in memory, as the sampler `sampler_id`, which is the result."""

    sampler_id: str


@dataclass(frozen=True)
class Sample:
    """Draw completions of one prompt from a sampler."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    include_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@dataclass(frozen=True)
class LoadTokenizer:
    """The tokenizer of a base model, which is loaded if it was not; an operation of a session, not of a model."""

    base_model: str


@dataclass(frozen=True)
class Rejected:
    """A request that could not be read. It takes its place in the order all the same, and fails there: a number that was merely refused
    would leave a gap that all later operations wait for."""

    reason: str


Operation = (
    CreateModel
    | CreateModelFromState
    | Forward
    | OptimStep
    | Save
    | Load
    | Snapshot
    | Sample
    | LoadTokenizer
    | Rejected
)


@dataclass(frozen=True)
class Usage:
    """Tokens that an operation is billed for."""

    prefill: int = 0
    sampled: int = 0
    trained: int = 0


def usage_of(operation: Operation, result: object) -> Usage:
    """A forward pass over data or a prompt is prefill; with a backward pass the data are trained on. A failed operation is free."""
    match operation, result:
        case Forward(data=data, backward=backward), ForwardBackwardOutput():
            tokens = sum(datum.model_input.length for datum in data)
            return Usage(trained=tokens) if backward else Usage(prefill=tokens)
        case Sample(prompt=prompt), SampleResponse(sequences=sequences):
            return Usage(prefill=prompt.length, sampled=sum(len(sequence.tokens) for sequence in sequences))
        case _:
            return Usage()
