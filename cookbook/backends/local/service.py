"""The service client of the local backend."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from cookbook.backends.base_models import BUNDLED_MODELS
from cookbook.backends.local.clients import LocalEngine, LocalSamplingClient, LocalTrainingClient
from cookbook.backends.local.engine import Engine
from cookbook.backends.local.lora import LoraWeights, merged_adapter
from cookbook.backends.local.model import BaseModel, choose_device, choose_dtype, load_base_model
from cookbook.backends.local.prompt_logprobs import LogprobRequest, prompt_logprobs, topk_prompt_logprobs
from cookbook.backends.local.sampling import SampleRequest, draw_completions
from cookbook.backends.local.state import SessionInfo, read_info, read_weights
from cookbook.backends.local.training import CriticSession, TrainingSession
from cookbook.backends.local.weights import FullWeights, PinnedWeights, TrainableWeights
from cookbook.core.clients import Capabilities
from cookbook.core.errors import ConfigError
from cookbook.core.types import Role
from cookbook.losses.builtin import LOSSES


class LocalService:
    """torch, transformers and peft in this process.

    Args:
        device: `auto` (CUDA, else MPS, else CPU) or a torch device.
        dtype: in which the model is stored and computed: `auto` (bfloat16 on CUDA, float32 elsewhere), `float32` or
            `bfloat16`. What is trained, an adapter or with rank None every weight, and the optimizer are always
            float32.
        state_dir: where states are saved; None is a temporary folder that `stop` removes; then every save warns.
        token_budget: padded tokens per training micro-batch and prompt batch. Affects memory only: results are the same
            up to rounding.
        max_sample_rows: sequences that are decoded together. Affects memory only.

    A base model is loaded at its first use, kept, and shared by all sessions on it. Each loaded one occupies its
    memory.
    """

    def __init__(
        self,
        device: str = "auto",
        dtype: str = "auto",
        state_dir: str | None = None,
        token_budget: int = 4096,
        max_sample_rows: int = 512,
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_sample_rows", max_sample_rows)):
            if value < 1:
                raise ConfigError(f"backend {name}={value}; it must be at least 1")
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        self._temporary_dir = tempfile.mkdtemp(prefix="cookbook-state-") if state_dir is None else None
        self._state_dir = Path(state_dir or self._temporary_dir or "")
        self._token_budget = token_budget
        self._max_sample_rows = max_sample_rows
        self._base_models: dict[str, BaseModel] = {}
        self._merged: tuple[PinnedWeights, PinnedWeights] | None = None
        self._engine: LocalEngine = Engine(self._answer)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            losses=frozenset(LOSSES),
            custom_loss=True,
            critic=True,
            full_parameter=True,
            seeds=True,
            loss_temperature=True,
            topk_prompt_logprobs=True,
        )

    def list_base_models(self) -> list[str]:
        """The names that need no hub; any model folder or hub id works too."""
        return list(BUNDLED_MODELS)

    def create_lora_training_client(
        self, base_model: str, rank: int | None = 32, alpha: float = 64, seed: int | None = None, role: Role = "policy"
    ) -> LocalTrainingClient:
        """A new session; blocks while the base model loads. `rank` None trains a float32 copy of every weight.

        Raises:
            ConfigError, BackendError: the base model cannot be loaded (see `check_base_model`), or `rank` or `alpha` is
                not positive.
        """
        seed = secrets.randbits(63) if seed is None else seed
        return self._create_client(SessionInfo(base_model, rank, alpha, seed, role))

    def create_training_client_from_state(self, path: str, with_optimizer: bool = False) -> LocalTrainingClient:
        """A new session from a `save_state` path.

        Raises:
            CheckpointError: the save is missing, damaged, or holds no optimizer where `with_optimizer` asks for it.
        """
        info = read_info(Path(path))
        client = self._create_client(info)
        load = client.load_state_with_optimizer if with_optimizer else client.load_state
        load(path).result()
        return client

    def create_sampling_client(
        self, base_model: str | None = None, model_path: str | None = None
    ) -> LocalSamplingClient:
        """A sampler of a base model or of saved weights; blocks while they load.

        Raises:
            ConfigError: not exactly one of the two was given.
            CheckpointError: `model_path` is not a save of this backend.
        """
        if (base_model is None) == (model_path is None):
            raise ConfigError("create_sampling_client takes exactly one of base_model and model_path")

        def load() -> PinnedWeights:
            if base_model is not None:
                base = self._base_model(base_model)
                return PinnedWeights(base, base.model)
            return self._saved_weights(Path(str(model_path)))

        pinned = self._engine.submit(load)
        return LocalSamplingClient(self._engine, pinned.result().base, pinned)

    def stop(self) -> None:
        """End the engine after its running operation; later calls of all clients raise BackendError. Idempotent."""
        self._engine.stop()
        self._base_models.clear()
        self._merged = None
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)

    def _create_client(self, info: SessionInfo) -> LocalTrainingClient:
        if info.rank is not None and info.rank < 1:
            raise ConfigError(f"lora rank is {info.rank}; it must be at least 1, or null for full-parameter training")
        if info.alpha <= 0:
            raise ConfigError(f"lora alpha is {info.alpha}; it must be above 0")
        kind = CriticSession if info.role == "critic" else TrainingSession
        session = self._engine.submit(lambda: kind(self._new_weights(info), self._token_budget)).result()
        vanishing = self._temporary_dir is not None
        return LocalTrainingClient(self._engine, session.weights.base, session, info, self._state_dir, vanishing)

    def _new_weights(self, info: SessionInfo) -> TrainableWeights:
        base = self._base_model(info.base_model)
        return FullWeights(base) if info.rank is None else LoraWeights(base, info.rank, info.alpha, info.seed)

    def _saved_weights(self, folder: Path) -> PinnedWeights:
        info = read_info(folder)
        weights = self._new_weights(info)
        weights.load(read_weights(folder, weights))
        return PinnedWeights(weights.base, weights.model)

    def _base_model(self, name: str) -> BaseModel:
        if name not in self._base_models:
            self._base_models[name] = load_base_model(name, self._device, self._dtype)
        return self._base_models[name]

    def _answer(self, requests: Sequence[SampleRequest | LogprobRequest]) -> None:
        """Run a batch of requests, those of each sampler together. An error affects the requests of one sampler
        only."""
        by_weights: dict[Future[PinnedWeights], list[SampleRequest | LogprobRequest]] = {}
        for request in requests:
            if request.future.running():  # not cancelled
                by_weights.setdefault(request.pinned, []).append(request)
        for pinned, group in by_weights.items():
            try:
                self._answer_with(pinned.result(), group)
            except Exception as error:  # any error is for those who wait for this sampler
                for request in group:
                    if not request.future.done():
                        request.future.set_exception(error)

    def _answer_with(self, pinned: PinnedWeights, requests: Sequence[SampleRequest | LogprobRequest]) -> None:
        samples = [request for request in requests if isinstance(request, SampleRequest)]
        scores = [request for request in requests if isinstance(request, LogprobRequest)]
        scored_samples = [request for request in samples if request.include_prompt_logprobs]
        with self._runnable(pinned).applied() as model:
            values = prompt_logprobs(
                model, [request.prompt for request in [*scores, *scored_samples]], self._token_budget
            )
            for request, answer in zip(scores, values, strict=False):
                request.future.set_result(answer)
            for request, answer in zip(scored_samples, values[len(scores) :], strict=True):
                request.prompt_logprobs = answer
            for request in samples:
                if request.topk_prompt_logprobs:
                    request.topk = topk_prompt_logprobs(model, request.prompt, request.topk_prompt_logprobs)
            draw_completions(pinned.base, model, samples, self._max_sample_rows, self._token_budget)

    def _runnable(self, pinned: PinnedWeights) -> PinnedWeights:
        """The weights to run: in float32 an adapter is merged first, and the last merged one is kept."""
        if pinned.base.dtype != torch.float32:
            return pinned
        if self._merged is None or self._merged[0] is not pinned:
            self._merged = (pinned, merged_adapter(pinned))
        return self._merged[1]
