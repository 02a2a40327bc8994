"""The OpenAI wire: models, chat completions and completions, on base models, checkpoints and weights in training.

The name of a model is that of a base model, a `tinker://` path of a checkpoint, `<base model>;<tinker path>`, or the id of a model in
training, whose weights are taken as they are after all operations sent so far. Field names follow OpenAI's API reference.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cookbook.core.errors import CookbookError
from cookbook.core.types import ModelInput, SampledSequence, SampleResponse, SamplingParams
from cookbook.serve.core.errors import Gone, InvalidRequest, ServiceError
from cookbook.serve.core.operations import LoadTokenizer, Sample
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.sessions import Sampler, Session
from cookbook.serve.core.tickets import Ticket

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIXES = ("/v1", "/oai/api/v1")

DEFAULT_MAX_TOKENS = 256

SESSION_NAME = "openai"
"""The session that requests for base models and checkpoints are billed to, one of each tenant; it is made when needed."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionFields(BaseModel):
    """What both kinds of completion take. Fields that would be ignored are refused, but for those that change nothing."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens or DEFAULT_MAX_TOKENS, self.temperature, self.top_p, stop=tuple(stop), seed=self.seed
        )


class ChatRequest(CompletionFields):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False


class TextRequest(CompletionFields):
    prompt: str | list[int]
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[0, 1] | None = None


@dataclass(frozen=True)
class Piece:
    """One token of a completion's text."""

    text: str
    logprob: float


@dataclass(frozen=True)
class Choice:
    """A completion as the wire has it: without its ending token, cut before the stop string that ended it."""

    text: str
    pieces: Sequence[Piece]
    finish_reason: Literal["stop", "length"]


def openai_routes(service: TrainingService) -> APIRouter:
    router = APIRouter()
    adapter = _Adapter(service)
    for prefix in PREFIXES:
        router.add_api_route(f"{prefix}/models", adapter.models, methods=["GET"])
        router.add_api_route(f"{prefix}/models/{{name:path}}", adapter.model, methods=["GET"])
        router.add_api_route(f"{prefix}/chat/completions", adapter.chat, methods=["POST"])
        router.add_api_route(f"{prefix}/completions", adapter.completion, methods=["POST"])
    return router


class _Adapter:
    def __init__(self, service: TrainingService) -> None:
        self._service = service
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self._sessions: dict[str, str] = {}
        self._samplers: dict[str, int] = {}

    async def models(self, request: Request) -> dict[str, Any]:
        tenant = request.state.tenant
        live = [id for session in self._service.live_sessions if session.tenant == tenant for id in session.models]
        saved = [checkpoint.path for checkpoint in self._service.store.checkpoints(tenant)]
        return {"object": "list", "data": [_model_entry(name) for name in (*self._service.base_models, *live, *saved)]}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        tenant = request.state.tenant
        if name.startswith("tinker://"):
            self._service.checkpoint(tenant, name)
        elif ":train:" in name:
            self._service.model(tenant, name)
        else:
            self._service.check_base_model(name)
        return _model_entry(name)

    async def chat(self, request: Request) -> Response:
        body = await _parse(ChatRequest, request)
        sampler = await self._sampler(request.state.tenant, body.model)
        tokenizer = await self._tokenizer(request.state.tenant, sampler)
        try:
            text = str(tokenizer.apply_chat_template(body.messages, add_generation_prompt=True, tokenize=False))
        except (
            Exception
        ) as error:  # a template is a program and may raise anything about messages that it does not expect
            raise InvalidRequest(
                f"messages: the chat template of {sampler.base_model} refuses them: {error}"
            ) from error
        prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
        params = body.sampling_params(body.max_completion_tokens or body.max_tokens)
        choices, usage = await self._draw(request.state.tenant, sampler, tokenizer, prompt, body.n, params)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        if body.stream:
            deltas = [
                [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": choice.text},
                        "logprobs": _chat_logprobs(choice, body.logprobs),
                    },
                    {"index": index, "delta": {}, "finish_reason": choice.finish_reason},
                ]
                for index, choice in enumerate(choices)
            ]
            return _stream({**head, "object": "chat.completion.chunk"}, deltas, usage, body.stream_options)
        entries = [
            {
                "index": index,
                "message": _message(choice),
                "finish_reason": choice.finish_reason,
                "logprobs": _chat_logprobs(choice, body.logprobs),
            }
            for index, choice in enumerate(choices)
        ]
        return JSONResponse({**head, "object": "chat.completion", "choices": entries, "usage": usage})

    async def completion(self, request: Request) -> Response:
        body = await _parse(TextRequest, request)
        sampler = await self._sampler(request.state.tenant, body.model)
        tokenizer = await self._tokenizer(request.state.tenant, sampler)
        prompt: list[int] = tokenizer(body.prompt)["input_ids"] if isinstance(body.prompt, str) else body.prompt  # pyright: ignore[reportAssignmentType]
        params = body.sampling_params(body.max_tokens)
        choices, usage = await self._draw(request.state.tenant, sampler, tokenizer, prompt, body.n, params)
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "object": "text_completion",
        }
        entries = [
            {
                "index": index,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "logprobs": None if body.logprobs is None else _text_logprobs(choice),
            }
            for index, choice in enumerate(choices)
        ]
        if body.stream:
            return _stream(head, [[entry] for entry in entries], usage, body.stream_options)
        return JSONResponse({**head, "choices": entries, "usage": usage})

    async def _sampler(self, tenant: str, name: str) -> Sampler:
        base, _, path = name.rpartition(";")
        if path.startswith("tinker://"):
            checkpoint = self._service.checkpoint(tenant, path)
            if base and base != checkpoint.base_model:
                raise InvalidRequest(
                    f"model {name!r}: {path} is a checkpoint of {checkpoint.base_model}, not of {base}"
                )
            return self._shared_sampler(tenant, path, model_path=path)
        if ":train:" in name:
            sampler, ready = self._service.live_sampler(tenant, name)
            await _result(ready)
            return sampler
        return self._shared_sampler(tenant, name, base_model=self._service.check_base_model(name))

    def _shared_sampler(
        self, tenant: str, name: str, base_model: str | None = None, model_path: str | None = None
    ) -> Sampler:
        number = self._samplers.setdefault(name, len(self._samplers))
        return self._service.create_sampler(tenant, self._session(tenant).id, number, base_model, model_path)

    def _session(self, tenant: str) -> Session:
        known = self._sessions.get(tenant)
        if known is not None:
            try:
                return self._service.session(tenant, known)
            except Gone:  # it had nothing to do for long enough to expire
                pass
        session = self._service.create_session(tenant, SESSION_NAME)
        self._sessions[tenant] = session.id
        return session

    async def _tokenizer(self, tenant: str, sampler: Sampler) -> PreTrainedTokenizerBase:
        name = sampler.base_model
        if name not in self._tokenizers:
            ticket_id = self._service.run(tenant, self._session(tenant).id, LoadTokenizer(name))
            self._tokenizers[name] = await _result(self._service.ticket(tenant, ticket_id))
        return self._tokenizers[name]

    async def _draw(
        self,
        tenant: str,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        n: int,
        params: SamplingParams,
    ) -> tuple[list[Choice], dict[str, int]]:
        ticket_id = self._service.sample(tenant, sampler.id, None, Sample(ModelInput.from_ints(prompt), n, params))
        response: SampleResponse = await _result(self._service.ticket(tenant, ticket_id))
        stops = [stop for stop in params.stop if isinstance(stop, str)]
        sampled = sum(len(sequence.tokens) for sequence in response.sequences)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
        return [_choice(tokenizer, sequence, stops) for sequence in response.sequences], usage


