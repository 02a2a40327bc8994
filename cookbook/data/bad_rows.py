"""Rows of a dataset that could not be used: the error that says why, and the count of them by reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cookbook.core.errors import DataError

PLACES_SHOWN = 3
"""Places named for each reason."""


class BadRow(DataError):
    """A row that cannot be used. `problem` is the reason, in the same words for all rows that share it."""

    def __init__(self, problem: str, detail: str = "") -> None:
        super().__init__(f"{problem}: {detail}" if detail else problem)
        self.problem = problem


@dataclass
class BadRows:
    """The rows that were skipped: how many for each reason, and where the first ones are."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, problem: str, place: str) -> None:
        self.counts[problem] += 1
        shown = self.places.setdefault(problem, [])
        if len(shown) < PLACES_SHOWN:
            shown.append(place)

    def update(self, other: BadRows) -> None:
        """Add those of another dataset."""
        self.counts.update(other.counts)
        for problem, places in other.places.items():
            self.places[problem] = [*self.places.get(problem, []), *places][:PLACES_SHOWN]

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        """For example "9 rows skipped: 8 no assistant turn (train.jsonl:17, ...), 1 no messages (train.jsonl:4)"."""
        reasons = []
        for problem, count in self.counts.most_common():
            more = ", ..." if count > len(self.places[problem]) else ""
            reasons.append(f"{count} {problem} ({', '.join(self.places[problem])}{more})")
        if not reasons:
            return "no row skipped"
        return f"{self.total} row{'s' * (self.total != 1)} skipped: {', '.join(reasons)}"
