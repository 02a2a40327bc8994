"""Rows of datasets: chat messages, problems with an answer, conversations, and preferences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict


class Message(TypedDict):
    """One chat message in the OpenAI chat format. A tool's result has the role "tool". An assistant's message of
    `weight` 0 is context: it is not trained on."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    weight: NotRequired[int]


@dataclass(frozen=True)
class Conversation:
    """A chat to train on; its last message is the assistant's. `tools` are the functions it may call, in the OpenAI
    format.

    `id` is stable across runs; `source` says where the chat is ("train.jsonl:17"), "" if it was generated.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Example:
    """One problem of a dataset.

    `id` is stable across runs; `answer` is what a reward compares with (for GSM8K the gold number as text); `source` is
    as that of a `Conversation`.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of one prompt, `chosen` better than `rejected`; each begins and ends with an assistant's message.

    `id`, `source` and `tools` are as those of a `Conversation`.
    """

    id: str
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class LabelledCompletion:
    """One completion of a prompt, and whether it is desirable; otherwise as `PreferencePair`."""

    id: str
    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    desirable: bool
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
