"""The training and sampling clients of the local backend: they check arguments and put work on the engine's queue."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from cookbook.backends.local.engine import Engine
from cookbook.backends.local.model import BaseModel
from cookbook.backends.local.prompt_logprobs import LogprobRequest
from cookbook.backends.local.sampling import SampleRequest
from cookbook.backends.local.state import SessionInfo, load_session, save_session
from cookbook.backends.local.summary import summarize
from cookbook.backends.local.training import TrainingSession
from cookbook.backends.local.weights import PinnedWeights
from cookbook.core.clients import APIFuture, CustomLoss, LossConfig
from cookbook.core.errors import BackendError, CapabilityError, ConfigError
from cookbook.core.notices import VANISHING
from cookbook.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveResponse,
    TrainableSummary,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

LocalEngine = Engine[SampleRequest | LogprobRequest]

SAMPLER_FOLDER = "sampler"
"""The folder in the state directory for weights of samplers."""


class LocalSamplingClient:
    """Samples from one fixed set of weights. Requests made before any result is asked for are one batch, see
    `Engine`."""

    def __init__(self, engine: LocalEngine, base: BaseModel, pinned: Future[PinnedWeights]) -> None:
        self._engine = engine
        self._base = base
        self._pinned = pinned

    @property
    def context_length(self) -> int:
        """The base model's."""
        return self._base.context_length

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer."""
        return self._base.tokenizer

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """Draw `num_samples` completions of one prompt.

        The future fails with a BackendError for an empty prompt, a token outside the vocabulary, or a prompt that
        leaves less than `max_tokens` of the model's context.
        """
        seed = secrets.randbits(63) if sampling_params.seed is None else sampling_params.seed
        request = SampleRequest(
            self._pinned,
            prompt.tokens,
            num_samples,
            sampling_params,
            seed,
            include_prompt_logprobs,
            topk_prompt_logprobs,
        )
        problem = self._problem(prompt, sampling_params.max_tokens)
        if num_samples < 1:
            problem = f"sample: num_samples is {num_samples}; it must be at least 1"
        if not 0 <= topk_prompt_logprobs <= self._base.vocabulary_size:
            most = self._base.vocabulary_size
            problem = f"sample: topk_prompt_logprobs is {topk_prompt_logprobs}; it must be from 0 (none) to {most}"
        self._hold(request, problem)
        return APIFuture(request.future, on_wait=self._engine.flush)

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The logprob (temperature 1) of each prompt token given those before it; the first is None."""
        request = LogprobRequest(self._pinned, prompt.tokens)
        self._hold(request, self._problem(prompt, 0))
        return APIFuture(request.future, on_wait=self._engine.flush)

    def _hold(self, request: SampleRequest | LogprobRequest, problem: str | None) -> None:
        if problem is None:
            self._engine.hold(request)
        else:
            request.future.set_exception(BackendError(problem))

    def _problem(self, prompt: ModelInput, max_tokens: int) -> str | None:
        base = self._base
        if prompt.length == 0:
            return "the prompt is empty; it needs at least one token, such as the beginning-of-sequence token"
        if min(prompt.tokens) < 0 or max(prompt.tokens) >= base.vocabulary_size:
            wrong = min(prompt.tokens) if min(prompt.tokens) < 0 else max(prompt.tokens)
            return (
                f"the prompt holds token {wrong}, which is outside the vocabulary of {base.name!r}, "
                f"0 to {base.vocabulary_size - 1}"
            )
        if prompt.length + max_tokens > base.context_length:
            return (
                f"the prompt's {prompt.length} tokens and max_tokens {max_tokens} exceed the context of {base.name!r}, "
                f"{base.context_length}{base.context_note}; shorten the prompt or lower max_tokens to "
                f"{max(0, base.context_length - prompt.length)}"
            )
        return None


