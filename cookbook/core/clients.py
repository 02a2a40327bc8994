"""The interface of a backend: three clients, a future, and the backend's capabilities.

A loop uses these protocols and nothing else. Names and semantics follow the field (Tinker, SageMaker AI training
sessions):

* every operation returns at once with an `APIFuture`;
* operations of one `TrainingClient` run in call order, samples are unordered and concurrent;
* gradients accumulate until `optim_step`;
* a `SamplingClient` is pinned to the weights that existed when it was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

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
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
U = TypeVar("U")

LossConfig = Mapping[str, float]

CustomLoss = Callable[[Sequence[Datum], "Sequence[torch.Tensor]"], "tuple[torch.Tensor, dict[str, float]]"]
"""A custom loss: from the datums and, per datum, its logprobs of `target_tokens` (of their shape, with gradient)
to the scalar to minimise (a sum, not a mean) and metrics, named as `cookbook.core.metrics` says."""


class APIFuture(Generic[T]):
    """The pending result of an operation: `result(timeout)` in synchronous code, `await` in asynchronous code.

    `on_wait` is called when the result is first asked for; a backend that batches lazily starts its work there.
    Under `await` the call is delayed until the tasks that are ready have run, so that requests made in the same turn
    of the event loop are seen together.
    """

    def __init__(self, future: Future[T], on_wait: Callable[[], None] | None = None) -> None:
        self._future = future
        self._on_wait = on_wait

    def result(self, timeout: float | None = None) -> T:
        """Block until the operation is done. Raises its error, or TimeoutError after `timeout` seconds."""
        if self._on_wait is not None:
            self._on_wait()
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    def then(self, transform: Callable[[T], U]) -> APIFuture[U]:
        """A future of `transform(result)`. An error, of the operation or of `transform`, passes through."""
        transformed: Future[U] = Future()
        transformed.set_running_or_notify_cancel()  # whoever awaits it cannot cancel it, so that it can always be set

        def settle(done: Future[T]) -> None:
            try:
                transformed.set_result(transform(done.result()))
            except BaseException as error:  # any error is for those who wait
                transformed.set_exception(error)

        self._future.add_done_callback(settle)
        return APIFuture(transformed, self._on_wait)

    def __await__(self) -> Generator[Any, None, T]:
        if self._on_wait is not None:
            asyncio.get_running_loop().call_soon(self._on_wait)
        return asyncio.wrap_future(self._future).__await__()


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. A recipe is checked against it before anything is provisioned."""

    losses: frozenset[str]
    """Built-in loss functions."""
    custom_loss: bool = False
    """`forward_backward_custom` is available."""
    critic: bool = False
    """`create_lora_training_client(role="critic")` is available."""
    full_parameter: bool = False
    """`rank=None` trains every weight."""
    seeds: bool = False
    """`SamplingParams.seed` is honoured: the same request gives the same tokens."""
    loss_temperature: bool = False
    """Losses take a `temperature` config, so that training logprobs are those of the sampling distribution."""
    min_max_tokens: int = 1
    """The smallest `max_tokens` that the service accepts; the adapter cuts off what the caller did not ask for."""
    token_stops: bool = True
    """`SamplingParams.stop` may hold token ids; False: strings only."""
    topk_prompt_logprobs: bool = False


class SamplingClient(Protocol):
    """Samples from one fixed set of weights."""

    @property
    def context_length(self) -> int | None:
        """The most tokens that a prompt and its completion may have together; None where the service does not say."""
        ...

    def get_tokenizer(self) -> PreTrainedTokenizerBase: ...

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """Draw `num_samples` completions of one prompt."""
        ...

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The logprob (temperature 1) of each prompt token given those before it; the first is None."""
        ...


class TrainingClient(Protocol):
    """One set of trainable weights and its optimizer. A context manager that stops itself."""

    @property
    def trainable(self) -> TrainableSummary | None:
        """What is trained; None where the service does not say."""
        ...

    @property
    def context_length(self) -> int | None:
        """The most tokens that a sequence may have; None where the service does not say."""
        ...

    def get_tokenizer(self) -> PreTrainedTokenizerBase: ...

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """The loss and logprobs without a gradient."""
        ...

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward`, and add the gradient of the summed loss to what has accumulated."""
        ...

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward` with a custom loss over the logprobs of all datums together.

        The future fails with a LossError if the function raises, returns something else or has no gradient.
        """
        ...

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """One AdamW step on the accumulated gradient, then clear it."""
        ...

    def save_state(self, name: str) -> APIFuture[SaveResponse]:
        """Save weights and optimizer under `name`, atomically, replacing an earlier save of that name."""
        ...

    def load_state(self, path: str) -> APIFuture[None]:
        """Load weights and reset the optimizer."""
        ...

    def load_state_with_optimizer(self, path: str) -> APIFuture[None]:
        """Load weights and optimizer, so that training continues exactly."""
        ...

    def save_weights_for_sampler(self, name: str) -> APIFuture[SaveResponse]:
        """Save weights alone under `name`, for `ServiceClient.create_sampling_client(model_path=...)`."""
        ...

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """A sampler pinned to the weights as they are after all operations enqueued so far."""
        ...

    def stop(self) -> None:
        """Release the session. Later calls raise BackendError. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ServiceClient(Protocol):
    """The entry point of a backend."""

    @property
    def capabilities(self) -> Capabilities: ...

    def list_base_models(self) -> list[str]: ...

    def create_lora_training_client(
        self, base_model: str, rank: int | None = 32, alpha: float = 64, seed: int | None = None, role: Role = "policy"
    ) -> TrainingClient:
        """A new training session: a LoRA adapter of `rank` and `alpha` on `base_model`, initialised from `seed`.

        Rank None trains every weight.
        """
        ...

    def create_training_client_from_state(self, path: str, with_optimizer: bool = False) -> TrainingClient:
        """A new training session from a `save_state` path; rank, alpha, role and base model come from the save."""
        ...

    def create_sampling_client(self, base_model: str | None = None, model_path: str | None = None) -> SamplingClient:
        """A sampler of a base model or of saved weights (exactly one of the two)."""
        ...

    def stop(self) -> None:
        """Stop every client made here and release the backend. Idempotent."""
        ...
