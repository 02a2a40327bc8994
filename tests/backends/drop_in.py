"""A drop-in for the tinker SDK like those of vendors: no futures of clients, results to await, no list of models."""

from __future__ import annotations

from collections.abc import Generator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from tinker import types

CALLS: list[tuple[str, Any]] = []
"""What was called, with what matters of its arguments."""


class Answer:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value
        yield


class TrainingClient:
    def forward_backward(self, data: list[types.Datum], loss_fn: str, config: dict[str, float] | None) -> Answer:
        inputs = [{key: tensor.to_numpy() for key, tensor in datum.loss_fn_inputs.items()} for datum in data]
        CALLS.append((loss_fn, inputs))
        outputs = [
            {"logprobs": types.TensorData.from_numpy(np.zeros(datum.model_input.length, np.float32))} for datum in data
        ]
        return Answer(SimpleNamespace(loss_fn_outputs=outputs, metrics={"loss:sum": 0.0}))

    def optim_step(self, params: types.AdamParams) -> Answer:
        return Answer(RuntimeError("no step today:\nthe trainer is on strike"))

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Answer:
        return Answer(SimpleNamespace(path="a-bare-id"))

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        return SamplingClient()


class SamplingClient:
    def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams, *rest: Any) -> Answer:
        CALLS.append(("sample", params))
        tokens = list(range(10, 10 + int(params.max_tokens or 0)))
        sequence = SimpleNamespace(tokens=tokens, logprobs=[-1.0] * len(tokens), stop_reason="length")
        return Answer(
            SimpleNamespace(sequences=[sequence] * num_samples, prompt_logprobs=None, topk_prompt_logprobs=None)
        )


class ServiceClient:
    def __init__(self, *, base_url: str | None = None, api_key: str | None = None) -> None:
        CALLS.append(("service", (base_url, api_key)))

    def create_lora_training_client(
        self, base_model: str, rank: int, seed: int | None, user_metadata: dict[str, str] | None
    ) -> TrainingClient:
        CALLS.append(("model", (base_model, rank, seed, user_metadata)))
        return TrainingClient()

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None
    ) -> TrainingClient:
        return TrainingClient()


def make_module(name: str) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(types=types, ServiceClient=ServiceClient)
    return module
