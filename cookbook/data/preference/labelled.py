"""Labelled completions: single completions of a prompt, desirable or not (KTO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cookbook.core.errors import DataError
from cookbook.core.examples import LabelledCompletion, PreferencePair
from cookbook.data.bad_rows import BadRow
from cookbook.data.generated.base import GeneratedSequence
from cookbook.data.kinds import PreferenceDataset, bad_rows_of
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
        return LabelledCompletion("", prompt, completion, bool(label), place)


class Unpaired:
    """Pairs as labelled completions.

    Item 2i is the chosen completion of pair i, desirable; item 2i + 1 the rejected one, undesirable.
    """

    kind: ClassVar[str] = "labelled"

    def __init__(self, pairs: PreferenceDataset) -> None:
        self.bad_rows = bad_rows_of(pairs)
        self.train: Sequence[LabelledCompletion] = _unpaired(pairs.train)
        self.test: Sequence[LabelledCompletion] = _unpaired(pairs.test)


def mismatched(batch: Sequence[LabelledCompletion]) -> list[LabelledCompletion]:
    """Each prompt of a batch with the completion of the next one, the last with that of the first.

    KTO's baseline is estimated from these (Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1). Their label is that
    of the prompt's own completion.

    Raises:
        DataError: the batch has fewer than two examples.
    """
    if len(batch) < 2:
        raise DataError(
            f"KTO's mismatched baseline needs 2 or more examples in a batch, not {len(batch)}; "
            "increase loop.batch_size or set loss.baseline=zero"
        )
    return [
        LabelledCompletion(f"{one.id}/mismatched", one.prompt, other.completion, one.desirable, one.source)
        for one, other in zip(batch, [*batch[1:], batch[0]], strict=True)
    ]


def _unpaired(pairs: Sequence[PreferencePair]) -> Sequence[LabelledCompletion]:
    def make(index: int) -> LabelledCompletion:
        pair, desirable = pairs[index // 2], index % 2 == 0
        label, completion = ("chosen", pair.chosen) if desirable else ("rejected", pair.rejected)
        return LabelledCompletion(f"{pair.id}/{label}", pair.prompt, completion, desirable, pair.source)

    return GeneratedSequence(make, 2 * len(pairs))
