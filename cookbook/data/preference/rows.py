"""Parsers of preference rows: the usual layouts of prompts and completions, to checked messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cookbook.core.examples import Message
from cookbook.data.bad_rows import BadRow
from cookbook.data.chat.rows import history, parse_row, role_of, with_input

Messages = tuple[Message, ...]

HH_TURN = re.compile(r"\n\n(Human|Assistant):")
"""Beginning of a turn in HH-RLHF's texts."""


def parse_pair(
    row: Mapping[str, Any],
    prompt_column: str = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
) -> tuple[Messages, Messages, Messages]:
    """Prompt, chosen and rejected messages of a row. What its two completions may be:

    * lists of messages that are whole conversations; a prompt column beside them is not read, since they contain it
      (UltraFeedback);
    * lists of messages that begin with the assistant's, or texts, and a prompt column: a text or a list of messages;
    * texts "\\n\\nHuman: ...\\n\\nAssistant: ..." and no prompt column (HH-RLHF): whole conversations.

    The prompt is the longest beginning that the two conversations share; what follows it are the completions.

    Raises:
        BadRow: a missing column, a conversation that `cookbook.data.chat.rows.parse_row` refuses, equal completions,
            one that is the beginning of the other, or prompts that differ.
    """
    conversations = []
    for column in (chosen_column, rejected_column):
        value, prompt = get_column(row, column), _prompt(row, prompt_column)
        if isinstance(value, str) and prompt is None:
            items = _hh_items(value, column)
        else:
            items = _answer_items(value, column)
            if prompt is not None and _is_assistants(items[0]):
                items = [*prompt, *items]
        conversations.append(_checked(row, items))
    chosen, rejected = conversations
    if chosen == rejected:
        raise BadRow("chosen equals rejected", f"columns {chosen_column!r} and {rejected_column!r}")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    for column, conversation in ((chosen_column, chosen), (rejected_column, rejected)):
        if shared == len(conversation):
            raise BadRow("no completion", f"{column!r} is the beginning of the other conversation")
        role = conversation[shared]["role"]
        if role != "assistant":
            raise BadRow(
                "prompts differ",
                f"{chosen_column!r} and {rejected_column!r} part at message {shared + 1}, one of {role}",
            )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def parse_completion(
    row: Mapping[str, Any], prompt_column: str = "prompt", completion_column: str = "completion"
) -> tuple[Messages, Messages]:
    """Prompt and completion of a row, each a text or a list of messages.

    Raises:
        BadRow: a missing column, a conversation that `cookbook.data.chat.rows.parse_row` refuses, or a completion that
            does not begin with the assistant's message.
    """
    prompt = _prompt(row, prompt_column) or _prompt_items(get_column(row, prompt_column), prompt_column)
    completion = _answer_items(get_column(row, completion_column), completion_column)
    messages = _checked(row, [*prompt, *completion])
    length = len(messages) - len(completion)
    if messages[length]["role"] != "assistant":
        raise BadRow(
            "roles out of order", f"column {completion_column!r} begins with a {messages[length]['role']} message"
        )
    return messages[:length], messages[length:]


def get_column(row: Mapping[str, Any], column: str) -> Any:
    if row.get(column) is None:
        raise BadRow("missing columns", f"no {column!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    return row[column]


def get_number(row: Mapping[str, Any], column: str) -> float:
    value = get_column(row, column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow("malformed score", f"column {column!r} is {value!r:.60}, not a number")
    return value


def _prompt(row: Mapping[str, Any], prompt_column: str) -> list[Any] | None:
    """The messages of the prompt: those of the prompt column or, where that is missing, of an Alpaca instruction or a
    ShareGPT conversation. None: the row has no prompt of its own."""
    for column in (prompt_column, "instruction", "conversations"):
        if row.get(column) is not None:
            return [*history(row, column), *_prompt_items(with_input(row, column), column)]
    return None


def _prompt_items(value: Any, column: str) -> list[Any]:
    """A list of messages, a user's text, or text in HH form up to an open "Assistant:"."""
    if not isinstance(value, str):
        return _list(value, column)
    if not value.strip():
        raise BadRow("no prompt", f"column {column!r} is empty")
    if HH_TURN.match(value):
        return _hh_items(re.sub(r"\n\nAssistant:\s*$", "", value), column)
    return [{"role": "user", "content": value}]


def _answer_items(value: Any, column: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return [value] if isinstance(value, Mapping) else _list(value, column)


def _list(value: Any, column: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadRow("no messages", f"column {column!r} is {value!r:.60}, neither text nor a list of messages")
    return value


def _is_assistants(item: Any) -> bool:
    return isinstance(item, Mapping) and role_of(item) == "assistant"


def _hh_items(text: str, column: str) -> list[Any]:
    before, *turns = HH_TURN.split(text)
    if before.strip() or not turns:
        raise BadRow(
            "not in HH form",
            rf"column {column!r} is {text!r:.40}; without a prompt column it must begin with '\n\nHuman:'",
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(turns[0::2], turns[1::2], strict=True)
    ]


def _checked(row: Mapping[str, Any], items: list[Any]) -> Messages:
    messages, _ = parse_row({"messages": items, "system": row.get("system")})
    return messages
