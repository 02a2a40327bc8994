"""The bodies of OpenAI requests. Field names follow OpenAI's API reference."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cookbook.core.types import SamplingParams
from cookbook.serve.core.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 256

_B = TypeVar("_B", bound=BaseModel)


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionFields(BaseModel):
    """The fields of both kinds of completion. An unknown field is refused, not ignored; `user` has no effect."""

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


def parse(kind: type[_B], body: bytes) -> _B:
    """The body as a `kind`. Raises InvalidRequest with one line about the first error."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        unknown = first["type"] == "extra_forbidden"
        problem = "is not supported by this server; remove it" if unknown else first["msg"]
        raise InvalidRequest(f"{where}: {problem}") from error
