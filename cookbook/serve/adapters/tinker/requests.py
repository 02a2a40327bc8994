"""The JSON bodies of the tinker API, and the operations that they request; those with tokens and tensors are in `data`.

Unknown keys are ignored, since a newer SDK sends more. Known keys that request an unsupported feature are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from cookbook.core.types import AdamParams, Role
from cookbook.serve.adapters.tinker.paths import parse_path
from cookbook.serve.core.checkpoints import CheckpointKey
from cookbook.serve.core.errors import InvalidRequest
from cookbook.serve.core.operations import CreateModel, CreateModelFromState, Load, OptimStep, Save, Snapshot

LORA_ALPHA = 32.0
"""The default, since the wire has no LoRA alpha. `lora_alpha` in the `user_metadata` of create_model sets another."""

MAX_RANK = 1024

SPARSE_LOGPROBS = "sparse_logprobs"
"""A key of a model's `user_metadata`: "true" if the client reads only the logprobs that the loss reads."""

_B = TypeVar("_B", bound=BaseModel)


def parse(kind: type[_B], body: bytes) -> _B:
    """The body as a `kind`. Raises InvalidRequest with one line about the first error."""
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
                "lora_config: train_mlp=false and train_attn=false are not supported; "
                "this server trains adapters on all linear layers"
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
        """Whether the request creates a new model from the checkpoint."""
        return self.session_id is not None

    def operation(self) -> Load | CreateModelFromState:
        """Raises InvalidRequest, NotFound."""
        if self.weights_access_token is not None:
            raise InvalidRequest(
                "weights_access_token is not supported: a key can load only the checkpoints of its own tenant"
            )
        if self.optimizer_config is not None:
            _check_optimizer(self.optimizer_config)
        flag(self.user_metadata or {}, SPARSE_LOGPROBS)
        return (CreateModelFromState if self.creates else Load)(parse_path(self.path), self.optimizer)


class AdamBody(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def params(self) -> AdamParams:
        """Raises InvalidRequest: a value would make the weights NaN or infinite."""
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
            raise InvalidRequest("optim_step needs adam_params: this server supports AdamW only; use AdamParams")
        return OptimStep(self.adam_params.params())


class SaveBody(Body):
    """The body of save_weights and, with the last two fields, of save_weights_for_sampler."""

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
        """A checkpoint under a name, or the snapshot `sampler_id`.

        The checkpoint replaces one of the same name: this request has no `overwrite` on the wire.

        Raises:
            InvalidRequest: the request is not supported, or has no name.
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
            raise InvalidRequest("path is missing: set it to the name of the checkpoint")
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

    def source(self) -> str | CheckpointKey:
        """Raises InvalidRequest, NotFound."""
        if self.model_path is not None:
            return parse_path(self.model_path)
        if self.base_model is None:
            raise InvalidRequest("create_sampling_session needs base_model or model_path")
        return self.base_model


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
    """Whether `user_metadata[key]` is "true". Raises InvalidRequest: it is neither "true" nor "false"."""
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
        raise InvalidRequest(f"optimizer {config.type!r} is not supported; use adamw")
