"""A live server over a slow fake backend, and the requests that tests send to it."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.backends.fake import FakeService, FakeTrainingClient
from cookbook.core.clients import APIFuture
from cookbook.core.types import AdamParams, OptimStepResponse
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.service import TrainingService
from tests.serve.api import Api
from tests.serve.live_server import live_service

TOKENS = 6
KEY_A, KEY_B = "tml-key-of-tenant-a-0000", "tml-key-of-tenant-b-1111"
ADAM = {"learning_rate": 0.1}


class SlowService(FakeService):
    """A backend whose optimizer steps wait for the gate, which is open at first. `made` are its training clients."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(str(state_dir / "states"))
        self.gate, self.step_s = threading.Event(), 0.0
        self.gate.set()
        self.made: list[weakref.ref[FakeTrainingClient]] = []

    def create_lora_training_client(self, *arguments: Any, **keywords: Any) -> FakeTrainingClient:
        client = super().create_lora_training_client(*arguments, **keywords)
        step = client.optim_step

        def gated(adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
            assert self.gate.wait(30)
            time.sleep(self.step_s)
            return step(adam_params)

        client.optim_step = gated
        self.made.append(weakref.ref(client))
        return client


@contextlib.contextmanager
def fake_server(
    folder: Path, *, keys=(), limits: Limits | None = None, **settings: Any
) -> Iterator[tuple[Api, TrainingService, SlowService]]:
    backend = SlowService(folder)
    with live_service(backend, folder, keys=keys, limits=limits, **settings) as (url, service):
        try:
            yield Api(url, keys[0][1] if keys else None, "fake"), service, backend
        finally:
            backend.gate.set()


def tokens_of(shift: int) -> tuple[list[int], list[int]]:
    return [*range(5, 5 + TOKENS)], [5 + shift % 20] * TOKENS


def forward_backward(
    model_id: str, seq_id: int | None = None, shift: int = 1, forward_only: bool = False
) -> dict[str, Any]:
    tokens, targets = tokens_of(shift)
    datum = {
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": {"data": targets, "dtype": "int64"}},
    }
    asked = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": asked, "forward_only": forward_only}


def optim_step(model_id: str, seq_id: int | None = None) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": ADAM}


def logprobs(api: Api, model_id: str) -> list[float]:
    return api.result("forward_backward", forward_backward(model_id, forward_only=True))["loss_fn_outputs"][0][
        "logprobs"
    ]["data"]


def sdk_data(count: int, repeat: int = 1) -> list:
    import tinker

    tokens, targets = (values * repeat for values in tokens_of(1))
    inputs = {"target_tokens": targets}
    return [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=dict(inputs)) for _ in range(count)
    ]
