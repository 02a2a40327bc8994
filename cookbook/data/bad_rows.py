"""Rows that could not be used: counted by kind of fault, with the places of the first ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

EXAMPLES_SHOWN = 3
"""Places named for each kind of fault."""


@dataclass
class BadRows:
    """The rows that were skipped: how many of each kind of fault, and where the first ones stand."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, problem: str, place: str) -> None:
        self.counts[problem] += 1
        shown = self.places.setdefault(problem, [])
        if len(shown) < EXAMPLES_SHOWN:
            shown.append(place)

    def update(self, other: BadRows) -> None:
        """Count those of another dataset too."""
        self.counts.update(other.counts)
        for problem, places in other.places.items():
            self.places[problem] = [*self.places.get(problem, []), *places][:EXAMPLES_SHOWN]

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        """For example "9 rows skipped: 8 no assistant turn (train.jsonl:17, train.jsonl:20, ...), 1 no messages (train.jsonl:4)"."""
        kinds = []
        for problem, count in self.counts.most_common():
            more = ", ..." if count > len(self.places[problem]) else ""
            kinds.append(f"{count} {problem} ({', '.join(self.places[problem])}{more})")
        return f"{self.total} row{'s' * (self.total != 1)} skipped: {', '.join(kinds)}" if kinds else "no row skipped"
