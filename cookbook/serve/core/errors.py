"""Errors of the service. Each says what to do; an adapter gives it the form that its clients understand."""

from __future__ import annotations

from collections.abc import Callable

from cookbook.core.errors import CookbookError
from cookbook.serve.core.checkpoints import CheckpointKey


class ServiceError(CookbookError):
    """A request that cannot be served. The message is its parts, joined; a part can be the key of a checkpoint."""

    def __init__(self, *parts: str | CheckpointKey) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts

    def text(self, notation: Callable[[CheckpointKey], str]) -> str:
        """The message with checkpoints in the notation of an adapter."""
        return "".join(notation(part) if isinstance(part, CheckpointKey) else part for part in self.parts)


class InvalidRequest(ServiceError):
    """The request is malformed or contradicts the state of what it names."""


class NotFound(ServiceError):
    """It does not exist or belongs to another tenant. The client must not be able to tell which."""


class Gone(ServiceError):
    """It existed and no longer does: an ended session, a result kept long enough, an evicted snapshot."""


class QuotaExceeded(ServiceError):
    """The tenant has reached its limit of sessions or of queued operations. The client should try again later."""


class ShuttingDown(ServiceError):
    """The server is shutting down."""


class OperationFailed(ServiceError):
    """The operation failed for a reason that is not the client's fault. The session stays usable."""
