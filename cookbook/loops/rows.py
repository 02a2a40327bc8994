"""The rows that a run can use: checked when the run opens, left out and recorded where they cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Conversation, Example, LabelledCompletion, PreferencePair
from cookbook.data.bad_rows import BadRow, BadRows
from cookbook.data.kinds import bad_rows_of, on_bad_row_of
from cookbook.tracking.records import append_lines

T = TypeVar("T", bound=Example | Conversation | PreferencePair | LabelledCompletion)

CHECKED_AT_ONCE = 10_000
"""Splits of more rows, and those that make their rows on demand, are checked only as far as the run draws them."""

BAD_ROWS_FILE = "bad_rows.jsonl"
"""In the run's folder: a line for each row that was left out, with its place, the reason and what the row has."""


class RowCheck(Generic[T]):
    """Checks rows for one run.

    Args:
        dataset: rows that it had to skip itself are counted too; its `on_bad_row` decides on the others.
        problem: raises BadRow for a row that the run cannot use, given its split.
        run_dir: where `bad_rows.jsonl` is written.
    """

    def __init__(self, dataset: object, problem: Callable[[str, T], object], run_dir: Path) -> None:
        self._fails = on_bad_row_of(dataset) == "fail"
        self._problem = problem
        self._file = run_dir / BAD_ROWS_FILE
        self._file.unlink(missing_ok=True)
        self._written = 0
        self._found_on_reading = bad_rows_of(dataset)
        self.skipped = BadRows([*self._found_on_reading])

    def is_usable(self, split: str, row: T) -> bool:
        """Whether the run can use a row. One that it cannot use is recorded.

        Raises:
            DataError: it cannot, and `dataset.on_bad_row` is "fail".
        """
        try:
            self._problem(split, row)
        except BadRow as error:
            place = row.source or row.id
            if self._fails:
                raise DataError(f"{place}: {error}; fix the row, or set dataset.on_bad_row=skip") from error
            self.skipped.add(error, place, split)
            return False
        return True

    def first(self, split: str, rows: Sequence[T], count: int) -> list[T]:
        """The first `count` rows that the run can use. No further row is checked.

        Raises:
            DataError: there are rows, but none that the run can use.
        """
        usable: list[T] = []
        for index in range(len(rows)):
            if len(usable) == count:
                break
            if self.is_usable(split, rows[index]):
                usable.append(rows[index])
        if count and len(rows) and not usable:
            raise self.nothing_left(split)
        return usable

    def nothing_left(self, split: str) -> DataError:
        """The error that says that no row of a split can be used, and what is wrong with one of them."""
        self.write()
        last = next((row for row in reversed(self.skipped.rows) if row.split == split), None)
        detail = f"; {last.place}: {last.problem}: {last.detail}" if last else ""
        return DataError(f"dataset: no row of the {split} split can be used ({self.skipped}){detail}")

    def found(self, split: str, rows: Sequence[T]) -> int:
        """How many rows a split has, those included that could not be read."""
        return len(rows) + self._found_on_reading.of(split)

    def write(self) -> None:
        """Append the rows that were skipped since the last call to `bad_rows.jsonl`."""
        if lines := [asdict(row) for row in self.skipped.rows[self._written :]]:
            append_lines(self._file, lines)
            self._written += len(lines)


def is_checked_at_once(rows: Sequence[object]) -> bool:
    """Whether all rows of a split are checked when the run opens."""
    return isinstance(rows, list | tuple) and len(rows) <= CHECKED_AT_ONCE
