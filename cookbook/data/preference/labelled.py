"""Labelled completions: single completions of a prompt, desirable or not (KTO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cookbook.core.examples import LabelledCompletion, PreferencePair
from cookbook.data.bad_rows import BadRow
from cookbook.data.chat.rows import parse_tools
from cookbook.data.generated.base import GeneratedSequence
from cookbook.data.kinds import PreferenceDataset, bad_rows_of, on_bad_row_of
from cookbook.data.preference.rows import get_column, parse_completion
from cookbook.data.source import Source

LABELS = {"true": True, "false": False, "1": True, "0": False}
"""Labels as texts, the only type that CSV files have."""


@dataclass(kw_only=True, eq=False, repr=False)
class LabelledCompletions(Source[LabelledCompletion]):
    """Completions from rows with a prompt, a completion and a label. `parse_completion` says what the first two may be.

    Args:
        prompt_column: Column of the prompt.
        completion_column: Column of the completion.
        label_column: Column of the label: true or false, 1 or 0, or one of these as text.

    The other options and the errors are those of `Source`.
    """

    kind: ClassVar[str] = "labelled"

    name: str = "kto"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    label_column: str = "label"

    def parse(self, row: Mapping[str, Any], place: str) -> LabelledCompletion:
        prompt, completion = parse_completion(row, self.prompt_column, self.completion_column)
        value = get_column(row, self.label_column)
        label = LABELS.get(value.lower()) if isinstance(value, str) else value
        if label not in (True, False):  # which 1 and 0 equal
            raise BadRow("malformed label", f"column {self.label_column!r} is {value!r:.60}, not true or false")
        return LabelledCompletion("", prompt, completion, bool(label), place, parse_tools(row.get("tools")))


class Unpaired:
    """Pairs as labelled completions.

    Item 2i is the chosen completion of pair i, desirable; item 2i + 1 the rejected one, undesirable.
    """

    kind: ClassVar[str] = "labelled"

    def __init__(self, pairs: PreferenceDataset) -> None:
        self.bad_rows, self.on_bad_row = bad_rows_of(pairs), on_bad_row_of(pairs)
        self.train: Sequence[LabelledCompletion] = _unpaired(pairs.train)
        self.test: Sequence[LabelledCompletion] = _unpaired(pairs.test)


def mismatched(batch: Sequence[LabelledCompletion]) -> list[LabelledCompletion]:
    """Prompts of a batch with the completions of other prompts, for KTO's baseline (Ethayarajh et al. 2024,
    arXiv:2402.01306, section 4.1). The label is that of the prompt's own completion.

    The completions are rotated: by one place or, where that gives a prompt one of its own completions, by the fewest
    places that do not. Where every rotation does, the best one is taken, and the examples in question are left out: all
    of them in a batch of one prompt.
    """
    best: list[LabelledCompletion] = []
    for shift in range(1, len(batch)):
        pairs = zip(batch, [*batch[shift:], *batch[:shift]], strict=True)
        others = [
            replace(one, id=f"{one.id}/mismatched", completion=other.completion)
            for one, other in pairs
            if one.prompt != other.prompt
        ]
        best = max(best, others, key=len)
        if len(best) == len(batch):
            break
    return best


def _unpaired(pairs: Sequence[PreferencePair]) -> Sequence[LabelledCompletion]:
    def make(index: int) -> LabelledCompletion:
        pair, desirable = pairs[index // 2], index % 2 == 0
        label, completion = ("chosen", pair.chosen) if desirable else ("rejected", pair.rejected)
        return LabelledCompletion(f"{pair.id}/{label}", pair.prompt, completion, desirable, pair.source, pair.tools)

    return GeneratedSequence(make, 2 * len(pairs))
