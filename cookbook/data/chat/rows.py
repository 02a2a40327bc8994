"""Parsers of chat rows: from the usual column layouts to checked messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cookbook.core.examples import Message
from cookbook.data.bad_rows import BadRow

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
"""Names of roles that datasets use, and the role of each."""

_FOLLOWS = {
    "system": ("",),
    "user": ("", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""The roles that each role may follow; "" is the beginning."""


def parse_row(
    row: Mapping[str, Any], prompt_column: str = "prompt", completion_column: str = "completion", system: str = ""
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """The messages and the tools of a row.

    The first of these layouts whose columns the row has:

    * `messages`: the OpenAI chat format, objects with `role` and `content`, and optionally `tool_calls`,
      `tool_call_id`, `name` and `reasoning_content`;
    * `conversations`: the ShareGPT format, objects with `from` and `value`;
    * `prompt_column` and `completion_column`: each a text (a user and an assistant message) or a list of messages.

    Beside them, `tools` is a list of function specifications, or the JSON text of one, and `system` a system message,
    which comes before the argument `system`. Neither replaces a system message among the messages.

    Raises:
        BadRow: no such columns, no messages, an unknown role, content that is not text, an empty assistant turn, a
            malformed tool call, roles in an impossible order, or an end that is not an assistant turn.
    """
    own = row.get("system")
    system = own if isinstance(own, str) and own.strip() else system
    messages = parse_messages(_items(row, prompt_column, completion_column), system)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise BadRow("no assistant turn", f"there are only {' and '.join(dict.fromkeys(roles))} messages")
    if roles[-1] != "assistant":
        raise BadRow("no assistant turn at the end", f"the last message has the role {roles[-1]}")
    return tuple(messages), _tools(row.get("tools"))


def parse_messages(items: Sequence[Any], system: str = "") -> list[Message]:
    """Messages in the OpenAI or the ShareGPT format, after `system` if they have no system message.

    Raises:
        BadRow: an unknown role, content that is not text, an empty assistant turn, a malformed tool call, or roles in
            an impossible order.
    """
    messages = [_message(item, number) for number, item in enumerate(items, start=1)]
    if system.strip() and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, Message(role="system", content=system))
    _check_order(messages)
    return messages


def _items(row: Mapping[str, Any], prompt_column: str, completion_column: str) -> list[Any]:
    """The row's messages, not yet checked."""
    for column in ("messages", "conversations"):
        if column in row:
            return _list(row[column], column)
    if prompt_column in row and completion_column in row:
        prompt = _list(row[prompt_column], prompt_column, role_of_text="user")
        return [*prompt, *_list(row[completion_column], completion_column, role_of_text="assistant")]
    raise BadRow(
        "missing columns",
        f"the row needs messages, or conversations, or {prompt_column} and {completion_column}; "
        f"it has {', '.join(row) or 'none'}",
    )


def _list(value: Any, column: str, role_of_text: str | None = None) -> list[Any]:
    if role_of_text is not None and isinstance(value, str):
        return [{"role": role_of_text, "content": value}]
    if not value:
        raise BadRow("no messages", f"column {column!r} is {value!r}")
    if not isinstance(value, list):
        raise BadRow("no messages", f"column {column!r} is {value!r:.60}, not a list of messages")
    return value


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, Mapping):
        raise BadRow("malformed message", f"message {number} is {item!r:.60}, not an object with role and content")
    name = item.get("role", item.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow("unknown role", f"message {number} has the role {name!r:.60}; known are {', '.join(ROLES)}")
    calls = [_tool_call(call, number) for call in item.get("tool_calls") or ()] if role == "assistant" else []
    content = item.get("content", item.get("value"))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRow("content is not text", f"message {number} ({role}) has the content {content!r:.60}")
    if role == "assistant" and not content.strip() and not calls:
        raise BadRow("empty assistant turn", f"message {number} has no text and calls no tool")
    message = Message(role=role, content=content)
    if calls:
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name", "reasoning_content"):
        if isinstance(value := item.get(key), str):
            message[key] = value
    return message


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """A call in the OpenAI format; a bare object with name and arguments is wrapped into it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not (
        isinstance(function, Mapping)
        and isinstance(name := function.get("name"), str)
        and name
        and isinstance(arguments := function.get("arguments"), str | Mapping)
    ):
        raise BadRow(
            "malformed tool call", f"message {number} has {call!r:.80}; a call needs a function with name and arguments"
        )
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_order(messages: Sequence[Message]) -> None:
    roles = [message["role"] for message in messages]
    for number, (before, role) in enumerate(zip(["", *roles], roles, strict=False), start=1):
        if before not in _FOLLOWS[role]:
            where = f"comes right after {before}" if before else "comes first"
            raise BadRow(
                "roles out of order",
                f"message {number} ({role}) {where}; the order is system, user, assistant, user, ...",
            )


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow("malformed tools", f"column 'tools' is not valid JSON: {error}") from error
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow("malformed tools", f"column 'tools' is {value!r:.60}, not a list of function specifications")
    return tuple(value)
