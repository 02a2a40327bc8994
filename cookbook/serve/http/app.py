"""The HTTP application around the core: API keys, errors, health, metrics, usage, and the adapters' routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from cookbook.serve.core.errors import NotFound, QuotaExceeded, ServiceError
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.tenants import Tenants
from cookbook.serve.http.adapter import Adapter, adapter_for
from cookbook.serve.http.errors import STATUS, Unauthorized
from cookbook.serve.http.metrics import Metrics
from cookbook.serve.http.middleware import AccessLog, BodyLimit

RETRY_AFTER_S = 1


def create_app(
    service: TrainingService, tenants: Tenants, metrics: Metrics, adapters: Sequence[Adapter], max_body_bytes: int
) -> FastAPI:
    """The application. Every endpoint but the health checks needs a key if the server has any."""
    app = FastAPI(title="cookbook session server", docs_url=None, redoc_url=None, openapi_url=None)

    def error_response(path: str, error: ServiceError) -> JSONResponse:
        adapter = adapter_for(path, adapters)
        body = {"detail": str(error)} if adapter is None else adapter.error_body(error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, QuotaExceeded) else None
        return JSONResponse(body, STATUS[type(error)], headers)

    @app.exception_handler(ServiceError)
    async def refuse(request: Request, error: ServiceError) -> JSONResponse:
        return error_response(request.url.path, error)

    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    # The first route that matches a path counts, and an adapter can have a catch-all.
    for path in ("/healthz", *(path for adapter in adapters for path in adapter.health_paths)):
        app.add_api_route(path, healthz, methods=["GET"])
    app.include_router(_own_routes(service, metrics), dependencies=[Depends(_authentication(tenants, "it"))])
    for adapter in adapters:
        authenticate = _authentication(tenants, adapter.key_advice)
        app.include_router(adapter.routes(service), dependencies=[Depends(authenticate)])
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes, error_response=error_response)
    app.add_middleware(AccessLog)
    return app


def _authentication(tenants: Tenants, key_advice: str) -> Callable[[Request], None]:
    def authenticate(request: Request) -> None:
        bearer = request.headers.get("authorization", "")
        key = request.headers.get("x-api-key") or (bearer[7:] if bearer.lower().startswith("bearer ") else None)
        tenant = tenants.tenant_of(key)
        if tenant is None and not key:
            raise Unauthorized("no API key: send it in the header X-API-Key, or as Authorization: Bearer")
        if tenant is None:
            raise Unauthorized(f"unknown API key: check {key_advice}, or ask the operator of this server for a key")
        request.state.tenant = tenant

    return authenticate


def _own_routes(service: TrainingService, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/usage")
    async def usage(request: Request, session: str | None = None) -> dict[str, int]:
        if session is not None and service.store.session(request.state.tenant, session) is None:
            raise NotFound(f"there is no session {session}; list the sessions to see which exist")
        return asdict(service.store.usage(request.state.tenant, session))

    return router
