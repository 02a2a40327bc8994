"""The harness of the backend contract: a service, identical training clients, data, and comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cookbook.core.clients import SamplingClient, ServiceClient, TrainingClient
from cookbook.core.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SamplingParams,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT = "2 + 3 = "
TEXTS = ("12 + 30 = 42 so the answer is 42", "the cat has 7 hats", "9 - 4 = 5")
MEMORISED = "8140975326"
"""Every digit once, so that no model needs more than the last token to know the next one."""

NewClient = Callable[[], TrainingClient]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def next_token_datum(tokens: Sequence[int], **inputs: Sequence[float] | np.ndarray) -> Datum:
    """A datum that predicts each token of a sequence from those before it."""
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": np.array(tokens[1:]), **{k: np.asarray(v) for k, v in inputs.items()}},
    )


def with_inputs(datum: Datum, **inputs: np.ndarray) -> Datum:
    return Datum(datum.model_input, {**datum.loss_fn_inputs, **inputs})


def logprobs_of(output: ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([datum_output["logprobs"] for datum_output in output.loss_fn_outputs])


def known(values: Sequence[float | None]) -> np.ndarray:
    """Prompt logprobs without the first, which nothing predicts."""
    assert values[0] is None, "the first prompt token has no logprob"
    return np.array([value for value in values[1:] if value is not None])


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=what)


def assert_differ(actual: np.ndarray, other: np.ndarray, tolerance: float, what: str) -> None:
    gap = float(np.abs(actual - other).max())
    assert gap > 10 * tolerance, f"{what}: the largest difference is {gap:.2e}, which is within rounding"


@dataclass(frozen=True)
class Memoriser:
    """A sampler that knows `tokens`, of which the last is EOS, and the loss at each step of learning them."""

    tokens: list[int]
    losses: list[float]
    sampler: SamplingClient

    def recite(self, max_tokens: int = 40, stop: tuple[str | int, ...] = ()) -> SampledSequence:
        """The greedy completion of the first token."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)
        return self.sampler.sample(ModelInput.from_ints(self.tokens[:1]), 1, params).result(60).sequences[0]


class ContractHarness:
    """The fixtures of the contract.

    `tolerance` bounds rounding; `learning_rate` is one with which `memorise_steps` steps of AdamW learn ten digits by
    heart.
    """

    base_model: str
    tolerance: float = 1e-4
    learning_rate: float = 1e-2
    memorise_steps: int = 40

    @classmethod
    def make_service(cls, state_dir: Path) -> ServiceClient:
        """A service that saves states under `state_dir`, where the next service with the same folder can read them."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def state_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("states")

    @pytest.fixture(scope="class")
    @classmethod
    def service(cls, state_dir: Path) -> Iterator[ServiceClient]:
        service = cls.make_service(state_dir)
        yield service
        service.stop()

    @pytest.fixture
    def new_client(self, service: ServiceClient) -> Iterator[Callable[[], TrainingClient]]:
        """Makes identical training clients and stops them at the end."""
        clients: list[TrainingClient] = []

        def make() -> TrainingClient:
            clients.append(service.create_lora_training_client(self.base_model, rank=8, alpha=16, seed=7))
            return clients[-1]

        yield make
        for client in clients:
            client.stop()

    @pytest.fixture
    def client(self, new_client: Callable[[], TrainingClient]) -> TrainingClient:
        return new_client()

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, service: ServiceClient) -> PreTrainedTokenizerBase:
        with service.create_lora_training_client(cls.base_model, rank=8, alpha=16, seed=7) as client:
            return client.get_tokenizer()

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls, tokenizer: PreTrainedTokenizerBase) -> list[Datum]:
        """Three sequences of different lengths, without weights."""
        return [next_token_datum(encode(tokenizer, text)) for text in TEXTS]

    @pytest.fixture(scope="class")
    @classmethod
    def prompt(cls, tokenizer: PreTrainedTokenizerBase) -> ModelInput:
        return ModelInput.from_ints(encode(tokenizer, PROMPT))

    @pytest.fixture(scope="class")
    @classmethod
    def memoriser(cls, service: ServiceClient, tokenizer: PreTrainedTokenizerBase) -> Iterator[Memoriser]:
        """A model trained on the digits and their end alone."""
        assert isinstance(tokenizer.eos_token_id, int)
        tokens = [*encode(tokenizer, MEMORISED), tokenizer.eos_token_id]
        with service.create_lora_training_client(cls.base_model, rank=8, alpha=16, seed=7) as client:
            losses = []
            for _ in range(cls.memorise_steps):
                output = client.forward_backward([next_token_datum(tokens)], "cross_entropy")
                client.optim_step(cls.adam())
                losses.append(output.result(60).metrics["loss:sum"])
            yield Memoriser(tokens, losses, client.save_weights_and_get_sampling_client())

    @classmethod
    def adam(cls, **changes: float) -> AdamParams:
        """A step of visible size."""
        return dataclasses.replace(AdamParams(learning_rate=cls.learning_rate), **changes)

    def smooth_adam(self, **changes: float) -> AdamParams:
        """A step that depends on the gradient's size, not only on its sign: it neither hides a factor nor amplifies
        rounding."""
        return self.adam(eps=0.1, **changes)

    def train(self, client: TrainingClient, data: Sequence[Datum], adam_params: AdamParams | None = None) -> None:
        client.forward_backward(data, "cross_entropy")
        client.optim_step(adam_params or self.smooth_adam()).result(60)

    def logprobs(
        self, client: TrainingClient, data: Sequence[Datum], config: Mapping[str, float] | None = None
    ) -> np.ndarray:
        return logprobs_of(client.forward(data, "cross_entropy", config).result(60))
