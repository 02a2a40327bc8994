"""Grade-school word problems in exactly the GSM8K format (Cobbe et al. 2021), generated: no file, no network.

An item is a pure function of (seed, split, index), so a run that resumes at index i sees what it would have seen.
Whether a problem is held out is decided by a hash of its template and numbers, whatever the seed. Each split draws
only numbers of its own class, so no training problem, with any seed, is a held-out problem in other words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Example, Message
from cookbook.data.files import Split
from cookbook.data.generated.base import Draws, GeneratedSequence, is_held_out

LARGEST = 30
"""No number in a problem or its solution exceeds this."""

NAMES = (
    "Ada",
    "Ben",
    "Cara",
    "Dan",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Jack",
    "Kim",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
)
THINGS = (
    "apples",
    "books",
    "cards",
    "coins",
    "cookies",
    "eggs",
    "marbles",
    "pens",
    "shells",
    "stamps",
    "stickers",
    "toys",
)


@dataclass(frozen=True)
class Template:
    """A kind of problem.

    `numbers` gives each number its inclusive range. A step is (label, left, operator, right), where an operand names a
    number or, as "1" or "2", the result of that step.
    """

    name: str
    questions: tuple[str, ...]
    numbers: Mapping[str, tuple[int, int]]
    steps: tuple[tuple[str, str, str, str], ...]


TEMPLATES = (
    Template(
        "gain",
        (
            "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?",
            "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} find in all?",
        ),
        {"a": (3, 28), "b": (2, 12)},
        (("Total", "a", "+", "b"),),
    ),
    Template(
        "loss",
        (
            "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} have left?",
            "There were {a} {things} in a box. {name} took {b} of them. How many {things} are left?",
        ),
        {"a": (5, 30), "b": (2, 12)},
        (("Left", "a", "-", "b"),),
    ),
    Template(
        "packs",
        (
            "{name} has {a} boxes with {b} {things} in each box. How many {things} does {name} have?",
            "{name} buys {a} packs of {b} {things}. How many {things} is that?",
        ),
        {"a": (2, 9), "b": (2, 9)},
        (("Total", "a", "*", "b"),),
    ),
    Template(
        "share",
        (
            "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
            "{name} puts {a} {things} into {b} boxes, the same number in each. How many {things} are in a box?",
        ),
        {"a": (4, 30), "b": (2, 9)},
        (("Each", "a", "/", "b"),),
    ),
    Template(
        "gain_loss",
        (
            "{name} has {a} {things}, gets {b} more and gives {c} to {other}. How many {things} does {name} have now?",
            "{name} had {a} {things}. {other} brought {b} more, and then {c} were lost. How many {things} are left?",
        ),
        {"a": (3, 28), "b": (2, 12), "c": (2, 12)},
        (("Total", "a", "+", "b"), ("Left", "1", "-", "c")),
    ),
    Template(
        "packs_plus",
        (
            "{name} has {a} bags of {b} {things} and finds {c} more. How many {things} does {name} have now?",
            "{name} buys {a} packs of {b} {things}. {other} adds {c} more. How many {things} are there in all?",
        ),
        {"a": (2, 9), "b": (2, 9), "c": (2, 12)},
        (("Packs", "a", "*", "b"), ("Total", "1", "+", "c")),
    ),
    Template(
        "packs_minus",
        (
            "{name} buys {a} packs of {b} {things} and gives {c} to {other}. How many {things} does {name} have left?",
            "There are {a} boxes of {b} {things}. {name} takes {c} of them. How many {things} are left?",
        ),
        {"a": (2, 9), "b": (2, 9), "c": (2, 12)},
        (("Packs", "a", "*", "b"), ("Left", "1", "-", "c")),
    ),
    Template(
        "change",
        (
            "{name} buys {a} {things} at ${b} each and pays with ${c}. How many dollars does {name} get back?",
            "{name} had ${c} and bought {a} {things} for ${b} each. How many dollars does {name} have left?",
        ),
        {"a": (2, 6), "b": (2, 6), "c": (10, 30)},
        (("Cost", "a", "*", "b"), ("Left", "c", "-", "1")),
    ),
    Template(
        "daily",
        (
            "{name} sells {a} {things} every morning and {b} every evening."
            " How many {things} does {name} sell in {c} days?",
            "Each day {name} makes {a} {things} and {other} makes {b}. How many {things} do they make in {c} days?",
        ),
        {"a": (2, 6), "b": (2, 6), "c": (2, 9)},
        (("Daily", "a", "+", "b"), ("Total", "1", "*", "c")),
    ),
    Template(
        "times",
        (
            "{name} has {a} {things}. {other} has {b} times as many. How many {things} do they have together?",
            "{name} found {a} {things} and {other} found {b} times as many. How many {things} did they find in all?",
        ),
        {"a": (2, 9), "b": (2, 5)},
        (("More", "a", "*", "b"), ("Total", "a", "+", "1")),
    ),
    Template(
        "share_plus",
        (
            "{name} and friends share {a} {things} equally among {b} people. {name} then finds {c} more."
            " How many {things} does {name} have?",
            "{a} {things} are put equally into {b} boxes. {name} adds {c} to one box."
            " How many {things} are in that box?",
        ),
        {"a": (4, 30), "b": (2, 9), "c": (2, 12)},
        (("Each", "a", "/", "b"), ("Total", "1", "+", "c")),
    ),
    Template(
        "sale",
        (
            "{name} had {a} {things}. {b} broke, and {name} sold the rest for ${c} each."
            " How many dollars did {name} get?",
            "{name} makes {a} {things}, keeps {b} and sells the others at ${c} each. How many dollars does {name} get?",
        ),
        {"a": (4, 15), "b": (2, 12), "c": (2, 9)},
        (("Left", "a", "-", "b"), ("Money", "1", "*", "c")),
    ),
    Template(
        "two_packs",
        (
            "{name} has {a} bags of {b} {things} and {c} boxes of {d}. How many {things} does {name} have?",
            "{name} buys {a} packs of {b} {things}. {other} buys {c} packs of {d}."
            " How many {things} do they have together?",
        ),
        {"a": (2, 5), "b": (2, 6), "c": (2, 5), "d": (2, 6)},
        (("First", "a", "*", "b"), ("Second", "c", "*", "d"), ("Total", "1", "+", "2")),
    ),
    Template(
        "packs_minus_share",
        (
            "{name} opens {a} packs of {b} {things}, keeps {c} and shares the rest equally among {d} friends."
            " How many {things} does each friend get?",
            "There are {a} boxes of {b} {things}. {c} are lost and the others are put equally into {d} bags."
            " How many {things} are in a bag?",
        ),
        {"a": (2, 9), "b": (2, 9), "c": (2, 12), "d": (2, 6)},
        (("Packs", "a", "*", "b"), ("Left", "1", "-", "c"), ("Each", "2", "/", "d")),
    ),
    Template(
        "gain_loss_sale",
        (
            "{name} picks {a} {things}, {other} picks {b}. They eat {c} and sell the rest at ${d} each."
            " How many dollars do they get?",
            "{name} had {a} {things}, made {b} more, broke {c} and sold the others for ${d} each."
            " How many dollars did {name} get?",
        ),
        {"a": (3, 12), "b": (2, 9), "c": (2, 12), "d": (2, 6)},
        (("Total", "a", "+", "b"), ("Left", "1", "-", "c"), ("Money", "2", "*", "d")),
    ),
    Template(
        "spend_earn",
        (
            "{name} has ${a}, buys {b} {things} at ${c} each and then earns ${d}."
            " How many dollars does {name} have now?",
            "{name} had ${a} and bought {b} {things} for ${c} each. {other} then gave {name} ${d}."
            " How many dollars does {name} have?",
        ),
        {"a": (10, 30), "b": (2, 6), "c": (2, 6), "d": (2, 12)},
        (("Cost", "b", "*", "c"), ("Left", "a", "-", "1"), ("Total", "2", "+", "d")),
    ),
)


def _work_out(template: Template, numbers: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """Each step as ("label <<a*b=c>>c", c); None where a result is not a whole number from 1 to LARGEST."""
    values = dict(numbers)
    lines = []
    for position, (label, left, operator, right) in enumerate(template.steps, start=1):
        x, y = values[left], values[right]
        if operator == "/" and x % y:
            return None
        result = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[operator]
        if not 1 <= result <= LARGEST:
            return None
        values[str(position)] = result
        lines.append((f"{label} <<{x}{operator}{y}={result}>>{result}", result))
    return lines


def _make_example(seed: int, split: Split, index: int) -> Example:
    draws = Draws(f"word_problems/{seed}/{split}/{index}")
    template = draws.choice(TEMPLATES)
    while True:
        numbers = {key: draws.integer(low, high) for key, (low, high) in template.numbers.items()}
        worked = _work_out(template, numbers)
        if worked is not None and is_held_out(template.name, tuple(numbers.values())) == (split == "test"):
            break
    name = draws.choice(NAMES)
    other = draws.choice([candidate for candidate in NAMES if candidate != name])
    phrasing = draws.integer(0, len(template.questions) - 1)
    question = template.questions[phrasing].format(name=name, other=other, things=draws.choice(THINGS), **numbers)
    answer = str(worked[-1][1])
    solution = "\n".join([*(line for line, _ in worked), f"#### {answer}"])
    return Example(
        id=f"word_problems/{seed}/{split}/{index}",
        messages=(Message(role="user", content=question),),
        answer=answer,
        extra={
            "solution": solution,
            "steps": len(template.steps),
            "template": template.name,
            "phrasing": phrasing,
            "numbers": tuple(numbers.values()),
        },
    )


class WordProblems:
    """The dataset: `train` and `test`, each a lazy sequence of examples with one user message.

    `answer` is the gold number, and `extra["solution"]` the worked solution in GSM8K format.

    Raises:
        DataError: a size is negative.
    """

    kind: ClassVar[str] = "prompts"

    def __init__(self, *, seed: int = 0, train_size: int = 20_000, test_size: int = 1_000) -> None:
        for name, size in (("train_size", train_size), ("test_size", test_size)):
            if size < 0:
                raise DataError(f"word_problems: {name} is {size}; it must be 0 or more")
        self.train: Sequence[Example] = GeneratedSequence(lambda index: _make_example(seed, "train", index), train_size)
        self.test: Sequence[Example] = GeneratedSequence(lambda index: _make_example(seed, "test", index), test_size)
