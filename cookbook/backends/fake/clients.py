"""The service and the clients of the fake backend.

Operations run when they are called, so a future is always done; errors arrive through the future, as on any backend.
Rank and alpha are recorded in saved states but change nothing: every session trains the whole table.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from cookbook.backends.fake.arguments import check_room, check_tokens, flatten, split, suggest
from cookbook.backends.fake.critic import value_loss
from cookbook.backends.fake.model import (
    LOSSES,
    NextToken,
    TrainedWeights,
    base_logits,
    draw,
    log_softmax,
    logits_gradient,
    target_logprobs,
)
from cookbook.backends.fake.state import SessionSettings, read_state, write_state
from cookbook.backends.fake.tokenizer import build_tokenizer
from cookbook.core.clients import APIFuture, Capabilities, CustomLoss, LossConfig
from cookbook.core.errors import BackendError, CapabilityError, CheckpointError, ConfigError, DataError
from cookbook.core.notices import VANISHING
from cookbook.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    Role,
    SampleResponse,
    SamplingParams,
    SaveResponse,
    TrainableSummary,
    check_soft_targets,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

FAKE_CAPABILITIES = Capabilities(
    losses=frozenset(LOSSES),
    custom_loss=True,
    critic=True,
    full_parameter=True,
    seeds=True,
    loss_temperature=True,
    topk_prompt_logprobs=True,
)


class FakeService:
    """`ServiceClient` of the fake backend. Any `base_model` name is accepted and names its own fixed base weights.

    Args:
        state_dir: where states are saved; None is a temporary folder that `stop()` deletes; then every save warns.
        capabilities: what this service claims, and limits itself to. Reduce them to test a recipe on a lesser backend.
        context_length: the most tokens of a sequence; None is no limit.

    Raises:
        ConfigError: `capabilities` claims something that the fake cannot do.
    """

    def __init__(
        self,
        state_dir: str | None = None,
        capabilities: Capabilities = FAKE_CAPABILITIES,
        context_length: int | None = None,
    ) -> None:
        beyond = sorted(set(capabilities.losses) - set(LOSSES))
        if beyond:
            raise ConfigError(
                f"FakeService: capabilities claim {', '.join(beyond)}, which the fake backend cannot do; remove it"
            )
        self._capabilities = capabilities
        self.context_length = context_length
        self._temporary_dir: tempfile.TemporaryDirectory[str] | None = None
        if state_dir is None:
            self._temporary_dir = tempfile.TemporaryDirectory(prefix="fake-backend-")
            state_dir = self._temporary_dir.name
        self._state_dir = Path(state_dir).absolute()
        self._unseeded_requests = itertools.count()
        self._stopped = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def list_base_models(self) -> list[str]:
        self.check_running("list_base_models")
        return ["fake"]

    def create_lora_training_client(
        self, base_model: str, rank: int | None = 32, alpha: float = 64, seed: int | None = None, role: Role = "policy"
    ) -> FakeTrainingClient:
        self.check_running("create_lora_training_client")
        if rank is None and not self._capabilities.full_parameter:
            raise CapabilityError(
                "create_lora_training_client: this backend has no full-parameter training (rank=None); give a rank"
            )
        if rank is not None and rank < 1:
            raise ConfigError(
                f"create_lora_training_client: rank is {rank}; it must be at least 1, or None to train every weight"
            )
        if role == "critic" and not self._capabilities.critic:
            raise CapabilityError(
                "create_lora_training_client: this backend has no critic; choose an advantage that needs none"
            )
        return FakeTrainingClient(self, SessionSettings(base_model, rank, alpha, seed, role), TrainedWeights())

    def create_training_client_from_state(self, path: str, with_optimizer: bool = False) -> FakeTrainingClient:
        self.check_running("create_training_client_from_state")
        settings, weights = read_state(path, with_optimizer)
        return FakeTrainingClient(self, settings, weights)

    def create_sampling_client(
        self, base_model: str | None = None, model_path: str | None = None
    ) -> FakeSamplingClient:
        self.check_running("create_sampling_client")
        if base_model is not None and model_path is None:
            return FakeSamplingClient(self, base_logits(base_model))
        if model_path is not None and base_model is None:
            settings, weights = read_state(model_path, with_optimizer=False)
            return FakeSamplingClient(self, base_logits(settings.base_model) + weights.table)
        raise ConfigError("create_sampling_client: give exactly one of base_model and model_path")

    def stop(self) -> None:
        self._stopped = True
        if self._temporary_dir is not None:
            self._temporary_dir.cleanup()

    def check_running(self, operation: str) -> None:
        """Raise BackendError after `stop()`."""
        if self._stopped:
            raise BackendError(f"{operation}: this service was stopped; make a new one")

    def next_request(self) -> int:
        """The number of a request without a seed, which serves as its seed, so that a run still replays exactly."""
        return next(self._unseeded_requests)

    def warn_of_temporary_dir(self) -> None:
        """Say once that saves do not outlive this service."""
        if self._temporary_dir is not None:
            warnings.warn(VANISHING.format(self._state_dir), stacklevel=2)

    def state_path(self, kind: str, name: str) -> Path:
        """Where a state of this name is saved. Training states and sampler weights do not share names."""
        if not re.fullmatch(r"\w[\w.\-]*", name):
            raise ConfigError(f"save: name {name!r} is not a plain name; use letters, digits, '_', '-' and '.' only")
        return self._state_dir / kind / name


class FakeTrainingClient:
    """`TrainingClient` of the fake backend. Made by `FakeService`."""

    def __init__(self, service: FakeService, settings: SessionSettings, weights: TrainedWeights) -> None:
        self._service = service
        self._settings = settings
        self._base = base_logits(settings.base_model)
        self._weights = weights
        self._lock = threading.RLock()
        self._stopped = False

    @property
    def trainable(self) -> TrainableSummary:
        """All of the model is trained: one table of logits."""
        return TrainableSummary({"table": self._weights.table.size}, self._weights.table.size)

    @property
    def context_length(self) -> int | None:
        return self._service.context_length

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return build_tokenizer()

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self._submit("forward", lambda: self._run_loss(data, loss_fn, loss_fn_config, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self._submit("forward_backward", lambda: self._run_loss(data, loss_fn, loss_fn_config, backward=True))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        return self._submit("forward_backward_custom", lambda: self._run_custom_loss(data, loss_fn))

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        return self._submit("optim_step", lambda: OptimStepResponse(self._weights.step(adam_params)))

    def save_state(self, name: str) -> APIFuture[SaveResponse]:
        return self._submit("save_state", lambda: self._save("states", name, with_optimizer=True))

    def load_state(self, path: str) -> APIFuture[None]:
        return self._submit("load_state", lambda: self._load(path, with_optimizer=False))

    def load_state_with_optimizer(self, path: str) -> APIFuture[None]:
        return self._submit("load_state_with_optimizer", lambda: self._load(path, with_optimizer=True))

    def save_weights_for_sampler(self, name: str) -> APIFuture[SaveResponse]:
        return self._submit(
            "save_weights_for_sampler", lambda: self._save("sampler_weights", name, with_optimizer=False)
        )

    def save_weights_and_get_sampling_client(self) -> FakeSamplingClient:
        return self._submit(
            "save_weights_and_get_sampling_client", lambda: FakeSamplingClient(self._service, self._logits)
        ).result()

    def stop(self) -> None:
        self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _logits(self) -> np.ndarray:
        return self._base + self._weights.table

    def _submit(self, operation: str, work: Callable[[], T]) -> APIFuture[T]:
        self._service.check_running(operation)
        if self._stopped:
            raise BackendError(f"{operation}: this training client was stopped; create a new one")
        with self._lock:
            return _resolved(work)

    def _run_loss(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None, backward: bool
    ) -> ForwardBackwardOutput:
        if self._settings.role == "critic":
            return value_loss(self._weights, data, loss_fn, loss_fn_config, backward)
        supported = self._service.capabilities.losses
        if loss_fn not in supported:
            raise CapabilityError(f"loss_fn {loss_fn!r} is not built into this backend; {suggest(loss_fn, supported)}")
        loss = LOSSES[loss_fn]
        config = {**loss.config, **({"temperature": 1.0} if self._service.capabilities.loss_temperature else {})}
        for key in loss_fn_config or {}:
            if key not in config:
                raise ConfigError(f"loss_fn_config of {loss_fn!r} has no key {key!r}; {suggest(key, config)}")
        config |= loss_fn_config or {}
        temperature = config.get("temperature", 1.0)
        if not temperature > 0:
            raise ConfigError(f"loss_fn_config of {loss_fn!r}: temperature is {temperature}; it must be above 0")
        check_soft_targets(data, loss_fn, accepted=loss_fn == "cross_entropy")
        previous, inputs = flatten(data, loss_fn, loss.inputs)
        targets = inputs["target_tokens"]
        logits = self._logits
        logprobs = target_logprobs(logits, previous, targets, temperature)
        counted = inputs["weights"] != 0  # a masked position must have no effect, not even by an overflow
        values, slopes = loss.terms(logprobs[counted], {key: array[counted] for key, array in inputs.items()}, config)
        if not np.isfinite(values.sum()):
            raise BackendError(f"loss {loss_fn!r} is {values.sum()}; nothing was added to the gradient")
        if backward:
            self._weights.gradient += logits_gradient(logits, previous[counted], targets[counted], slopes, temperature)
        return ForwardBackwardOutput(split(logprobs, data), {"loss:sum": float(values.sum())})

    def _run_custom_loss(self, data: Sequence[Datum], loss_fn: CustomLoss) -> ForwardBackwardOutput:
        if not self._service.capabilities.custom_loss:
            raise CapabilityError(
                "forward_backward_custom is not available on this backend; "
                f"{suggest('', self._service.capabilities.losses)}"
            )
        # Here, because nothing else in this backend needs torch.
        import torch

        from cookbook.losses.custom import differentiate

        check_soft_targets(data, "custom", accepted=True)
        previous, inputs = flatten(data, "custom", ("target_tokens",))
        targets = inputs["target_tokens"]
        outputs = split(target_logprobs(self._logits, previous, targets), data)
        tensors = [torch.from_numpy(output["logprobs"].copy()).requires_grad_() for output in outputs]
        gradients, metrics = differentiate(loss_fn, data, tensors)
        slopes = np.concatenate([gradient.numpy().ravel() for gradient in gradients]).astype(np.float64)
        self._weights.gradient += logits_gradient(self._logits, previous, targets, slopes)
        return ForwardBackwardOutput(outputs, metrics)

    def _save(self, kind: str, name: str, with_optimizer: bool) -> SaveResponse:
        path = self._service.state_path(kind, name)
        self._weights.check_finite("save")
        self._service.warn_of_temporary_dir()
        write_state(path, self._settings, self._weights, with_optimizer)
        return SaveResponse(str(path))

    def _load(self, path: str, with_optimizer: bool) -> None:
        settings, weights = read_state(path, with_optimizer)
        saved, own = settings.identity, self._settings.identity
        if saved != own:
            raise CheckpointError(
                f"{path}: was saved with {saved}, but this session has {own}; use the same, or "
                "create_training_client_from_state"
            )
        self._weights = weights


class FakeSamplingClient:
    """`SamplingClient` of the fake backend, pinned to one table of logits."""

    def __init__(self, service: FakeService, logits: np.ndarray) -> None:
        self._service = service
        self._logits = logits
        self._logprobs = log_softmax(logits)
        self._next_tokens: dict[tuple[float, float, int], NextToken] = {}

    @property
    def context_length(self) -> int | None:
        return self._service.context_length

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return build_tokenizer()

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        self._service.check_running("sample")
        return _resolved(
            lambda: self._sample(prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs)
        )

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        self._service.check_running("compute_logprobs")
        return _resolved(lambda: self._prompt_logprobs(prompt))

    def _sample(
        self, prompt: ModelInput, num_samples: int, params: SamplingParams, include_logprobs: bool, top_k: int
    ) -> SampleResponse:
        capabilities = self._service.capabilities
        check_tokens(prompt, "prompt")
        if num_samples < 1:
            raise DataError(f"sample: num_samples is {num_samples}; it must be at least 1")
        check_room(prompt, params.max_tokens, self.context_length)
        if "" in params.stop:
            raise DataError("sample: stop holds an empty string, which every text contains; remove it")
        if not capabilities.token_stops and any(isinstance(stop, int) for stop in params.stop):
            raise CapabilityError("sample: stop holds token ids, but this backend takes strings only")
        if top_k > 0 and not capabilities.topk_prompt_logprobs:
            raise CapabilityError("sample: topk_prompt_logprobs is not available on this backend; set it to 0")
        settings = (params.temperature, params.top_p, params.top_k)
        if settings not in self._next_tokens:
            self._next_tokens[settings] = NextToken.from_logits(self._logits, *settings)
        # The leading 0 or 1 keeps seeds and request numbers apart.
        source = (
            (1, self._service.next_request())
            if params.seed is None or not capabilities.seeds
            else (0, params.seed % 2**64)
        )
        generators = [np.random.default_rng((*source, sample)) for sample in range(num_samples)]
        return SampleResponse(
            draw(self._next_tokens[settings], prompt.tokens[-1], generators, params),
            self._prompt_logprobs(prompt) if include_logprobs else None,
            self._top_prompt_logprobs(prompt, top_k) if top_k > 0 else None,
        )

    def _prompt_logprobs(self, prompt: ModelInput) -> list[float | None]:
        check_tokens(prompt, "prompt")
        return [None, *self._logprobs[prompt.tokens[:-1], prompt.tokens[1:]].tolist()]

    def _top_prompt_logprobs(self, prompt: ModelInput, top_k: int) -> list[list[tuple[int, float]] | None]:
        top: list[list[tuple[int, float]] | None] = [None]
        for row in self._logprobs[list(prompt.tokens[:-1])]:
            top.append([(int(token), float(row[token])) for token in np.argsort(-row, kind="stable")[:top_k]])
        return top


def _resolved(work: Callable[[], T]) -> APIFuture[T]:
    """Do the work now; the future holds its result or its error."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return APIFuture(future)
