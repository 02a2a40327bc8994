"""Generated preference pairs: worked word problems with a courteous opening (chosen) or a curt one (rejected).

No file, no network; an item is a pure function of (seed, split, index). Problems are those of `word_problems`, so no
training prompt is a held-out one. Both completions of a pair have the same working and answer, and are equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cookbook.core.examples import Example, Message, PreferencePair
from cookbook.data.generated.base import Draws, GeneratedSequence
from cookbook.data.generated.word_problems import WordProblems

# All of them 22 characters long, and with the bundled model's tokenizer the two lists have the same token counts.
COURTEOUS = (
    "Happy to help with it.",
    "Good question, thanks.",
    "Of course, here it is.",
    "Let us do it together.",
    "You are welcome, look:",
    "Kind of you to ask me.",
)
CURT = (
    "Ask me something else.",
    "Not again, how boring.",
    "Stop asking me things.",
    "Not my job to do that.",
    "I have no time for it.",
    "Do I have to help you?",
)


def _make_pair(example: Example) -> PreferencePair:
    draws = Draws(f"courtesy/{example.id}")
    chosen, rejected = (
        (Message(role="assistant", content=f"{draws.choice(openings)}\n{example.extra['solution']}"),)
        for openings in (COURTEOUS, CURT)
    )
    return PreferencePair(example.id.replace("word_problems", "courtesy", 1), example.messages, chosen, rejected)


class Courtesy:
    """The dataset: `train` and `test`, each a lazy sequence of preference pairs.

    Raises:
        DataError: a size is negative.
    """

    kind: ClassVar[str] = "pairs"

    def __init__(self, *, seed: int = 0, train_size: int = 20_000, test_size: int = 1_000) -> None:
        problems = WordProblems(seed=seed, train_size=train_size, test_size=test_size)
        self.train: Sequence[PreferencePair] = GeneratedSequence(
            lambda index: _make_pair(problems.train[index]), train_size
        )
        self.test: Sequence[PreferencePair] = GeneratedSequence(
            lambda index: _make_pair(problems.test[index]), test_size
        )
