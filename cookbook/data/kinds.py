"""The kinds of datasets that loops train on: each has a train and a held-out split of one kind of row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cookbook.core.examples import Conversation, Example, LabelledCompletion, PreferencePair
from cookbook.data.bad_rows import BadRows


class PromptDataset(Protocol):
    """Problems to sample completions for, in two disjoint splits. Both are indexable; item `i` is always the same example."""

    @property
    def train(self) -> Sequence[Example]: ...

    @property
    def test(self) -> Sequence[Example]: ...

    @property
    def bad_rows(self) -> BadRows: ...


class ConversationDataset(Protocol):
    """Conversations in two disjoint splits. Both are indexable; item `i` is always the same conversation."""

    @property
    def train(self) -> Sequence[Conversation]: ...

    @property
    def test(self) -> Sequence[Conversation]: ...

    @property
    def bad_rows(self) -> BadRows:
        """What was skipped when the data were read; nothing for data that are made."""
        ...


class PreferenceDataset(Protocol):
    """Pairs in two disjoint splits. Both are indexable; item `i` is always the same pair."""

    @property
    def train(self) -> Sequence[PreferencePair]: ...

    @property
    def test(self) -> Sequence[PreferencePair]: ...

    @property
    def bad_rows(self) -> BadRows: ...


class LabelledDataset(Protocol):
    """Labelled completions in two disjoint splits. Both are indexable; item `i` is always the same completion."""

    @property
    def train(self) -> Sequence[LabelledCompletion]: ...

    @property
    def test(self) -> Sequence[LabelledCompletion]: ...

    @property
    def bad_rows(self) -> BadRows: ...
