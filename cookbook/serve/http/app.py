"""HTTP around the core: keys, limits, logs, health, and the adapters' routes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cookbook.serve.core.errors import NotFound, QuotaExceeded, ServiceError
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.tenants import Tenants
from cookbook.serve.http.metrics import Metrics

access_log = logging.getLogger("cookbook.serve.access")

RETRY_AFTER_S = 1

DRAINED = 4
"""How many times the limit of a body is read of one that is too large, so that its client, which still sends, gets to see the answer."""

Adapter = Callable[[TrainingService], APIRouter]
"""Makes the routes of one wire format. A route finds the tenant in `request.state.tenant`."""


def create_app(
    service: TrainingService, tenants: Tenants, metrics: Metrics, adapters: list[Adapter], max_body_bytes: int
) -> FastAPI:
    """The application. `/healthz` is open; everything else asks for a key where the server has any."""
    app = FastAPI(title="cookbook session server", docs_url=None, redoc_url=None, openapi_url=None)

    def authenticate(request: Request) -> None:
        bearer = request.headers.get("authorization", "")
        key = request.headers.get("x-api-key") or (bearer[7:] if bearer.lower().startswith("bearer ") else None)
        request.state.tenant = tenants.authenticate(key)

    @app.get("/healthz")
    @app.get("/api/v1/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", dependencies=[Depends(authenticate)])
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/usage", dependencies=[Depends(authenticate)])
    async def usage(request: Request, session: str | None = None) -> dict[str, int]:
        """Tokens that the tenant was billed for, in all or in one of its sessions."""
        if session is not None and service.store.session(request.state.tenant, session) is None:
            raise NotFound(f"there is no session {session}; list the sessions to see those that there are")
        return asdict(service.store.usage(request.state.tenant, session))

    @app.exception_handler(ServiceError)
    async def refuse(request: Request, error: ServiceError) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, QuotaExceeded) else None
        return JSONResponse(error_body(error), error.status, headers)

    for adapter in adapters:
        app.include_router(adapter(service), dependencies=[Depends(authenticate)])
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    app.add_middleware(AccessLog)
    return app


def error_body(error: ServiceError) -> dict[str, Any]:
    """An error as the tinker SDK (`detail`) and the OpenAI clients (`error.message`) show it."""
    kind = type(error).__name__
    return {"detail": str(error), "error": {"message": str(error), "type": kind, "code": kind, "param": None}}


class BodyLimit:
    """Answers 413 to a body over the limit, by its declared length or at the first byte beyond; what it read is dropped at once."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._limit = app, max_body_bytes

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
                raise _TooLargeError
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except _TooLargeError:
            if not started:
                await self._refuse(scope, receive, send, received, more)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, received: int, more: bool = True) -> None:
        while more and received <= DRAINED * self._limit:
            message = await receive()
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
        message = f"the body is larger than {self._limit} bytes; send less data at once"
        body = {"detail": message, "error": {"message": message, "type": "TooLarge", "code": "TooLarge", "param": None}}
        await JSONResponse(body, 413)(scope, receive, send)


class _TooLargeError(Exception):
    pass


class AccessLog:
    """One JSON line per request: no body, no query, no key."""

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
