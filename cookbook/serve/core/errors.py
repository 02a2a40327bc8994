"""Refusals of the service. Each says what to do; an adapter gives it the form that its clients understand."""

from __future__ import annotations

from cookbook.core.errors import CookbookError


class ServiceError(CookbookError):
    """A request that cannot be served. `status` is its HTTP status."""

    status = 500


class InvalidRequest(ServiceError):
    """The request is malformed or contradicts the state of what it names."""

    status = 400


class Unauthorized(ServiceError):
    """No API key, or one that the server does not know."""

    status = 401


class NotFound(ServiceError):
    """There is no such thing, or it belongs to another tenant: the two look alike on purpose."""

    status = 404


class Gone(ServiceError):
    """It was there and is no more: a session that has ended, a result that was kept long enough, a snapshot that made room."""

    status = 410


class QuotaExceeded(ServiceError):
    """The tenant has as many sessions, or operations in the queue, as it may have. Trying again later is right."""

    status = 429


class ShuttingDown(ServiceError):
    """The server is about to end."""

    status = 503


class OperationFailed(ServiceError):
    """The server's own fault: nothing that the client sent was wrong. The session stays usable."""

    status = 500
