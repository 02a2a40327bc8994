"""Generated short chats: no file, no network. Small enough for the bundled model to learn within a minute.

Each skill is a script with blanks. Its answers follow from the chat itself (a name to remember, a list to repeat, a
tool's result to report) or from a small table (opposites, the day after). An item is a pure function of (seed, split,
index), and whether a chat is held out is decided by a hash of its skill and of what fills its blanks: no training
chat, with any seed, is a held-out chat in other words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Conversation, Message
from cookbook.data.files import Split
from cookbook.data.generated.base import Draws, GeneratedSequence, is_held_out

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
PLACES = ("box", "bag", "house", "garden", "school", "shop", "car", "kitchen")
CITIES = ("Rome", "Paris", "Oslo", "Cairo", "Lima", "Delhi", "Tokyo", "Bern")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("old", "new"),
    ("fast", "slow"),
    ("day", "night"),
    ("up", "down"),
    ("yes", "no"),
    ("more", "less"),
)
WORDS = tuple(word for pair in OPPOSITES for word in pair)
HOURS = tuple(str(hour) for hour in range(1, 13))

DERIVED: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("opposite", "word", {**dict(OPPOSITES), **{right: left for left, right in OPPOSITES}}),
    ("next_day", "day", dict(zip(DAYS, (*DAYS[1:], DAYS[0]), strict=True))),
)
"""What a reply looks up: (its name in a reply, the blank it depends on, the table)."""

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a friendly helper. Keep it short.")
SYSTEM_SHARE = 3
"""One in this many chats whose skill has no system prompt of its own gets one of `SYSTEM_PROMPTS`."""


@dataclass(frozen=True)
class Call:
    """A turn in which the assistant calls a tool with one argument."""

    function: str
    argument: str
    value: str


@dataclass(frozen=True)
class Skill:
    """A script with blanks.

    `blanks` gives each blank its options (drawn without repetition within one chat); a turn is (role, text or call).

    Where a user's turn has several texts, they say the same in other words.
    """

    name: str
    blanks: Mapping[str, Sequence[str]]
    turns: tuple[tuple[str, tuple[str, ...] | Call], ...]
    tools: tuple[Mapping[str, object], ...] = field(default=())


def _tool(name: str, description: str, argument: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SKILLS = (
    Skill(
        "remember_name",
        {"name": NAMES, "day": DAYS, "thing": THINGS},
        (
            ("user", ("Hello, I am {name}. On {day} I buy {thing}.", "My name is {name} and I buy {thing} on {day}.")),
            ("assistant", ("Hello {name}! I will remember that.",)),
            ("user", ("What is my name?", "Who am I?")),
            ("assistant", ("Your name is {name}.",)),
            ("user", ("What do I buy on {day}?",)),
            ("assistant", ("You buy {thing} on {day}.",)),
        ),
    ),
    Skill(
        "opposite",
        {"name": NAMES, "word": WORDS},
        (
            ("user", ("I am {name}. What is the opposite of {word}?", "{name} here. Tell me the opposite of {word}.")),
            ("assistant", ("Hi {name}! The opposite of {word} is {opposite}.",)),
        ),
    ),
    Skill(
        "next_day",
        {"name": NAMES, "day": DAYS, "place": PLACES},
        (
            (
                "user",
                (
                    "{name} is at the {place} on {day}. Which day comes after that?",
                    "{name} goes to the {place} on {day}. And the next day?",
                ),
            ),
            ("assistant", ("The day after {day} is {next_day}.",)),
        ),
    ),
    Skill(
        "list",
        {"one": THINGS, "two": THINGS, "three": THINGS},
        (
            ("user", ("Put {one} and {two} on my list.", "I need {one} and {two}. Write a list.")),
            ("assistant", ("Your list: {one}, {two}.",)),
            ("user", ("Add {three}.", "And {three} too.")),
            ("assistant", ("Your list: {one}, {two}, {three}.",)),
        ),
    ),
    Skill(
        "where",
        {"name": NAMES, "other": NAMES, "thing": THINGS, "place": PLACES},
        (
            ("user", ("{name} puts the {thing} in the {place}. {other} takes a walk. Where are the {thing}?",)),
            ("assistant", ("The {thing} are in the {place}.",)),
            ("user", ("Who put them there?",)),
            ("assistant", ("{name} put them there.",)),
        ),
    ),
    Skill(
        "role",
        {"name": NAMES, "place": PLACES, "other": NAMES},
        (
            ("system", ("You are {name} and you work at the {place}.",)),
            ("user", ("Hello, I am {other}. Who are you?", "I am {other}. And you?")),
            ("assistant", ("Hi {other}! I am {name} and I work at the {place}.",)),
        ),
    ),
    Skill(
        "clock",
        {"city": CITIES, "hour": HOURS, "name": NAMES},
        (
            ("system", ("You can call clock with a city.",)),
            ("user", ("I am {name}. What time is it in {city}?", "{name} asks for the time in {city}.")),
            ("assistant", Call("clock", "city", "{city}")),
            ("tool", ("{hour}",)),
            ("assistant", ("It is {hour} in {city}, {name}.",)),
        ),
        (_tool("clock", "The hour in a city.", "city"),),
    ),
)


def _fill_blanks(skill: Skill, draws: Draws, split: Split) -> dict[str, str]:
    """Options for all blanks, of the split's class, and what follows from them."""
    while True:
        numbers = {blank: draws.integer(0, len(options) - 1) for blank, options in skill.blanks.items()}
        values = {blank: skill.blanks[blank][number] for blank, number in numbers.items()}
        held_out = is_held_out(f"small_talk/{skill.name}", tuple(numbers.values()))
        if len(set(values.values())) == len(values) and held_out == (split == "test"):
            return values | {name: table[values[blank]] for name, blank, table in DERIVED if blank in values}