async def _result(ticket: Ticket) -> Any:
    """The result of a ticket; its error as a refusal of the request."""
    while not await ticket.wait(60):
        pass
    error = ticket.future.exception()
    if isinstance(error, ServiceError):
        raise error
    if isinstance(error, CookbookError):
        raise InvalidRequest(str(error)) from error
    return ticket.future.result()


async def _parse(kind: type[Any], request: Request) -> Any:
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        problem = (
            "is not supported by this server; leave it away" if first["type"] == "extra_forbidden" else first["msg"]
        )
        raise InvalidRequest(f"{where}: {problem}") from error


def _choice(tokenizer: PreTrainedTokenizerBase, sequence: SampledSequence, stops: Sequence[str]) -> Choice:
    tokens = sequence.tokens[:-1] if sequence.stop_reason == "eos" else sequence.tokens
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    cut = (
        min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))
        if sequence.stop_reason == "stop"
        else len(text)
    )
    pieces, length = [], 0
    for end, logprob in enumerate(sequence.logprobs[: len(tokens)], start=1):
        if length >= cut:
            break
        # By prefixes, since a token alone may be part of a character.
        grown = str(tokenizer.decode(tokens[:end], skip_special_tokens=True))
        pieces.append(Piece(grown[length:], logprob))
        length = len(grown)
    return Choice(text[:cut], pieces, "length" if sequence.stop_reason == "length" else "stop")


def _message(choice: Choice) -> dict[str, str]:
    return {"role": "assistant", "content": choice.text}


def _chat_logprobs(choice: Choice, wanted: bool) -> dict[str, Any] | None:
    if not wanted:
        return None
    content = [
        {"token": piece.text, "logprob": piece.logprob, "bytes": list(piece.text.encode()), "top_logprobs": []}
        for piece in choice.pieces
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(choice: Choice) -> dict[str, Any]:
    offsets, length = [], 0
    for piece in choice.pieces:
        offsets.append(length)
        length += len(piece.text)
    return {
        "tokens": [piece.text for piece in choice.pieces],
        "token_logprobs": [piece.logprob for piece in choice.pieces],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _stream(
    head: Mapping[str, Any],
    choices: Sequence[Sequence[Mapping[str, Any]]],
    usage: Mapping[str, int],
    options: StreamOptions | None,
) -> StreamingResponse:
    """Server-sent events. A completion is drawn whole, in a batch with others, so its text is one event."""
    with_usage = options is not None and options.include_usage

    async def events() -> AsyncIterator[str]:
        for chunks in choices:
            for chunk in chunks:
                yield _event(
                    {**head, "choices": [{"finish_reason": None, **chunk}], **({"usage": None} if with_usage else {})}
                )
        if with_usage:
            yield _event({**head, "choices": [], "usage": dict(usage)})
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "cookbook"}
