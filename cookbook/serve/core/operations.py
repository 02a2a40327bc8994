"""The operations of a session. Values are those of the backend interface; no wire format reaches this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cookbook.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    Role,
    SampleResponse,
    SamplingParams,
)
from cookbook.serve.core.checkpoints import CheckpointKey, CheckpointKind


@dataclass(frozen=True)
class CreateModel:
    """A new LoRA adapter on a base model, or with `rank` None all parameters of it."""

    base_model: str
    rank: int | None
    alpha: float
    seed: int | None
    role: Role = "policy"


@dataclass(frozen=True)
class CreateModelFromState:
    """A new model from a checkpoint."""

    checkpoint: CheckpointKey
    with_optimizer: bool


@dataclass(frozen=True)
class Forward:
    """A loss, with its gradient if `backward`.

    With `every_logprob` the result also has the logprobs that the loss does not read, see `logprobs.run_forward`.
    """

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
    """Save under `name`; an existing checkpoint of that name is an error unless `overwrite`. Its result is the key."""

    name: str
    kind: CheckpointKind
    overwrite: bool = False
    ttl_s: float | None = None


@dataclass(frozen=True)
class Load:
    """Replace the weights, and with `with_optimizer` the optimizer, by those of a checkpoint. Its result is the key."""

    checkpoint: CheckpointKey
    with_optimizer: bool


@dataclass(frozen=True)
class Snapshot:
    """Copy the current weights in memory, as the sampler `sampler_id`. Its result is that id."""

    sampler_id: str


@dataclass(frozen=True)
class Sample:
    """Sample completions of one prompt."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    include_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@dataclass(frozen=True)
class LoadTokenizer:
    """The tokenizer of a base model, which is loaded first if needed; an operation of a session, not of a model."""

    base_model: str


@dataclass(frozen=True)
class Rejected:
    """A request that could not be read. It keeps its place in the order and fails there.

    Refusing it at once would leave a gap in the sequence numbers, and all later operations would wait for it.
    """

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
    """Tokens that operations have processed, by kind of work."""

    prefill: int = 0
    sampled: int = 0
    trained: int = 0


def usage_of(operation: Operation, result: object) -> Usage:
    """The usage of a finished operation; a failed one has none.

    Tokens of a forward pass and of a prompt are prefill; with a backward pass they are trained.
    """
    match operation, result:
        case Forward(data=data, backward=backward), ForwardBackwardOutput():
            tokens = sum(datum.model_input.length for datum in data)
            return Usage(trained=tokens) if backward else Usage(prefill=tokens)
        case Sample(prompt=prompt), SampleResponse(sequences=sequences):
            return Usage(prefill=prompt.length, sampled=sum(len(sequence.tokens) for sequence in sequences))
        case _:
            return Usage()
