"""A client of the core without HTTP, and backends to test it with."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from cookbook.backends.fake import FakeService, FakeTrainingClient
from cookbook.core.clients import APIFuture
from cookbook.core.types import AdamParams, Datum, ModelInput, OptimStepResponse, SamplingParams
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import CreateModel, Forward, Operation, OptimStep, Sample, Snapshot
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.store import Store

TOKENS = 6
STEP = OptimStep(AdamParams(learning_rate=0.1))


def datum(shift: int = 1) -> Datum:
    tokens = np.arange(5, 5 + TOKENS)
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens + shift, "weights": np.ones(TOKENS)})


def forward_backward(*data: Datum) -> Forward:
    return Forward(data or (datum(),), "cross_entropy", {}, backward=True)


def sample(num_samples: int = 2, seed: int = 0) -> Sample:
    return Sample(ModelInput.from_ints([5, 6]), num_samples, SamplingParams(4, seed=seed))


class Client:
    """One tenant's view of a service, one model, blocking."""

    def __init__(self, service: TrainingService, tenant: str = "a") -> None:
        self.service, self.tenant = service, tenant
        self.session_id = service.sessions.create(tenant, "mine").id
        self.create = service.create_model(tenant, self.session_id, 0, CreateModel("fake", 8, 32.0, 0))
        self.model_id = f"{self.session_id}:train:0"
        self.sequence = 0

    def send(self, operation: Operation, sequence: int | None = None) -> str:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        return self.service.submit(self.tenant, self.model_id, sequence, operation)

    def result(self, ticket_id: str) -> Any:
        return self.service.sessions.ticket(self.tenant, ticket_id).future.result(timeout=10)

    def do(self, operation: Operation) -> Any:
        return self.result(self.send(operation))

    def snapshot(self) -> str:
        return self.do(Snapshot(self.service.sampler_id(self.session_id, self.sequence)))

    def logprobs(self) -> np.ndarray:
        return self.do(Forward((datum(),), "cross_entropy", {}, backward=False)).loss_fn_outputs[0]["logprobs"]


def open_service(folder: Path, limits: Limits | None = None, backend: FakeService | None = None) -> TrainingService:
    return TrainingService(
        backend or FakeService(str(folder / "states")), Store(folder / "serve.sqlite"), {"fake": "fake"}, limits
    )


class Gate(FakeService):
    """A backend whose optimizer steps wait until the gate is opened."""

    def __init__(self, state_dir: str) -> None:
        super().__init__(state_dir)
        self.opened, self.entered = threading.Event(), threading.Event()
        self.order: list[int] = []

    def create_lora_training_client(self, *arguments: Any, **keywords: Any) -> FakeTrainingClient:
        client = super().create_lora_training_client(*arguments, **keywords)
        number = len(self.order)
        self.order.append(-1)
        step = client.optim_step

        def gated(adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
            self.entered.set()
            assert self.opened.wait(10)
            self.order.append(number)
            return step(adam_params)

        client.optim_step = gated
        return client
