"""Preference pairs: a better and a worse completion of each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.core.examples import PreferencePair
from cookbook.data.chat.rows import parse_tools
from cookbook.data.preference.rows import get_number, parse_pair
from cookbook.data.source import Source


@dataclass(kw_only=True, eq=False, repr=False)
class PreferencePairs(Source[PreferencePair]):
    """Pairs from rows with a better and a worse completion. `parse_pair` says what a row may be.

    Args:
        prompt_column: Column of the prompt.
        chosen_column: Column of the better completion.
        rejected_column: Column of the worse completion.
        min_score_gap: Leave out pairs whose `score_chosen` is not this much above `score_rejected`; None keeps all and
            reads no scores.

    The other options and the errors are those of `Source`.
    """

    kind: ClassVar[str] = "pairs"

    name: str = "preference"
    prompt_column: str = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    min_score_gap: float | None = None

    def parse(self, row: Mapping[str, Any], place: str) -> PreferencePair | None:
        prompt, chosen, rejected = parse_pair(row, self.prompt_column, self.chosen_column, self.rejected_column)
        if self.min_score_gap is not None:
            gap = get_number(row, "score_chosen") - get_number(row, "score_rejected")
            if gap < self.min_score_gap:
                return None
        return PreferencePair("", prompt, chosen, rejected, place, parse_tools(row.get("tools")))
