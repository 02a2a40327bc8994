"""Conversations made from problems and their worked answers, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cookbook.core.examples import Conversation, Example
from cookbook.data.bad_rows import BadRow
from cookbook.data.generated.base import GeneratedSequence
from cookbook.data.kinds import PromptDataset, bad_rows_of, on_bad_row_of


class WorkedAnswers:
    """Each problem of a prompt dataset followed by `extra["solution"]` as the assistant's answer.

    Args:
        problems: a dataset whose examples have a worked answer, such as word problems or GSM8K.
        train_size: keep only the first conversations of `train`; None keeps all.
        test_size: the same for `test`.
    """

    kind: ClassVar[str] = "chat"

    def __init__(self, problems: PromptDataset, train_size: int | None = None, test_size: int | None = None) -> None:
        self.bad_rows, self.on_bad_row = bad_rows_of(problems), on_bad_row_of(problems)
        self.train: Sequence[Conversation] = _conversations(problems.train, train_size)
        self.test: Sequence[Conversation] = _conversations(problems.test, test_size)


def _conversations(examples: Sequence[Example], size: int | None) -> Sequence[Conversation]:
    return GeneratedSequence(
        lambda index: _conversation(examples[index]), len(examples) if size is None else min(size, len(examples))
    )


def _conversation(example: Example) -> Conversation:
    if "solution" not in example.extra:
        raise BadRow(
            "no worked answer",
            f"{example.id} has none in extra['solution']; choose a dataset that has them, such as word_problems",
        )
    return Conversation(
        example.id,
        (*example.messages, {"role": "assistant", "content": example.extra["solution"]}),
        source=example.source or example.id,
    )
