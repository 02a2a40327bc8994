"""ASGI middleware: the limit of request bodies, and the access log."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cookbook.serve.core.errors import ServiceError
from cookbook.serve.http.errors import TooLarge

access_log = logging.getLogger("cookbook.serve.access")

DRAIN_FACTOR = 4
"""A body over the limit is read up to this many times the limit, so that the client can finish and read the answer."""


class BodyLimit:
    """Answers 413 to a body over the limit, by its declared length or at the first byte beyond it.

    `error_response` makes the answer from the path and the error.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, error_response: Callable[[str, ServiceError], Response]
    ) -> None:
        self._app, self._limit, self._error_response = app, max_body_bytes, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await self._refuse(scope, receive, send, 0)
            return
        received, started, more = 0, False, True

        async def counted() -> Message:
            nonlocal received, more
            message = await receive()
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
            if received > self._limit:
                raise _LimitExceededError
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _LimitExceededError:
            if not started:
                await self._refuse(scope, receive, send, received, more)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, received: int, more: bool = True) -> None:
        while more and received <= DRAIN_FACTOR * self._limit:
            message = await receive()
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
        error = TooLarge(f"the body is larger than {self._limit} bytes; send less data at once")
        await self._error_response(scope["path"], error)(scope, receive, send)


class _LimitExceededError(Exception):
    pass


class AccessLog:
    """Logs one JSON line per request, without body, query or key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            line = {
                "time": round(time.time(), 3),
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(1000 * (time.perf_counter() - started), 1),
                "tenant": scope.get("state", {}).get("tenant"),
            }
            access_log.info(json.dumps(line))
