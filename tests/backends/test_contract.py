"""The contract on the backends that run in this process."""

from pathlib import Path

import torch

from cookbook.backends.fake import FakeService
from cookbook.backends.local import LocalService
from cookbook.core.clients import ServiceClient
from tests.backend_contract import BackendContract


class TestFakeBackend(BackendContract):
    base_model = "fake"
    learning_rate = 0.3

    @classmethod
    def make_service(cls, state_dir: Path) -> ServiceClient:
        return FakeService(state_dir=str(state_dir))


class TestLocalBackend(BackendContract):
    base_model = "tiny"
    learning_rate = 3e-3

    @classmethod
    def make_service(cls, state_dir: Path) -> ServiceClient:
        torch.set_num_threads(1)  # threads slow down a model this small
        return LocalService(device="cpu", dtype="float32", state_dir=str(state_dir))
