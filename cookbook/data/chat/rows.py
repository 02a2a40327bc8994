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
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Names of roles that datasets use, and the role of each."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's reasoning."""

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

    The first of these layouts whose columns have values; null is none:

    * `messages`: the OpenAI chat format, objects with `role` and `content`, and optionally `tool_calls`,
      `tool_call_id`, `name`, `reasoning_content` (or `reasoning`, `thinking`) and `weight`, 0 or 1;
    * `conversations`: the ShareGPT format, objects with `from` and `value`; the value of a `function_call` is the JSON
      text of a call, or of a list of them;
    * `prompt_column` and `completion_column`: each a text (a user and an assistant message) or a list of messages;
    * `instruction` and `output`: the Alpaca format, with `history`, a list of earlier questions and answers.

    To a prompt in the column `instruction` the text in the column `input` is appended on a new line.

    Beside all of them, `tools` is a list of function specifications, or the JSON text of one, and `system` a system
    message, which comes before the argument `system`. Neither replaces a system message among the messages.

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
    return tuple(messages), parse_tools(row.get("tools"))


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
    whole = ("messages", "conversations")
    parts = ((prompt_column, completion_column), ("instruction", "output"))
    for column in whole:
        if row.get(column):
            return _list(row[column], column)
    for first, last in parts:
        if row.get(first) is not None and row.get(last) is not None:
            prompt = _list(with_input(row, first), first, role_of_text="user")
            return [*history(row, first), *prompt, *_list(row[last], last, role_of_text="assistant")]
    for column in whole:
        if column in row:
            return _list(row[column], column)
    for first, last in parts:
        if first in row and last in row:
            empty = first if row[first] is None else last
            raise BadRow("no messages", f"column {empty!r} is None")
    raise BadRow(
        "missing columns",
        f"the row needs messages, or conversations, or {prompt_column} and {completion_column}; "
        f"it has {', '.join(row) or 'none'}",
    )


def with_input(row: Mapping[str, Any], column: str) -> Any:
    """The value of a prompt column; in the Alpaca format what the instruction is about is in a column of its own."""
    value, about = row[column], row.get("input")
    if column != "instruction" or about is None or about == "":
        return value
    if not isinstance(value, str) or not isinstance(about, str):
        raise BadRow("content is not text", f"columns 'instruction' and 'input' are {value!r:.40} and {about!r:.40}")
    return f"{value}\n{about}" if about.strip() else value


def history(row: Mapping[str, Any], column: str) -> list[Any]:
    """The messages before a prompt in the Alpaca format."""
    turns = row.get("history") if column == "instruction" else None
    if not turns:
        return []
    if not isinstance(turns, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        raise BadRow("malformed history", f"column 'history' is {turns!r:.60}, not a list of questions and answers")
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


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
    role = role_of(item)
    if role is None:
        raise BadRow(
            "unknown role", f"message {number} has the role {_name_of(item)!r:.60}; known are {', '.join(ROLES)}"
        )
    content = _first(item, "content", "value")
    if _name_of(item) == "function_call":
        calls, content = _calls_of_text(content, number), ""
    else:
        calls = [_tool_call(call, number) for call in _listed_calls(item, number)] if role == "assistant" else []
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRow("content is not text", f"message {number} ({role}) has the content {content!r:.60}")
    if role == "assistant" and not content.strip() and not calls:
        raise BadRow("empty assistant turn", f"message {number} has no text and calls no tool")
    message = Message(role=role, content=content)
    if calls:
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if isinstance(value := item.get(key), str):
            message[key] = value
    if role == "assistant" and isinstance(reasoning := _first(item, *_REASONING), str) and reasoning.strip():
        message["reasoning_content"] = reasoning
    if (weight := item.get("weight")) is not None:
        if weight not in (0, 1):
            raise BadRow("malformed weight", f"message {number} has the weight {weight!r:.60}, neither 0 nor 1")
        if role == "assistant" and weight == 0:
            message["weight"] = 0
    return message


def role_of(item: Mapping[str, Any]) -> str | None:
    """The role of a message in the OpenAI or the ShareGPT format; None where there is none of `ROLES`."""
    name = _name_of(item)
    return ROLES.get(name) if isinstance(name, str) else None


def _name_of(item: Mapping[str, Any]) -> Any:
    return _first(item, "role", "from")


def _first(item: Mapping[str, Any], *keys: str) -> Any:
    """The first of the values that is there."""
    return next((item[key] for key in keys if item.get(key) is not None), None)


def _listed_calls(item: Mapping[str, Any], number: int) -> list[Any]:
    calls = item.get("tool_calls")
    if calls is None or calls == []:
        legacy = item.get("function_call")
        return [] if legacy is None else [legacy]
    if not isinstance(calls, list):
        raise BadRow("malformed tool call", f"message {number} has the tool_calls {calls!r:.60}, not a list")
    return calls


def _calls_of_text(value: Any, number: int) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRow("malformed tool call", f"message {number} is a function_call of {value!r:.60}: {error}") from error
    return [_tool_call(call, number) for call in (calls if isinstance(calls, list) else [calls])]


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """A call in the OpenAI format; a bare object with name and arguments is wrapped into it."""
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
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


def parse_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The function specifications of a row, a list or its JSON text; a bare specification is wrapped as OpenAI's are.

    Raises:
        BadRow: it is neither.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow("malformed tools", f"column 'tools' is not valid JSON: {error}") from error
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow("malformed tools", f"column 'tools' is {value!r:.60}, not a list of function specifications")
    return tuple(
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in value
    )
