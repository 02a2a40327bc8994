"""Types of the parts that `tiny_programs` composes, and the inputs.

The variable of a type has the same name in every program: n an integer, xs integers, s a text, ws words, a, b and c
integers on one line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Type = Literal["int", "pair", "triple", "ints", "text", "words", "output"]

LETTERS = "aeinorst"
CONSTANTS: Mapping[str, Sequence[int | str]] = {"k": range(2, 10), "c": LETTERS, "m": "-+/:"}
"""Constants of operations: a number, a letter or a mark, written {k}, {c} or {m} in phrases and code."""


@dataclass(frozen=True)
class Input:
    """What is on stdin: in the words of either phrasing, and the line of code that reads it."""

    name: str
    type: Type
    phrases: tuple[str, str]
    code: str


@dataclass(frozen=True)
class Operation:
    """From a value of type `takes` to one of type `gives`. `function` takes the value and the constant."""

    name: str
    takes: Type
    gives: Type
    phrases: tuple[str, str]
    code: str
    function: Callable[[Any, Any], Any]

    @cached_property
    def constant(self) -> str | None:
        """Its key in `CONSTANTS`; None where the operation has no constant."""
        return next((key for key in CONSTANTS if f"{{{key}}}" in self.code), None)


INPUTS = (
    Input("one", "int", ("an integer", "one integer"), "n = int(input())"),
    Input("two", "pair", ("two integers on a line", "two integers"), "a, b = map(int, input().split())"),
    Input("three", "triple", ("three integers on a line", "three integers"), "a, b, c = map(int, input().split())"),
    Input("list", "ints", ("a line of integers", "a list of integers"), "xs = list(map(int, input().split()))"),
    Input("word", "text", ("a word", "one word"), "s = input()"),
    Input("words", "words", ("a line of words", "a list of words"), "ws = input().split()"),
)


def operations(
    takes: Type, gives: Type, *rows: tuple[str, str, str, str, Callable[[Any, Any], Any]]
) -> list[Operation]:
    """From rows of name, phrases, code and function."""
    return [
        Operation(name, takes, gives, (first, second), code, function) for name, first, second, code, function in rows
    ]


def by_type(*parts: Operation) -> Mapping[Type, Sequence[Operation]]:
    """Grouped by the type they take, in their order."""
    grouped: dict[Type, list[Operation]] = defaultdict(list)
    for part in parts:
        grouped[part.takes].append(part)
    return dict(grouped)
