"""The service client of the tinker backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cookbook.backends.tinker.calls import Calls
from cookbook.backends.tinker.clients import TinkerSamplingClient, TinkerTrainingClient
from cookbook.backends.tinker.connection import (
    check_base_model,
    find_features,
    find_key,
    find_url,
    load_module,
    silence_telemetry,
)
from cookbook.backends.tinker.tokenizers import Tokenizers, load_tokenizers
from cookbook.core.clients import Capabilities
from cookbook.core.errors import BackendError, CapabilityError, ConfigError
from cookbook.core.types import Role

logger = logging.getLogger(__name__)

HEALTH_ANSWER_S = 10.0
CLOSE_S = 5.0
"""Seconds that ending the session may take; otherwise the service ends it by itself."""

SPARSE_LOGPROBS = "sparse_logprobs"
"""Tells our server that logprobs which no loss reads need not be computed."""


class TinkerService:
    """Tinker, our own server, or another service that the published SDK or a drop-in for it can use.

    The constructor checks the package, the key, the server and the base model, and provisions nothing.

    Args:
        module: the SDK: `tinker`, or a drop-in such as `together.post_training.tinker`.
        base_url: the server; None is `TINKER_BASE_URL`, else the module's own.
        model_name, model_path: the base model of the run, checked at once; a path takes precedence. None checks
            nothing.
        tokenizer: folder or hub id of the tokenizer, if the name of the base model does not determine it.
        api_key_env: the environment variable with the API key; None is `TINKER_API_KEY`, or the one that a drop-in
            module reads. A server on this machine needs none.
        patience_s: how long the server may be silent before what is pending fails.

    Raises:
        ConfigError: the package is missing, the key is missing or wrong, or the base model is not served.
        BackendError: the server cannot be reached.
    """

    def __init__(
        self,
        *,
        module: str = "tinker",
        base_url: str | None = None,
        model_name: str | None = None,
        model_path: str | None = None,
        tokenizer: str | None = None,
        api_key_env: str | None = None,
        patience_s: float = 60.0,
    ) -> None:
        if not patience_s > 0:
            raise ConfigError(f"backend.patience_s={patience_s}: must be more than 0")
        sdk = load_module(module)
        url = find_url(module, base_url)
        key = find_key(module, api_key_env, url)
        silence_telemetry(url)
        self._features = find_features(module, sdk, url, key)
        self._model_name = model_path or model_name
        if self._model_name is not None:
            check_base_model(self._model_name, self._features.base_models)
        self._tokenizer = tokenizer
        self._tokenizers: dict[str, Tokenizers] = {}
        self._types: Any = sdk.types
        self._sdk: Any = sdk.ServiceClient(base_url=url, api_key=key)
        self._calls = Calls(None if url is None else lambda: _is_up(f"{url}/api/v1/healthz"), patience_s, url or module)
        self._warned_of_alpha = False

    @property
    def capabilities(self) -> Capabilities:
        """What the service reports, else what Tinker documents."""
        return self._features.capabilities

    def list_base_models(self) -> list[str]:
        """Those that the service lists; none where it lists none."""
        return list(self._features.base_models or ())

    def create_lora_training_client(
        self, base_model: str, rank: int | None = 32, alpha: float = 64, seed: int | None = None, role: Role = "policy"
    ) -> TinkerTrainingClient:
        """A new training run; blocks until the service has made it.

        Raises:
            CapabilityError: the service has no critics, or cannot train every weight.
            ConfigError: the base model is not served.
        """
        self._calls.check_open()
        if role == "critic" and not self.capabilities.critic:
            raise CapabilityError(
                "this service has no critics; choose advantage=reinforce_pp, rloo or mean_centered, or backend=local"
            )
        if rank is None and not self.capabilities.full_parameter:
            raise CapabilityError("this service trains adapters only; set lora.rank=32 or use backend=local")
        check_base_model(base_model, self._features.base_models)
        self._check_alpha(alpha)
        metadata = {
            "lora_alpha": str(float(alpha)),
            "role": role,
            "full_parameter": str(rank is None).lower(),
            SPARSE_LOGPROBS: "true",
        }
        arguments = {
            "base_model": base_model,
            "rank": rank or 1,
            "seed": seed,
            "user_metadata": self._understood(metadata),
        }
        client = self._wait(lambda: self._sdk.create_lora_training_client(**arguments))
        return self._training_client(client, base_model, role)

    def create_training_client_from_state(self, path: str, with_optimizer: bool = False) -> TinkerTrainingClient:
        """A new training run from a `save_state` path; blocks until the service has made it."""
        metadata = self._understood({SPARSE_LOGPROBS: "true"})
        method = "create_training_client_from_state" + ("_with_optimizer" if with_optimizer else "")
        client = self._wait(lambda: getattr(self._sdk, method)(path, user_metadata=metadata))
        return self._training_client(client, self._base_model_of(client), "policy")

    def create_sampling_client(
        self, base_model: str | None = None, model_path: str | None = None
    ) -> TinkerSamplingClient:
        """A sampler of a base model or of saved weights.

        Raises:
            ConfigError: not exactly one of the two was given; the base model is not served.
        """
        if (base_model is None) == (model_path is None):
            raise ConfigError("create_sampling_client takes exactly one of base_model and model_path")
        self._calls.check_open()
        if base_model is not None:
            check_base_model(base_model, self._features.base_models)
        sampler = self._wait(lambda: self._sdk.create_sampling_client(base_model=base_model, model_path=model_path))
        name = base_model or str(sampler.get_base_model())
        ready: Future[Any] = Future()
        ready.set_result(sampler)
        return TinkerSamplingClient(
            self._calls, self._features, self._types, ready, lambda: self._load_tokenizers(name, sampler)
        )

    def stop(self) -> None:
        """End the session; later calls of all clients raise BackendError. Idempotent."""
        self._calls.stop("this service was stopped; make a new one")
        try:
            self._sdk.close("success").result(CLOSE_S)
        except AttributeError:
            pass  # drop-ins that have no such method end their sessions when the process ends
        except Exception as error:  # any error of the SDK; nothing depends on it
            logger.info("the session could not be ended (%r); the service will do so by itself", error)

    def _training_client(self, client: Any, base_model: str, role: Role) -> TinkerTrainingClient:
        return TinkerTrainingClient(
            self._calls, self._features, self._types, client, role, lambda: self._load_tokenizers(base_model, client)
        )

    def _wait(self, submit: Callable[[], object]) -> Any:
        return self._calls.call(submit, lambda made: made).result()

    def _base_model_of(self, client: Any) -> str:
        try:
            return str(client.get_info().model_data.model_name)
        except AttributeError as error:  # drop-ins that cannot tell
            if self._model_name is None:
                raise BackendError(
                    "this service does not tell a checkpoint's base model; set backend.model_name"
                ) from error
            return self._model_name

    def _understood(self, metadata: dict[str, str]) -> dict[str, str] | None:
        return {key: value for key, value in metadata.items() if key in self._features.user_metadata} or None

    def _check_alpha(self, alpha: float) -> None:
        if "lora_alpha" in self._features.user_metadata or alpha == self._features.lora_alpha or self._warned_of_alpha:
            return
        self._warned_of_alpha = True
        logger.warning(
            "lora.alpha=%g: this service does not take it and uses its own, usually %g",
            alpha,
            self._features.lora_alpha,
        )

    def _load_tokenizers(self, base_model: str, client: Any) -> Tokenizers:
        if base_model not in self._tokenizers:
            self._tokenizers[base_model] = load_tokenizers(base_model, self._tokenizer, client)
        return self._tokenizers[base_model]


async def _is_up(address: str) -> bool:
    import httpx  # comes with the SDK

    try:
        async with httpx.AsyncClient(timeout=HEALTH_ANSWER_S) as client:
            await client.get(address)
    except httpx.HTTPError:
        return False
    return True
