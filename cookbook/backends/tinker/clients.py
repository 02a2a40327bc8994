"""The training and sampling clients of the tinker backend, over those of the SDK."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cookbook.backends.tinker.calls import Calls, failure, settled
from cookbook.backends.tinker.connection import Features
from cookbook.backends.tinker.convert import Stops, from_forward, from_sample, to_datums
from cookbook.backends.tinker.tokenizers import Tokenizers, context_length
from cookbook.core.clients import APIFuture, CustomLoss, LossConfig
from cookbook.core.errors import BackendError, CapabilityError, CookbookError
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
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

LoadTokenizers = Callable[[], Tokenizers]


class TinkerSamplingClient:
    """Samples from one fixed set of weights. Each request is sent by itself; the service decides what it runs together.

    Args:
        types: the SDK's module of types.
        sampler: the SDK's client, once the weights exist.
    """

    def __init__(
        self, calls: Calls, features: Features, types: Any, sampler: Future[Any], load_tokenizers: LoadTokenizers
    ) -> None:
        self._calls, self._features, self._types = calls, features, types
        self._sampler, self._load_tokenizers = sampler, load_tokenizers

    @property
    def context_length(self) -> int | None:
        """The tokenizer's `model_max_length`, where it has one."""
        return context_length(self._load_tokenizers())

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer."""
        self._calls.check_open()
        return self._load_tokenizers().callers

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """Draw `num_samples` completions of one prompt."""
        stops = Stops(sampling_params, self._load_tokenizers().background, self._features.capabilities.min_max_tokens)
        params = self._types.SamplingParams(
            max_tokens=stops.wire_max_tokens,
            seed=sampling_params.seed,
            stop=stops.wire,
            temperature=sampling_params.temperature,
            top_k=sampling_params.top_k,
            top_p=sampling_params.top_p,
        )
        wire_prompt = self._types.ModelInput.from_ints(prompt.to_ints())
        return self._request(
            lambda sampler: sampler.sample(
                wire_prompt, num_samples, params, include_prompt_logprobs, topk_prompt_logprobs
            ),
            lambda response: from_sample(response, stops, topk_prompt_logprobs, include_prompt_logprobs),
        )

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The logprob (temperature 1) of each prompt token given those before it; the first is None."""
        wire_prompt = self._types.ModelInput.from_ints(prompt.to_ints())
        return self._request(
            lambda sampler: sampler.compute_logprobs(wire_prompt), lambda logprobs: [None, *logprobs[1:]]
        )

    def _request(self, submit: Callable[[Any], object], convert: Callable[[Any], T]) -> APIFuture[T]:
        if self._sampler.done() and self._sampler.exception() is None:
            sampler = self._sampler.result()
            return self._calls.call(lambda: submit(sampler), convert)

        async def when_ready() -> T:
            return convert(await settled(submit(await settled(self._sampler))))

        self._calls.check_open()
        return APIFuture(self._calls.start(when_ready()))


class TinkerTrainingClient:
    """One training run of the service. Its operations run in the order of the calls."""

    def __init__(
        self, calls: Calls, features: Features, types: Any, client: Any, role: Role, load_tokenizers: LoadTokenizers
    ) -> None:
        self._calls, self._features, self._types = calls, features, types
        self._client: Any = client
        self._role: Role = role
        self._load_tokenizers = load_tokenizers

    @property
    def trainable(self) -> None:
        """Not told by the service."""
        return None

    @property
    def context_length(self) -> int | None:
        """The tokenizer's `model_max_length`, where it has one."""
        return context_length(self._load_tokenizers())

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer."""
        self._open()
        return self._load_tokenizers().callers

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """The loss and logprobs without a gradient."""
        return self._loss(self._open().forward, data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward`, and add the gradient of the summed loss to what has accumulated."""
        return self._loss(self._open().forward_backward, data, loss_fn, loss_fn_config)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward` with a custom loss: a pass for the logprobs, the loss here, a pass for its gradient."""
        from cookbook.backends.tinker.custom_loss import CustomLossCall  # it needs torch

        client, call = self._open(), CustomLossCall(loss_fn, data)
        inputs = {index: datum.loss_fn_inputs.get("target_tokens") for index, datum in enumerate(data)}

        def submit() -> object:
            for index, targets in inputs.items():
                if targets is None:
                    raise CookbookError(f"datum {index}: forward_backward_custom needs loss_fn_inputs 'target_tokens'")
            bare = [
                Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]}) for datum in data
            ]
            return client.forward_backward_custom(to_datums(self._types, bare, "cross_entropy", weights=False), call)

        return self._calls.call(submit, call.output)

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """One AdamW step on the accumulated gradient, then clear it."""
        adam_params.check()
        client, params = self._open(), self._types.AdamParams(**vars(adam_params))
        return self._calls.call(
            lambda: client.optim_step(params), lambda response: OptimStepResponse(dict(response.metrics or {}))
        )

    def save_state(self, name: str) -> APIFuture[SaveResponse]:
        """Save weights and optimizer under `name`, replacing an earlier save of this run by that name."""
        client = self._open()
        return self._calls.call(
            lambda: client.save_state(name, overwrite=True), lambda response: SaveResponse(response.path)
        )

    def load_state(self, path: str) -> APIFuture[None]:
        """Load weights and reset the optimizer."""
        client = self._open()
        return self._load(lambda: client.load_state(path))

    def load_state_with_optimizer(self, path: str) -> APIFuture[None]:
        """Load weights and optimizer, so that training continues exactly."""
        client = self._open()
        return self._load(lambda: client.load_state_with_optimizer(path))

    def save_weights_for_sampler(self, name: str) -> APIFuture[SaveResponse]:
        """Save weights alone under `name`."""
        client = self._open()
        self._check_samples()
        return self._calls.call(
            lambda: client.save_weights_for_sampler(name), lambda response: SaveResponse(response.path)
        )

    def save_weights_and_get_sampling_client(self) -> TinkerSamplingClient:
        """A sampler pinned to the weights as they are after all operations enqueued so far."""
        client = self._open()
        self._check_samples()
        try:
            sampler = self._calls.start(settled(client.save_weights_and_get_sampling_client()))
        except Exception as error:  # any error of the SDK
            raise failure(error) from error
        return TinkerSamplingClient(self._calls, self._features, self._types, sampler, self._load_tokenizers)

    def stop(self) -> None:
        """Release the run; its samplers remain usable. The service ends it with the session. Idempotent.

        Later calls raise BackendError.
        """
        self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open(self) -> Any:
        self._calls.check_open()
        if self._client is None:
            raise BackendError("this training client was stopped; create a new one from the service")
        return self._client

    def _check_samples(self) -> None:
        if self._role == "critic":
            raise CapabilityError(
                "a critic predicts values and cannot be sampled from; make the sampler from the policy's client"
            )

    def _loss(
        self, method: Callable[..., object], data: Sequence[Datum], loss_fn: str, config: LossConfig | None
    ) -> APIFuture[ForwardBackwardOutput]:
        def submit() -> object:
            datums = to_datums(self._types, data, loss_fn, self._features.weights)
            return method(datums, loss_fn, dict(config) if config else None)

        return self._calls.call(submit, from_forward)

    def _load(self, load: Callable[[], object]) -> APIFuture[None]:
        def submit() -> object:
            # The SDK advises to make a new client from the state; the saves of that one could not replace those of this
            # one.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return load()

        return self._calls.call(submit, lambda _: None)
