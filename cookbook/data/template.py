"""Text with {column} placeholders, filled in from a row."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from cookbook.core.errors import DataError
from cookbook.data.bad_rows import BadRow


class Template:
    """A text in which `{column}` stands for a row's value in that column; `{{` and `}}` are braces.

    Args:
        text: the template.
        option: the option that it came from, for messages.

    Raises:
        DataError: unbalanced braces, something else than a column's name in them, or no placeholder at all.
    """

    def __init__(self, text: str, option: str = "dataset.template") -> None:
        self._option = option
        wrong = f"{option}={text!r:.80}"
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise DataError(f"{wrong}: {error}; write {{{{ and }}}} for braces that belong to the text") from error
        for _, column, format_spec, conversion in parts:
            if column is not None and (not column.strip() or format_spec or conversion):
                raise DataError(
                    f"{wrong}: braces must hold the name of a column, such as {{question}}; "
                    "write {{ and }} for braces that belong to the text"
                )
        self._parts = [(literal, column) for literal, column, _, _ in parts]
        if not any(column for _, column in self._parts):
            raise DataError(
                f"{wrong}: has no placeholder, so all prompts would be equal; add a column, such as {{question}}"
            )

    def fill(self, row: Mapping[str, Any]) -> str:
        """The text for a row.

        Raises:
            BadRow: a column is missing or empty (null), or is neither a text nor a number.
        """
        return "".join(
            literal + ("" if column is None else self._value(row, column)) for literal, column in self._parts
        )

    def _value(self, row: Mapping[str, Any], column: str) -> str:
        value = row.get(column)
        if value is None:
            known = ", ".join(map(repr, row)) or "none"
            raise BadRow("missing columns", f"{self._option} uses {{{column}}}; the row has {known}")
        if not isinstance(value, str | int | float):
            raise BadRow("not a text", f"{self._option} uses {{{column}}}, which is {value!r:.60}")
        return str(value)
