"""Kinds of components, with which a component that does not fit a loop is refused before anything runs.

A component says its kind in a class attribute `kind`. A loop says which kinds it takes where it names its components:

    dataset: Annotated[PromptDataset, Kinds("prompts")]
"""

from __future__ import annotations

from dataclasses import dataclass

DATASET_KINDS = {
    "prompts": "Example",
    "chat": "Conversation",
    "pairs": "PreferencePair",
    "labelled": "LabelledCompletion",
}
"""Kinds of datasets, and the class in `cookbook.core.examples` of their rows."""


@dataclass(frozen=True, init=False)
class Kinds:
    """The kinds of one component that a loop takes.

    Datasets are "prompts", "chat", "pairs" or "labelled". Losses are "builtin", "pairs" or "labelled"; a plain callable
    `(data, logprobs) -> (loss, metrics)` has no `kind` and is "custom". Advantages are "group" (also those without a
    `kind`), "returns" or "critic".
    """

    accepted: tuple[str, ...]

    def __init__(self, *accepted: str) -> None:
        object.__setattr__(self, "accepted", accepted)
