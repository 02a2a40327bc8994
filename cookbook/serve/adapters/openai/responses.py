"""The answers to OpenAI clients: choices, logprobs, streams. Field names follow OpenAI's API reference."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastapi.responses import StreamingResponse

from cookbook.core.types import SampledSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Piece:
    """One token of a completion."""

    text: str
    logprob: float


@dataclass(frozen=True)
class Choice:
    """A completion on the wire: without the end-of-sequence token, cut before the stop string that ended it."""

    text: str
    pieces: Sequence[Piece]
    finish_reason: Literal["stop", "length"]


def choice_of(tokenizer: PreTrainedTokenizerBase, sequence: SampledSequence, stops: Sequence[str]) -> Choice:
    """The completion that a sequence is. `stops` are the stop strings of the request."""
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
        # Decode prefixes, since one token can be a part of a character.
        grown = str(tokenizer.decode(tokens[:end], skip_special_tokens=True))
        pieces.append(Piece(grown[length:], logprob))
        length = len(grown)
    return Choice(text[:cut], pieces, "length" if sequence.stop_reason == "length" else "stop")


def message(choice: Choice) -> dict[str, str]:
    return {"role": "assistant", "content": choice.text}


def chat_logprobs(choice: Choice, wanted: bool) -> dict[str, Any] | None:
    if not wanted:
        return None
    content = [
        {"token": piece.text, "logprob": piece.logprob, "bytes": list(piece.text.encode()), "top_logprobs": []}
        for piece in choice.pieces
    ]
    return {"content": content, "refusal": None}


def text_logprobs(choice: Choice) -> dict[str, Any]:
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


def stream(
    head: Mapping[str, Any],
    choices: Sequence[Sequence[Mapping[str, Any]]],
    usage: Mapping[str, int] | None,
) -> StreamingResponse:
    """Server-sent events: the chunks of each choice, then `usage` if given.

    A completion is sampled as a whole, in a batch with others, so its text is one event.
    """

    async def events() -> AsyncIterator[str]:
        for chunks in choices:
            for chunk in chunks:
                yield _event(
                    {
                        **head,
                        "choices": [{"finish_reason": None, **chunk}],
                        **({} if usage is None else {"usage": None}),
                    }
                )
        if usage is not None:
            yield _event({**head, "choices": [], "usage": dict(usage)})
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "cookbook"}
