"""The endpoints that train and sample. They translate requests and results; the core does the work.

The status codes follow how the SDK reacts to them. At a submission it retries 408, 409, 429 and 5xx, and raises for
any other error. But a refused submission has used up its sequence number, so an invalid operation is accepted and its
future fails. At a fetch the SDK asks again after 408 and 5xx, three times more after 400, and sends a sample again
after 410, so the fetch of a result that no longer exists is answered as a failed operation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from cookbook.core.errors import CookbookError
from cookbook.core.types import ForwardBackwardOutput, SampleResponse
from cookbook.serve.adapters.tinker import data, requests, wire
from cookbook.serve.adapters.tinker.paths import format_path
from cookbook.serve.adapters.tinker.requests import parse
from cookbook.serve.adapters.tinker.rest import rest_routes
from cookbook.serve.adapters.tinker.results import encode_protobuf, error_json, result_json
from cookbook.serve.core.errors import Gone, InvalidRequest, NotFound
from cookbook.serve.core.operations import CreateModelFromState, Forward, Rejected
from cookbook.serve.core.registry import session_of
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.tickets import Ticket

HOLD_S = 30.0
"""How long a fetch waits for the result; the SDK's own timeout is 45 s."""

OFF_LOOP_BYTES = 64 * 1024
"""From this size, bodies are read and results are written on a thread, so that other clients do not wait."""

METADATA_FIRST_BYTES = 1024 * 1024
"""From this size, a client that asks for it first gets only the size of a result, so that it can limit its memory."""

PREFIX = "/api/v1"

PROTOBUF = "application/x-protobuf"

_B = TypeVar("_B", bound=BaseModel)
_T = TypeVar("_T")


def tinker_routes(service: TrainingService) -> APIRouter:
    """The routes of the tinker API on `service`."""
    router = APIRouter(prefix=PREFIX)
    _add_session_routes(router, service)
    _add_training_routes(router, service)
    _add_sampling_routes(router, service)
    _add_future_routes(router, service)
    router.include_router(rest_routes(service))

    @router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def unknown(request: Request, path: str) -> None:
        raise NotFound(
            f"{request.method} {PREFIX}/{path} is not an endpoint of this server; docs/server.md lists the endpoints"
        )

    return router


def _add_session_routes(router: APIRouter, service: TrainingService) -> None:
    @router.post("/client/config")
    async def client_config() -> dict[str, Any]:
        return {}  # the SDK's defaults: no JWT, no compression, a poll per future

    @router.post("/client/dynamic_config")
    async def client_dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}  # and dropped

    @router.post("/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.CreateSessionBody)
        session = service.sessions.create(_tenant(request), body.display_name or "", body.user_metadata)
        return {"type": "create_session", "session_id": session.id}

    @router.post("/session_heartbeat")
    async def session_heartbeat(request: Request) -> dict[str, str]:
        body = await _body(request, requests.SessionBody)
        service.sessions.get(_tenant(request), body.session_id)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish", status_code=204)
    async def finish(session_id: str, request: Request) -> None:
        body = await _body(request, requests.FinishBody)
        service.sessions.stop(_tenant(request), session_id, ": ".join(filter(None, (body.reason.type, body.detail))))


def _add_training_routes(router: APIRouter, service: TrainingService) -> None:
    async def submit(
        request: Request, model_id: str, seq_id: int | None, operation: Callable[[], Any]
    ) -> dict[str, Any]:
        accepted = service.submit(_tenant(request), model_id, seq_id, _or_rejected(operation))
        return {"request_id": accepted, "model_id": model_id}

    @router.post("/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.CreateModelBody)
        operation = body.operation()
        request_id = service.create_model(
            _tenant(request), body.session_id, body.model_seq_id, operation, body.user_metadata
        )
        return {"request_id": request_id}

    @router.post("/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.ModelBody)
        record = service.model(_tenant(request), body.model_id).record
        return {
            "type": "get_info",
            "model_id": record.id,
            "model_name": record.base_model,
            "model_data": {"model_name": record.base_model, "tokenizer_id": record.base_model},
            "is_lora": record.rank is not None,
            "lora_rank": record.rank,
        }

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        raw = await request.body()
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequest("compressed bodies are not supported; send the body as it is")
        if request.headers.get("content-type", "").startswith(PROTOBUF):
            model_id, seq_id, operation = await _maybe_on_thread(len(raw), lambda: _forward_from_protobuf(raw))
        else:
            model_id, seq_id, operation = await _maybe_on_thread(len(raw), lambda: _forward_from_json(raw))
        if isinstance(operation, Forward):
            metadata = service.model(_tenant(request), model_id).record.metadata
            sparse = operation.backward and requests.flag(metadata, requests.SPARSE_LOGPROBS)
            operation = dataclasses.replace(operation, every_logprob=not sparse)
        return {"request_id": service.submit(_tenant(request), model_id, seq_id, operation), "model_id": model_id}

    @router.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.OptimStepBody)
        return await submit(request, body.model_id, body.seq_id, body.operation)

    @router.post("/save_weights")
    async def save_weights(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.SaveBody)
        return await submit(request, body.model_id, body.seq_id, body.state)

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.SaveBody)
        sequence = body.sampling_session_seq_id
        sampler_id = None if sequence is None else service.sampler_id(session_of(body.model_id), sequence)
        return await submit(request, body.model_id, body.seq_id, lambda: body.sampler(sampler_id))

    @router.post("/load_weights")
    async def load_weights(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.LoadWeightsBody)
        if body.creates:
            return _create_from_state(service, _tenant(request), body)
        if body.model_id is None:
            raise InvalidRequest(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id for a new model"
            )
        return await submit(request, body.model_id, body.seq_id, body.operation)


def _create_from_state(service: TrainingService, tenant: str, body: requests.LoadWeightsBody) -> dict[str, Any]:
    operation = body.operation()
    assert isinstance(operation, CreateModelFromState) and body.session_id is not None
    saved = service.checkpoint(tenant, operation.checkpoint)
    if body.base_model not in (None, saved.base_model):
        raise InvalidRequest(
            f"base_model {body.base_model!r}: {body.path} is a checkpoint of {saved.base_model!r}; remove base_model"
        )
    request_id = service.create_model(tenant, body.session_id, body.model_seq_id or 0, operation, body.user_metadata)
    return {"request_id": request_id}


def _add_sampling_routes(router: APIRouter, service: TrainingService) -> None:
    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        body = await _body(request, requests.CreateSamplerBody)
        sampler = service.create_sampler(_tenant(request), body.session_id, body.sampling_session_seq_id, body.source())
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str, request: Request) -> dict[str, Any]:
        sampler = service.sampler(_tenant(request), sampler_id)
        path = None if sampler.checkpoint is None else format_path(sampler.checkpoint)
        return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": path}

    @router.post("/asample")
    async def asample(request: Request) -> dict[str, Any]:
        body = await _body(request, data.SampleBody)
        operation = _or_rejected(body.operation)
        request_id = service.sample(_tenant(request), body.sampling_session_id, body.seq_id, operation)
        count = 1 if isinstance(operation, Rejected) else body.num_samples
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(count)]}


