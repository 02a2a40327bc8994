"""The endpoints that list things: capabilities, training runs, checkpoints, sessions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request

from cookbook.serve.adapters.tinker.paths import SCHEME, format_path, parse_path
from cookbook.serve.adapters.tinker.requests import LORA_ALPHA, SPARSE_LOGPROBS, PathBody, TtlBody, parse
from cookbook.serve.core.errors import NotFound
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.store import CheckpointRecord, ModelRecord

_T = TypeVar("_T")

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


def rest_routes(service: TrainingService) -> APIRouter:
    router = APIRouter()
    _add_run_routes(router, service)
    _add_checkpoint_routes(router, service)
    _add_session_routes(router, service)

    @router.get("/get_server_capabilities")
    async def get_server_capabilities() -> dict[str, Any]:
        models = [{"model_name": name, "trainable": True, "sampleable": True} for name in service.base_models]
        return {"supported_models": models, "cookbook": _capabilities(service)}

    return router


def _capabilities(service: TrainingService) -> dict[str, Any]:
    """The backend's `Capabilities`, for this project's own client; the SDK reads only the models."""
    capabilities = dataclasses.asdict(service.capabilities)
    return {
        **capabilities,
        "losses": sorted(service.capabilities.losses),
        "soft_targets": True,
        "lora_alpha": LORA_ALPHA,
        "user_metadata": ["full_parameter", "lora_alpha", "role", SPARSE_LOGPROBS],
    }


def _add_run_routes(router: APIRouter, service: TrainingService) -> None:
    def run_json(tenant: str, record: ModelRecord) -> dict[str, Any]:
        checkpoints = service.store.checkpoints(tenant, record.id)
        newest = {
            kind: next((c for c in checkpoints if c.kind == kind), None) for kind in ("weights", "sampler_weights")
        }
        return {
            "training_run_id": record.id,
            "base_model": record.base_model,
            "model_owner": tenant,
            "is_lora": record.rank is not None,
            "lora_rank": record.rank,
            "last_request_time": _time(record.updated),
            "last_checkpoint": newest["weights"] and _checkpoint_json(newest["weights"]),
            "last_sampler_checkpoint": newest["sampler_weights"] and _checkpoint_json(newest["sampler_weights"]),
            "user_metadata": _texts(record.metadata),
        }

    @router.get("/training_runs")
    async def training_runs(request: Request, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        tenant = request.state.tenant
        page, cursor = _page(service.store.models(tenant), limit, offset)
        return {"training_runs": [run_json(tenant, record) for record in page], "cursor": cursor}

    @router.get("/training_runs/{run_id}")
    async def training_run(request: Request, run_id: str) -> dict[str, Any]:
        record = service.store.model(request.state.tenant, run_id)
        if record is None:
            raise NotFound(f"there is no training run {run_id}; list the training runs to see which exist")
        return run_json(request.state.tenant, record)


def _add_checkpoint_routes(router: APIRouter, service: TrainingService) -> None:
    def checkpoint(request: Request, run_id: str, checkpoint_id: str) -> CheckpointRecord:
        return service.checkpoint(request.state.tenant, parse_path(f"{SCHEME}{run_id}/{checkpoint_id}"))

    @router.get("/checkpoints")
    async def all_checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        page, cursor = _page(service.store.checkpoints(request.state.tenant), limit, offset)
        return {"checkpoints": [_checkpoint_json(record) for record in page], "cursor": cursor}

    @router.get("/training_runs/{run_id}/checkpoints")
    async def checkpoints_of_run(request: Request, run_id: str) -> dict[str, Any]:
        return {
            "checkpoints": [
                _checkpoint_json(record) for record in service.store.checkpoints(request.state.tenant, run_id)
            ]
        }

    @router.post("/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        body = parse(PathBody, await request.body())
        record = service.checkpoint(request.state.tenant, parse_path(body.tinker_path))
        layers = {"train_attn": True, "train_mlp": True, "train_unembed": False}
        return {"base_model": record.base_model, "is_lora": record.rank is not None, "lora_rank": record.rank, **layers}

    # Before the deletion, whose checkpoint id matches any path.
    @router.put("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl", status_code=204)
    async def set_ttl(request: Request, run_id: str, checkpoint_id: str) -> None:
        record, ttl_s = checkpoint(request, run_id, checkpoint_id), parse(TtlBody, await request.body()).ttl_seconds
        service.store.put_checkpoint(
            dataclasses.replace(record, expires=None if ttl_s is None else time.time() + ttl_s)
        )

    @router.api_route("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/publish", methods=["POST", "DELETE"])
    async def publish(request: Request, run_id: str, checkpoint_id: str) -> None:
        raise NotFound(
            "publishing is not supported: only its own tenant can see a checkpoint; share its folder instead"
        )

    @router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}", status_code=204)
    async def delete(request: Request, run_id: str, checkpoint_id: str) -> None:
        service.delete_checkpoint(request.state.tenant, checkpoint(request, run_id, checkpoint_id).key)


def _add_session_routes(router: APIRouter, service: TrainingService) -> None:
    @router.get("/sessions")
    async def sessions(request: Request, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        page, _ = _page(service.store.sessions(request.state.tenant), limit, offset)
        return {"sessions": [record.id for record in page]}

    @router.get("/sessions/{session_id}")
    async def session(request: Request, session_id: str) -> dict[str, Any]:
        record = service.store.session(request.state.tenant, session_id)
        if record is None:
            raise NotFound(f"there is no session {session_id}; list the sessions to see which exist")
        live = next((live for live in service.sessions.live if live.id == session_id), None)
        return {
            "training_run_ids": [model.id for model in service.store.models(request.state.tenant, session_id)],
            "sampler_ids": [] if live is None else [*live.samplers],
            "user_metadata": _texts(record.metadata),
            "display_name": record.name or None,
            "status": record.state,
            "status_reason": record.reason,
        }


def _checkpoint_json(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": "training" if record.kind == "weights" else "sampler",
        "time": _time(record.created),
        "tinker_path": format_path(record.key),
        "size_bytes": record.bytes,
        "public": False,
        "expires_at": None if record.expires is None else _time(record.expires),
    }


def _page(records: Sequence[_T], limit: int, offset: int) -> tuple[Sequence[_T], dict[str, int]]:
    return records[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(records)}


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in metadata.items()}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