class LocalTrainingClient:
    """One session: its operations run on the engine in call order. Use it from one thread at a time.

    `vanishing` says that the service deletes `state_dir` when it stops, so that a save warns.
    """

    def __init__(
        self,
        engine: LocalEngine,
        base: BaseModel,
        session: TrainingSession,
        info: SessionInfo,
        state_dir: Path,
        vanishing: bool,
    ) -> None:
        self._engine = engine
        self._base = base
        self._session: TrainingSession | None = session
        self._info = info
        self._state_dir = state_dir
        self._vanishing = vanishing
        self._trainable = summarize(base.model, session.weights.parameters)

    @property
    def trainable(self) -> TrainableSummary:
        """How many parameters are trained, in which kinds of layers."""
        return self._trainable

    @property
    def context_length(self) -> int:
        """The base model's."""
        return self._base.context_length

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer."""
        return self._base.tokenizer

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """The loss and logprobs without a gradient. Logprobs of weight zero are 0.0; without weights all are
        computed."""
        return self._submit(lambda session: session.forward(data, loss_fn, loss_fn_config, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward`, and add the gradient of the summed loss to what has accumulated.

        Positions that cannot change the loss (weight zero; advantage zero under a policy loss) are not computed, and
        their logprobs are 0.0. An operation that fails adds nothing.
        """
        return self._submit(lambda session: session.forward(data, loss_fn, loss_fn_config, backward=True))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward` with a custom loss, called once, on the engine's thread, with the logprobs of all
        datums."""
        return self._submit(lambda session: session.forward_backward_custom(data, loss_fn))

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """One AdamW step on the accumulated gradient, then clear it."""
        return self._submit(lambda session: session.optim_step(adam_params))

    def save_state(self, name: str) -> APIFuture[SaveResponse]:
        """Save weights and optimizer as the folder `<state_dir>/<name>`, replacing an earlier one.

        The accumulated gradient is not saved.
        """
        return self._save(self._folder(name), with_optimizer=True)

    def save_weights_for_sampler(self, name: str) -> APIFuture[SaveResponse]:
        """Save weights alone as the folder `<state_dir>/sampler/<name>`, in PEFT's format or, full-parameter,
        transformers'."""
        self._check_samples()
        return self._save(self._folder(name, SAMPLER_FOLDER), with_optimizer=False)

    def load_state(self, path: str) -> APIFuture[None]:
        """Load weights, reset the optimizer, and drop the accumulated gradient."""
        return self._submit(lambda session: load_session(Path(path), self._info, session, with_optimizer=False))

    def load_state_with_optimizer(self, path: str) -> APIFuture[None]:
        """Load weights and optimizer, so that training continues exactly; the accumulated gradient is dropped."""
        return self._submit(lambda session: load_session(Path(path), self._info, session, with_optimizer=True))

    def save_weights_and_get_sampling_client(self) -> LocalSamplingClient:
        """A sampler pinned to the weights after all operations enqueued so far; the copy stays in memory."""
        self._check_samples()
        return LocalSamplingClient(self._engine, self._base, self._enqueue(lambda session: session.weights.pin()))

    def _check_samples(self) -> None:
        if self._info.role == "critic":
            raise CapabilityError(
                "a critic predicts values and cannot be sampled from; make the sampler from the policy's client"
            )

    def stop(self) -> None:
        """End the session; its samplers remain usable. Later calls raise BackendError. Idempotent."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _submit(self, operation: Callable[[TrainingSession], T]) -> APIFuture[T]:
        return APIFuture(self._enqueue(operation))

    def _enqueue(self, operation: Callable[[TrainingSession], T]) -> Future[T]:
        session = self._session
        if session is None:
            raise BackendError("this training client was stopped; create a new one from the service")
        return self._engine.submit(lambda: operation(session))

    def _save(self, folder: Path, with_optimizer: bool) -> APIFuture[SaveResponse]:
        if self._vanishing:
            warnings.warn(VANISHING.format(self._state_dir), stacklevel=3)

        def save(session: TrainingSession) -> SaveResponse:
            session.check_finite("save")
            save_session(folder, self._info, session, with_optimizer)
            return SaveResponse(str(folder))

        return self._submit(save)

    def _folder(self, name: str, *parents: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] in ("/", SAMPLER_FOLDER) or ".." in parts:
            raise ConfigError(
                f"save name {name!r} must be a relative path without '..' that does not begin with {SAMPLER_FOLDER!r}"
            )
        return self._state_dir.joinpath(*parents, *parts)