def _add_future_routes(router: APIRouter, service: TrainingService) -> None:
    @router.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        body = await _body(request, requests.RetrieveBody)
        try:
            ticket = service.sessions.ticket(_tenant(request), body.request_id)
        except Gone as error:
            return JSONResponse(error_json(error))
        if not await ticket.wait(HOLD_S):
            return JSONResponse({"type": "try_again", "request_id": ticket.id, "queue_state": "active"}, 408)
        accepts_protobuf = PROTOBUF in request.headers.get("accept", "")
        return await _result(ticket, accepts_protobuf, body.allow_metadata_only)

    @router.post("/cancel_future", status_code=204)
    async def cancel_future(request: Request) -> None:
        body = await _body(request, requests.RetrieveBody)
        service.sessions.cancel(_tenant(request), body.request_id)


async def _result(ticket: Ticket, accepts_protobuf: bool, allow_metadata_only: bool) -> Response:
    error = ticket.future.exception()
    if error is not None:
        ticket.fetched = time.monotonic()
        return JSONResponse(error_json(error))
    result = ticket.future.result()
    if not isinstance(result, ForwardBackwardOutput | SampleResponse):
        ticket.fetched = time.monotonic()
        return JSONResponse(result_json(ticket.operation, result))
    size = _size(result)
    if accepts_protobuf and allow_metadata_only and size >= METADATA_FIRST_BYTES:
        return JSONResponse({"status": "complete_metadata", "response_payload_size": size})
    ticket.fetched = time.monotonic()
    if accepts_protobuf:
        return Response(await _maybe_on_thread(size, lambda: encode_protobuf(result)), media_type=PROTOBUF)
    return await _maybe_on_thread(size, lambda: JSONResponse(result_json(ticket.operation, result)))


def _size(result: ForwardBackwardOutput | SampleResponse) -> int:
    """The bytes of a result's numbers, which is about its size on the wire."""
    if isinstance(result, ForwardBackwardOutput):
        return sum(array.nbytes for datum in result.loss_fn_outputs for array in datum.values())
    topk = sum(len(pairs or ()) for pairs in result.topk_prompt_logprobs or ())
    return 8 * (sum(len(sequence.tokens) for sequence in result.sequences) + len(result.prompt_logprobs or ()) + topk)


def _forward_from_protobuf(raw: bytes) -> tuple[str, int | None, Forward | Rejected]:
    message = wire.parse_forward_backward(raw)
    return message.model_id, message.seq_id, _or_rejected(lambda: wire.forward_operation(message))


def _forward_from_json(raw: bytes) -> tuple[str, int | None, Forward | Rejected]:
    body = parse(data.ForwardBackwardBody, raw)
    return body.model_id, body.seq_id, _or_rejected(body.operation)


def _or_rejected(operation: Callable[[], _T]) -> _T | Rejected:
    try:
        return operation()
    except CookbookError as error:
        return Rejected(str(error))


async def _body(request: Request, kind: type[_B]) -> _B:
    raw = await request.body()
    return await _maybe_on_thread(len(raw), lambda: parse(kind, raw))


async def _maybe_on_thread(size: int, work: Callable[[], _T]) -> _T:
    return work() if size < OFF_LOOP_BYTES else await asyncio.to_thread(work)


def _tenant(request: Request) -> str:
    return request.state.tenant
