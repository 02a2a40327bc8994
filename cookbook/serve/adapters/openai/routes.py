"""The endpoints for OpenAI clients, on base models, checkpoints and models in training.

`model` is the name of a base model, the `tinker://` path of a checkpoint, `<base model>;<path>`, or the id of a model
in training, which is sampled with its weights after all operations sent so far.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cookbook.core.errors import CookbookError
from cookbook.core.types import ModelInput, SampleResponse, SamplingParams
from cookbook.serve.adapters.openai.requests import ChatRequest, CompletionFields, TextRequest, parse
from cookbook.serve.adapters.openai.responses import (
    Choice,
    chat_logprobs,
    choice_of,
    message,
    model_entry,
    stream,
    text_logprobs,
)
from cookbook.serve.adapters.tinker.paths import SCHEME, format_path, parse_path
from cookbook.serve.core.checkpoints import CheckpointKey
from cookbook.serve.core.errors import Gone, InvalidRequest, ServiceError
from cookbook.serve.core.operations import Sample
from cookbook.serve.core.service import TrainingService
from cookbook.serve.core.sessions import Sampler, Session
from cookbook.serve.core.tickets import Ticket

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIXES = ("/v1", "/oai/api/v1")

SESSION_NAME = "openai"
"""The name of each tenant's session for requests on base models and checkpoints; it is created when needed."""


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
        self._sampler_numbers: dict[str | CheckpointKey, int] = {}

    async def models(self, request: Request) -> dict[str, Any]:
        tenant = request.state.tenant
        live = [id for session in self._service.sessions.live if session.tenant == tenant for id in session.models]
        saved = [format_path(checkpoint.key) for checkpoint in self._service.store.checkpoints(tenant)]
        return {"object": "list", "data": [model_entry(name) for name in (*self._service.base_models, *live, *saved)]}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        tenant = request.state.tenant
        if name.startswith(SCHEME):
            self._service.checkpoint(tenant, parse_path(name))
        elif ":train:" in name:
            self._service.model(tenant, name)
        else:
            self._service.check_base_model(name)
        return model_entry(name)

    async def chat(self, request: Request) -> Response:
        body = parse(ChatRequest, await request.body())
        sampler = await self._sampler(request.state.tenant, body.model)
        tokenizer = await self._tokenizer(request.state.tenant, sampler)
        try:
            text = str(tokenizer.apply_chat_template(body.messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program and can raise anything
            raise InvalidRequest(
                f"messages: the chat template of {sampler.base_model} refuses them: {error}"
            ) from error
        prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
        params = body.sampling_params(body.max_completion_tokens or body.max_tokens)
        choices, usage = await self._sample(request.state.tenant, sampler, tokenizer, prompt, body.n, params)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        if body.stream:
            deltas = [
                [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": choice.text},
                        "logprobs": chat_logprobs(choice, body.logprobs),
                    },
                    {"index": index, "delta": {}, "finish_reason": choice.finish_reason},
                ]
                for index, choice in enumerate(choices)
            ]
            return stream({**head, "object": "chat.completion.chunk"}, deltas, _streamed(usage, body))
        entries = [
            {
                "index": index,
                "message": message(choice),
                "finish_reason": choice.finish_reason,
                "logprobs": chat_logprobs(choice, body.logprobs),
            }
            for index, choice in enumerate(choices)
        ]
        return JSONResponse({**head, "object": "chat.completion", "choices": entries, "usage": usage})

    async def completion(self, request: Request) -> Response:
        body = parse(TextRequest, await request.body())
        sampler = await self._sampler(request.state.tenant, body.model)
        tokenizer = await self._tokenizer(request.state.tenant, sampler)
        prompt: list[int] = tokenizer(body.prompt)["input_ids"] if isinstance(body.prompt, str) else body.prompt  # pyright: ignore[reportAssignmentType]
        params = body.sampling_params(body.max_tokens)
        choices, usage = await self._sample(request.state.tenant, sampler, tokenizer, prompt, body.n, params)
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
                "logprobs": None if body.logprobs is None else text_logprobs(choice),
            }
            for index, choice in enumerate(choices)
        ]
        if body.stream:
            return stream(head, [[entry] for entry in entries], _streamed(usage, body))
        return JSONResponse({**head, "choices": entries, "usage": usage})

    async def _sampler(self, tenant: str, name: str) -> Sampler:
        base, _, path = name.rpartition(";")
        if path.startswith(SCHEME):
            checkpoint = self._service.checkpoint(tenant, parse_path(path))
            if base and base != checkpoint.base_model:
                raise InvalidRequest(
                    f"model {name!r}: {path} is a checkpoint of {checkpoint.base_model}, not of {base}"
                )
            return self._shared_sampler(tenant, checkpoint.key)
        if ":train:" in name:
            sampler, ready = self._service.live_sampler(tenant, name)
            await _result(ready)
            return sampler
        return self._shared_sampler(tenant, self._service.check_base_model(name))

    def _shared_sampler(self, tenant: str, source: str | CheckpointKey) -> Sampler:
        number = self._sampler_numbers.setdefault(source, len(self._sampler_numbers))
        return self._service.create_sampler(tenant, self._session(tenant).id, number, source)

    def _session(self, tenant: str) -> Session:
        known = self._sessions.get(tenant)
        if known is not None:
            try:
                return self._service.sessions.get(tenant, known)
            except Gone:  # it expired
                pass
        session = self._service.sessions.create(tenant, SESSION_NAME)
        self._sessions[tenant] = session.id
        return session

    async def _tokenizer(self, tenant: str, sampler: Sampler) -> PreTrainedTokenizerBase:
        name = sampler.base_model
        if name not in self._tokenizers:
            ticket_id = self._service.load_tokenizer(tenant, self._session(tenant).id, name)
            self._tokenizers[name] = await _result(self._service.sessions.ticket(tenant, ticket_id))
        return self._tokenizers[name]

    async def _sample(
        self,
        tenant: str,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        n: int,
        params: SamplingParams,
    ) -> tuple[list[Choice], dict[str, int]]:
        ticket_id = self._service.sample(tenant, sampler.id, None, Sample(ModelInput.from_ints(prompt), n, params))
        response: SampleResponse = await _result(self._service.sessions.ticket(tenant, ticket_id))
        stops = [stop for stop in params.stop if isinstance(stop, str)]
        sampled = sum(len(sequence.tokens) for sequence in response.sequences)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
        return [choice_of(tokenizer, sequence, stops) for sequence in response.sequences], usage


async def _result(ticket: Ticket) -> Any:
    """The result of a ticket. Raises ServiceError: the operation failed."""
    while not await ticket.wait(60):
        pass
    error = ticket.future.exception()
    if isinstance(error, ServiceError):
        raise error
    if isinstance(error, CookbookError):
        raise InvalidRequest(str(error)) from error
    return ticket.future.result()


def _streamed(usage: Mapping[str, int], body: CompletionFields) -> Mapping[str, int] | None:
    """The token counts, if the client asks for them in the stream."""
    return usage if body.stream_options is not None and body.stream_options.include_usage else None
