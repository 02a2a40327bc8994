"""Rows of a dataset that could not be used: the error that says why, and the record of them by reason and place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from cookbook.core.errors import DataError

PLACES_SHOWN = 3
"""Places named for each reason."""

REASONS_SHOWN = 12
"""Reasons named in one line."""


class BadRow(DataError):
    """A row that cannot be used. `problem` is the reason, in the same words for all rows that share it; `detail` is
    what the row has."""

    def __init__(self, problem: str, detail: str = "") -> None:
        super().__init__(f"{problem}: {detail}" if detail else problem)
        self.problem, self.detail = problem, detail


@dataclass(frozen=True)
class SkippedRow:
    """One row that was skipped, where it is ("train.jsonl:17"), and why."""

    split: str
    place: str
    problem: str
    detail: str = ""


@dataclass
class BadRows:
    """The rows that were skipped, in the order in which they were found."""

    rows: list[SkippedRow] = field(default_factory=list)

    def add(self, error: BadRow, place: str, split: str = "train") -> None:
        self.rows.append(SkippedRow(split, place, error.problem, error.detail))

    def update(self, other: BadRows) -> None:
        """Add those of another dataset."""
        self.rows += other.rows

    def __iter__(self) -> Iterator[SkippedRow]:
        return iter(self.rows)

    @property
    def counts(self) -> Counter[str]:
        """How many rows for each reason."""
        return Counter(row.problem for row in self.rows)

    @property
    def total(self) -> int:
        return len(self.rows)

    def of(self, split: str) -> int:
        """How many rows of a split."""
        return sum(row.split == split for row in self.rows)

    def __str__(self) -> str:
        """For example "9 rows skipped: 8 no assistant turn (train.jsonl:17, ...), 1 no messages (train.jsonl:4)"."""
        places: dict[str, list[str]] = {}
        for row in self.rows:
            places.setdefault(row.problem, []).append(row.place)
        reasons = []
        for problem, count in self.counts.most_common(REASONS_SHOWN):
            more = ", ..." if count > PLACES_SHOWN else ""
            reasons.append(f"{count} {problem} ({', '.join(places[problem][:PLACES_SHOWN])}{more})")
        if not reasons:
            return "no row skipped"
        if len(places) > REASONS_SHOWN:
            reasons.append("...")
        return f"{self.total} row{'s' * (self.total != 1)} skipped: {', '.join(reasons)}"
