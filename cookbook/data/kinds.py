"""Protocols of the datasets that loops train on. Each has a train and a held-out split of one type of item.

Three attributes are optional. `kind` names the kind (`cookbook.core.kinds`), so that a dataset that does not fit a loop
is refused before anything runs. `bad_rows` has the rows that were skipped. `on_bad_row` says what a run does with a row
that it cannot use: "skip" it (the default), or "fail".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from cookbook.core.examples import Conversation, Example, LabelledCompletion, PreferencePair
from cookbook.data.bad_rows import BadRows


class PromptDataset(Protocol):
    """Problems to sample completions for, in two disjoint splits. Item `i` is always the same example."""

    @property
    def train(self) -> Sequence[Example]: ...

    @property
    def test(self) -> Sequence[Example]: ...


class ConversationDataset(Protocol):
    """Conversations in two disjoint splits. Item `i` is always the same conversation."""

    @property
    def train(self) -> Sequence[Conversation]: ...

    @property
    def test(self) -> Sequence[Conversation]: ...


class PreferenceDataset(Protocol):
    """Preference pairs in two disjoint splits. Item `i` is always the same pair."""

    @property
    def train(self) -> Sequence[PreferencePair]: ...

    @property
    def test(self) -> Sequence[PreferencePair]: ...


class LabelledDataset(Protocol):
    """Labelled completions in two disjoint splits. Item `i` is always the same completion."""

    @property
    def train(self) -> Sequence[LabelledCompletion]: ...

    @property
    def test(self) -> Sequence[LabelledCompletion]: ...


def bad_rows_of(dataset: object) -> BadRows:
    """The rows that a dataset skipped: its attribute `bad_rows`, or none if it does not count them."""
    return getattr(dataset, "bad_rows", BadRows())


def on_bad_row_of(dataset: object) -> Literal["skip", "fail"]:
    """What a row that cannot be used does to a run: the dataset's attribute `on_bad_row`, or "skip"."""
    return getattr(dataset, "on_bad_row", "skip")
