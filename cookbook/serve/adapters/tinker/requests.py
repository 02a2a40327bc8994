"""The JSON bodies of the tinker API, and the operations they ask for.

Keys that are unknown here are skipped: a newer SDK sends more. Known ones that ask for what the server cannot do are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from cookbook.core.errors import DataError
from cookbook.core.types import AdamParams, Datum, ModelInput, Role, SamplingParams
from cookbook.serve.adapters.tinker.wire import check_sparse_entries, dense_from_csr, shaped, with_mask
from cookbook.serve.core.errors import InvalidRequest
from cookbook.serve.core.operations import (
    CreateModel,
    CreateModelFromState,
    Forward,
    Load,
    OptimStep,
    Sample,
    Save,
    Snapshot,
)

LORA_ALPHA = 32.0
"""The wire has no LoRA alpha. `user_metadata` of create_model may name another one as `lora_alpha`."""

MAX_RANK, MAX_NUM_SAMPLES = 1024, 1024

SPARSE_LOGPROBS = "sparse_logprobs"
"""In a model's `user_metadata`, "true" says that its client reads no logprobs of a forward_backward but those that the loss reads."""

_B = TypeVar("_B", bound=BaseModel)


def parse(kind: type[_B], body: bytes) -> _B:
    """The body as a `kind`. Raises InvalidRequest with one line about the first thing that is wrong."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequest(f"{where}: {first['msg']}; send what the tinker SDK sends") from error


class Body(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class SessionBody(Body):
    session_id: str


class CreateSessionBody(Body):
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class FinishReason(Body):
    type: str = "finished"


class FinishBody(Body):
    reason: FinishReason = FinishReason()
    detail: str | None = None


class LoraConfig(Body):
    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: str = "adamw"


class CreateModelBody(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()

    def operation(self) -> CreateModel:
        """Raises InvalidRequest."""
        metadata, lora = self.user_metadata or {}, self.lora_config
        if not (lora.train_mlp and lora.train_attn):
            raise InvalidRequest(
                "lora_config: train_mlp=false and train_attn=false are not supported; the adapter is on all linear layers"
            )
        if not 1 <= lora.rank <= MAX_RANK:
            raise InvalidRequest(f"lora_config.rank is {lora.rank}; it must be from 1 to {MAX_RANK}")
        if lora.seed is not None and not 0 <= lora.seed < 2**63:
            raise InvalidRequest(f"lora_config.seed is {lora.seed}; it must be from 0 to 2^63 - 1")
        _check_optimizer(self.optimizer_config)
        flag(metadata, SPARSE_LOGPROBS)
        role: Role = "critic" if _choice(metadata, "role", ("policy", "critic")) == "critic" else "policy"
        rank = None if flag(metadata, "full_parameter") else lora.rank
        return CreateModel(self.base_model, rank, _alpha(metadata), lora.seed, role)


class LoadWeightsBody(Body):
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    @property
    def creates(self) -> bool:
        """Whether a new model is to be made of the checkpoint."""
        return self.session_id is not None

    def operation(self) -> Load | CreateModelFromState:
        """Raises InvalidRequest."""
        if self.weights_access_token is not None:
            raise InvalidRequest(
                "weights_access_token is not supported: a key loads the checkpoints of its own tenant only"
            )
        if self.optimizer_config is not None:
            _check_optimizer(self.optimizer_config)
        flag(self.user_metadata or {}, SPARSE_LOGPROBS)
        return (CreateModelFromState if self.creates else Load)(self.path, self.optimizer)


class AdamBody(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def params(self) -> AdamParams:
        """Raises InvalidRequest: a value would leave weights that are no numbers."""
        for name, value in self:
            if not math.isfinite(value) or value < 0:
                raise InvalidRequest(f"adam_params.{name} is {value}; it must be a number, 0 or more")
        if max(self.beta1, self.beta2) >= 1 or self.eps == 0:
            raise InvalidRequest(
                f"adam_params: beta1={self.beta1}, beta2={self.beta2} must be below 1, and eps={self.eps} above 0"
            )
        return AdamParams(**self.model_dump())


class OptimStepBody(Body):
    model_id: str
    seq_id: int | None = None
    adam_params: AdamBody | None = Field(default=None, validation_alias=AliasChoices("adam_params", "optim_params"))

    def operation(self) -> OptimStep:
        """Raises InvalidRequest."""
        if self.adam_params is None:
            raise InvalidRequest("optim_step without adam_params: this server has AdamW only; use AdamParams")
        return OptimStep(self.adam_params.params())


class SaveBody(Body):
    """Of save_weights and, with the last two, of save_weights_for_sampler."""

    model_id: str
    seq_id: int | None = None
    path: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"

    def state(self) -> Save:
        """Raises InvalidRequest."""
        return Save(self._name(), "weights", self.overwrite, self._ttl_s())

    def sampler(self, sampler_id: str | None) -> Save | Snapshot:
        """A named checkpoint, which replaces one of that name as the wire cannot say otherwise; or the snapshot `sampler_id`.

        Raises InvalidRequest.
        """
        if self.kind != "snapshot":
            raise InvalidRequest(
                f"save_weights_for_sampler with kind={self.kind!r} is not supported; use kind='snapshot'"
            )
        if sampler_id is not None and self.path is None:
            return Snapshot(sampler_id)
        return Save(self._name(), "sampler_weights", True, self._ttl_s())

    def _name(self) -> str:
        if self.path is None:
            raise InvalidRequest("path is missing: give the checkpoint's name")
        return self.path

    def _ttl_s(self) -> float | None:
        if self.ttl_seconds is not None and not self.ttl_seconds > 0:
            raise InvalidRequest(
                f"ttl_seconds is {self.ttl_seconds}; it must be more than 0, or null to keep the checkpoint"
            )
        return self.ttl_seconds


class CreateSamplerBody(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class Prompt(Body):
    chunks: list[Chunk]

    def model_input(self) -> ModelInput:
        """Raises DataError: a chunk that is no text."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if chunk.type != "encoded_text" or chunk.tokens is None:
                raise DataError(
                    f"a chunk of type {chunk.type!r} is not supported; this server takes tokens only, no images or audio"
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
            raise InvalidRequest("sampling_params.max_tokens is missing; say how many tokens at most")
        if self.stop == []:
            raise InvalidRequest(
                "stop=[] asks to go on past the end-of-sequence token, which is not supported; leave stop out"
            )
        if self.stop is not None and "" in [self.stop, *self.stop]:
            raise InvalidRequest("stop holds an empty text; give at least one character")
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
            # The default of tinker-cookbook's recipes, whose user has not heard of this key.
            raise InvalidRequest(
                "record_stability_info is not supported: it is for loss_fn='stable_reinforce', which this server does not have; "
                "choose another, such as loss_fn=importance_sampling"
            )
        for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported by this server; leave it out")
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
                f"loss_fn_inputs[{key!r}] holds a number that {self.dtype} or an index cannot hold"
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
    """For clients without protobuf; the SDK sends the message of `wire`."""

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


class RetrieveBody(Body):
    request_id: str
    allow_metadata_only: bool = False


class ModelBody(Body):
    model_id: str


class PathBody(Body):
    tinker_path: str


class TtlBody(Body):
    ttl_seconds: float | None = None


def flag(metadata: Mapping[str, Any], key: str) -> bool:
    """Whether `user_metadata` says "true". Raises InvalidRequest: it says neither that nor "false"."""
    return _choice(metadata, key, ("false", "true")) == "true"


def _alpha(metadata: Mapping[str, Any]) -> float:
    alpha = metadata.get("lora_alpha", LORA_ALPHA)
    try:
        value = float(alpha)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(f"user_metadata['lora_alpha'] is {alpha!r}; it must be a number above 0")
    return value


def _choice(metadata: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = str(metadata.get(key, choices[0])).lower()
    if value not in choices:
        raise InvalidRequest(f"user_metadata[{key!r}] is {value!r}; it must be {' or '.join(choices)}")
    return value


def _check_optimizer(config: OptimizerConfig) -> None:
    if config.type != "adamw":
        raise InvalidRequest(f"optimizer {config.type!r} is not supported; this server has adamw")
