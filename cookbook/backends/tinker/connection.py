"""Connection to a service: the SDK's module, the key, the URL, and a request for what the service can do."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cookbook.backends.tinker.calls import failure
from cookbook.core.clients import Capabilities
from cookbook.core.errors import BackendError, ConfigError
from cookbook.core.suggest import did_you_mean

T = TypeVar("T")

TINKER = "tinker"
"""The published SDK; any other module is a drop-in for it."""

KEY_VARIABLE = "TINKER_API_KEY"
URL_VARIABLE = "TINKER_BASE_URL"

LOCAL_KEY = "tml-local"
"""The key for a server on this machine that has none: the SDK requires one of this form."""

ANSWER_S = 20.0
HOSTED_ANSWER_S = 60.0

TINKER_CAPABILITIES = Capabilities(
    losses=frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo"}),
    custom_loss=True,
    topk_prompt_logprobs=True,
)
"""The capabilities of a service that reports none: what Tinker documents.

Without `dro`: its penalty on the ratio does not vanish where the advantage is zero, and Tinker's policy losses have no
weights, so it could not be limited to the completion's tokens.
"""


@dataclass(frozen=True)
class Features:
    """What a service can do.

    `base_models` are those it serves; None if it does not list them. `user_metadata` are the keys that it understands
    when a model is created. `weights`: every loss takes weights; otherwise only cross_entropy does.
    """

    capabilities: Capabilities = TINKER_CAPABILITIES
    base_models: tuple[str, ...] | None = None
    user_metadata: frozenset[str] = frozenset()
    lora_alpha: float = 32.0
    weights: bool = False


def load_module(name: str) -> Any:
    """Import the SDK. Raises ConfigError: the package is not installed, or its import fails."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        package = "'.[tinker]'" if name == TINKER else f"the package of {name}"
        cause = (
            ""
            if isinstance(error, ModuleNotFoundError) and name.startswith(f"{error.name}")
            else f" ({' '.join(str(error).split())})"
        )
        command = f"pip install -e {package}" if name == TINKER else f"install {package}"
        raise ConfigError(
            f"backend.module={name}: cannot be imported{cause}; {command}, or choose another backend"
        ) from error
    # These two write to stderr what is raised as an exception too, or does not concern the user.
    for noisy in ("retry_handler", "public_interfaces.training_client"):
        logging.getLogger(f"{TINKER}.lib.{noisy}").setLevel(logging.CRITICAL)
    return module


def find_url(module: str, base_url: str | None) -> str | None:
    """The URL from the configuration or the environment; None is the SDK's own."""
    url = base_url or (os.environ.get(URL_VARIABLE) if module == TINKER else None)
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ConfigError(f"backend.base_url={url}: is not a URL; give one such as http://127.0.0.1:8000")
    return url.rstrip("/") if url else None


def find_key(module: str, variable: str | None, url: str | None) -> str | None:
    """The API key from the environment; None lets a drop-in module look for its own.

    Raises:
        ConfigError: a key is needed and there is none, or it is not a key.
    """
    variable = variable or (KEY_VARIABLE if module == TINKER else None)
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        if url is not None and _is_loopback(url):
            return LOCAL_KEY
        raise ConfigError(
            f"{variable} is not set: the tinker backend needs an API key for {url or module}; export {variable}=..."
        )
    if module == TINKER and not key.startswith(("tml-", "eyJ")):
        raise ConfigError(f"{variable}: is not a key that the tinker SDK accepts; its keys begin with tml-")
    return key


def silence_telemetry(url: str | None) -> None:
    """Turn off the SDK's reports to any server but Tinker's own. An explicit TINKER_TELEMETRY is kept."""
    if url is not None and not str(urlsplit(url).hostname).endswith("thinkingmachines.dev"):
        os.environ.setdefault("TINKER_TELEMETRY", "0")


def find_features(module_name: str, module: Any, url: str | None, key: str | None) -> Features:
    """Ask the service what it can do, which also checks that it answers and accepts the key.

    With a URL this is a plain request: the SDK would retry for minutes, and drop fields that it does not know. Tinker
    itself is asked by its SDK, which may have to exchange the key first. A drop-in module has no such request: errors
    show when its first client is made.

    Raises:
        BackendError: no answer, or one that is not understood.
        ConfigError: the key is refused.
    """
    if url is not None:
        answer = _get(f"{url}/api/v1/get_server_capabilities", key, url)
        try:
            return _features(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BackendError(
                f"{url}: its get_server_capabilities is not understood ({error!r}); "
                "check backend.base_url, or the server's version"
            ) from error
    if module_name != TINKER:
        return Features()
    models = _ask_tinker(lambda: module.RestClient(api_key=key).get_server_capabilities().result().supported_models)
    return Features(base_models=tuple(str(model.model_name) for model in models))


def check_base_model(name: str, served: Sequence[str] | None) -> None:
    """Raises ConfigError if `name` is not among the `served` models."""
    if served is not None and name not in served:
        hint = did_you_mean(name, served)
        names = ", ".join(served) or "none"
        raise ConfigError(f"base model {name!r} is not served{hint}; served are {names}: choose model.name among them")


def _get(address: str, key: str | None, url: str) -> Any:
    import httpx  # comes with the SDK

    try:
        response = httpx.get(address, headers={"X-API-Key": key or ""}, timeout=ANSWER_S)
    except httpx.HTTPError as error:
        cause = str(error) or type(error).__name__
        raise BackendError(f"{url} cannot be reached ({cause}); start the server, or check backend.base_url") from error
    if response.status_code in (401, 403):
        raise ConfigError(f"{url} refuses the API key ({response.status_code}); set {KEY_VARIABLE} to one of its keys")
    if response.status_code != 200:
        raise BackendError(
            f"{url} answers {response.status_code} where a Tinker API lists its models; check backend.base_url"
        )
    try:
        return response.json()
    except ValueError as error:
        raise BackendError(
            f"{url} does not answer with JSON, so it is not a Tinker API; check backend.base_url"
        ) from error


def _ask_tinker(ask: Callable[[], T]) -> T:
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # any error of the SDK
            answer.set_exception(error)

    threading.Thread(target=run, name="tinker-question", daemon=True).start()  # the SDK retries for minutes
    try:
        return answer.result(HOSTED_ANSWER_S)
    except TimeoutError as error:
        raise BackendError(
            f"Tinker has not answered for {HOSTED_ANSWER_S:g} s; check the network, or set backend.base_url"
        ) from error
    except Exception as error:
        raise ConfigError(f"Tinker refuses the request: {failure(error)}; check {KEY_VARIABLE}") from error


def _features(answer: Mapping[str, Any]) -> Features:
    models = tuple(str(model["model_name"]) for model in answer["supported_models"])
    reported = answer.get("cookbook")
    if reported is None:
        return Features(base_models=models)
    known = {field.name: reported[field.name] for field in fields(Capabilities) if field.name in reported}
    capabilities = Capabilities(**{**known, "losses": frozenset(reported["losses"])})
    # The SDK runs a custom loss in two passes on any service.
    capabilities = replace(capabilities, custom_loss=True)
    return Features(
        capabilities, models, frozenset(reported["user_metadata"]), float(reported["lora_alpha"]), weights=True
    )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