def _message(role: str, turn: tuple[str, ...] | Call, values: Mapping[str, str], draws: Draws) -> Message:
    if isinstance(turn, Call):
        function = {"name": turn.function, "arguments": {turn.argument: turn.value.format(**values)}}
        return Message(role=role, content="", tool_calls=[{"type": "function", "function": function}])
    return Message(role=role, content=draws.choice(turn).format(**values))


def _make_chat(skills: Sequence[Skill], seed: int, split: Split, index: int) -> Conversation:
    draws = Draws(f"small_talk/{seed}/{split}/{index}")
    skill = draws.choice(skills)
    values = _fill_blanks(skill, draws, split)
    messages = [_message(role, turn, values, draws) for role, turn in skill.turns]
    if messages[0]["role"] != "system" and draws.integer(1, SYSTEM_SHARE) == 1:
        messages.insert(0, Message(role="system", content=draws.choice(SYSTEM_PROMPTS)))
    return Conversation(f"small_talk/{seed}/{split}/{index}", tuple(messages), skill.tools)


class SmallTalk:
    """The dataset: `train` and `test`, each a lazy sequence of conversations of one to three assistant turns.

    Args:
        seed: Another seed gives other chats of the same skills.
        train_size: Conversations in `train`.
        test_size: Conversations in `test`.
        tool_calls: Whether some chats call a tool. False for models whose chat format has no tool calls.

    Raises:
        DataError: a size is below 1.
    """

    kind: ClassVar[str] = "chat"

    def __init__(
        self, *, seed: int = 0, train_size: int = 10_000, test_size: int = 200, tool_calls: bool = True
    ) -> None:
        for name, size in (("train_size", train_size), ("test_size", test_size)):
            if size < 1:
                raise DataError(f"dataset.{name}={size}: must be at least 1")
        skills = [skill for skill in SKILLS if tool_calls or not skill.tools]
        self.train: Sequence[Conversation] = GeneratedSequence(
            lambda index: _make_chat(skills, seed, "train", index), train_size
        )
        self.test: Sequence[Conversation] = GeneratedSequence(
            lambda index: _make_chat(skills, seed, "test", index), test_size
        )
