"""The HTTP status of every error of the service, and the errors that only HTTP knows."""

from __future__ import annotations

from cookbook.serve.core.errors import (
    Gone,
    InvalidRequest,
    NotFound,
    OperationFailed,
    QuotaExceeded,
    ServiceError,
    ShuttingDown,
)


class Unauthorized(ServiceError):
    """No API key, or an unknown one."""


class TooLarge(ServiceError):
    """The body exceeds the limit."""


STATUS: dict[type[ServiceError], int] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    NotFound: 404,
    Gone: 410,
    TooLarge: 413,
    QuotaExceeded: 429,
    OperationFailed: 500,
    ShuttingDown: 503,
}
