"""Chat datasets, from rows in any of the usual layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.core.examples import Conversation
from cookbook.data.bad_rows import BadRow
from cookbook.data.chat.rows import parse_row
from cookbook.data.source import Source
from cookbook.data.template import Template


@dataclass(kw_only=True, eq=False, repr=False)
class ChatDataset(Source[Conversation]):
    """Conversations to train on. `cookbook.data.chat.rows.parse_row` says what a row may be.

    Args:
        prompt_column: Column of the prompt, in rows that have neither `messages` nor `conversations`.
        completion_column: Column of the answer to it.
        template: User message with `{column}` placeholders; then a chat is this message and the completion column.
        system: System message of every chat whose row has none.

    The other options and the errors are those of `Source`.
    """

    kind: ClassVar[str] = "chat"

    name: str = "chat"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    template: str | None = None
    system: str = ""

    def __post_init__(self) -> None:
        self._template = None if self.template is None else Template(self.template)
        super().__post_init__()

    def parse(self, row: Mapping[str, Any], place: str) -> Conversation:
        if self._template is not None:
            if row.get(self.completion_column) is None:
                known = ", ".join(map(repr, row)) or "none"
                raise BadRow("missing columns", f"no {self.completion_column!r}; the row has {known}")
            kept = {key: row[key] for key in ("system", "tools") if key in row}
            row = kept | {"prompt": self._template.fill(row), "completion": row[self.completion_column]}
            messages, tools = parse_row(row, system=self.system)
        else:
            messages, tools = parse_row(row, self.prompt_column, self.completion_column, self.system)
        return Conversation("", messages, tools, place)
