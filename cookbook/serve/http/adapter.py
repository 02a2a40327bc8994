"""The interface between the application and the adapters, each of which serves one wire format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from cookbook.serve.core.errors import ServiceError
from cookbook.serve.core.service import TrainingService


@dataclass(frozen=True)
class Adapter:
    """One wire format: its routes, the shape of its errors, and what its clients demand of API keys."""

    prefixes: tuple[str, ...]
    """The paths that are the adapter's begin with one of these."""
    routes: Callable[[TrainingService], APIRouter]
    """Makes the routes. A route finds its tenant in `request.state.tenant`."""
    error_body: Callable[[ServiceError], dict[str, Any]]
    """The JSON body of an error."""
    key_advice: str
    """What to check after an unknown API key, for example the variable that the client reads it from."""
    key_problem: Callable[[str], str | None] = lambda key: None
    """What is wrong with a key of the key file that the adapter's clients would not send; None if nothing is."""
    health_paths: tuple[str, ...] = ()
    """Further paths of the health check. They need no key."""

    def serves(self, path: str) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in self.prefixes)


def adapter_for(path: str, adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter of a path; None for the server's own endpoints."""
    return next((adapter for adapter in adapters if adapter.serves(path)), None)
