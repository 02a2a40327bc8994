"""Generated small programming tasks: no file, no network. A program reads stdin and prints; five tests judge it.

A task is an input (an integer, two or three on a line, a list, a word, a line of words), two operations one after the
other, and a way to print. An item is a pure function of (seed, split, index). Whether a task is held out is decided by
a hash of its operations and their constants, whatever the seed: no training task is a held-out one in other words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cookbook.core.errors import DataError
from cookbook.core.examples import Example, Message
from cookbook.data.files import Split
from cookbook.data.generated.base import Draws, GeneratedSequence, is_held_out
from cookbook.data.generated.tiny_formats import FORMATS
from cookbook.data.generated.tiny_operations import OPERATIONS
from cookbook.data.generated.tiny_parts import CONSTANTS, INPUTS, LETTERS, Input, Operation
from cookbook.sandbox.problem import CodeProblem, StdinTests

TESTS = 5
CANDIDATES = 12
"""Inputs drawn for a task, of which the tests are chosen."""

FRAMES = ("Read {input}. {first}, then {second}. {format}", "Given {input}, {first} and {second}. {format}")
Constant = int | str | None


@dataclass(frozen=True)
class Step:
    """An operation with its constant."""

    operation: Operation
    constant: Constant

    def phrase(self, phrasing: int) -> str:
        return self.operation.phrases[phrasing].format_map(dict.fromkeys(CONSTANTS, self.constant))

    @property
    def code(self) -> str:
        return self.operation.code.format_map(dict.fromkeys(CONSTANTS, self.constant))

    def apply(self, value: Any) -> Any:
        return self.operation.function(value, self.constant)

    @property
    def key(self) -> str:
        return self.operation.name if self.constant is None else f"{self.operation.name} {self.constant}"


@dataclass(frozen=True)
class Task:
    """What to compute, apart from how it is told."""

    input: Input
    steps: tuple[Step, ...]
    format: Step

    @property
    def key(self) -> str:
        return " | ".join([self.input.name, *(step.key for step in self.steps), self.format.key])

    @property
    def template(self) -> str:
        return " | ".join([self.input.name, *(step.operation.name for step in self.steps), self.format.operation.name])

    @property
    def program(self) -> str:
        return "\n".join([self.input.code, *(step.code for step in self.steps), self.format.code])

    def statement(self, phrasing: int) -> str:
        first, second = (step.phrase(phrasing) for step in self.steps)
        if phrasing == 0:
            first = first[0].upper() + first[1:]
        return FRAMES[phrasing].format(
            input=self.input.phrases[phrasing], first=first, second=second, format=self.format.phrase(phrasing)
        )

    def output(self, value: Any) -> str | None:
        """What to print for this input, without the last line break; None where an operation is undefined."""
        try:
            for step in (*self.steps, self.format):
                value = step.apply(value)
        except ValueError:
            return None
        return str(value)


def stops_short(task: Task) -> Task:
    """The task without its last operation: what a hasty programmer writes. It fails at least one test of `task`."""
    *steps, _ = task.steps
    return _printed(replace(task, steps=tuple(steps)))


def _printed(task: Task) -> Task:
    """The same, with the plain format where its own is for another type."""
    gives = task.steps[-1].operation.gives
    return task if task.format.operation.takes == gives else replace(task, format=Step(FORMATS[gives][0], None))


def _near_misses(task: Task) -> Iterator[Task]:
    """Tasks of mistaken programs: a first operation left out, two swapped, another one, a constant off by one."""
    first, second = task.steps
    if first.operation.takes == first.operation.gives:
        yield replace(task, steps=(second,))
        if second.operation.takes == second.operation.gives:
            yield replace(task, steps=(second, first))
    for position, step in enumerate((*task.steps, task.format)):
        kind = step.operation
        family = FORMATS[kind.takes] if position == 2 else OPERATIONS[kind.takes]
        others = [
            Step(o, step.constant)
            for o in family
            if o.gives == kind.gives and o.constant == kind.constant and o is not kind
        ]
        if isinstance(step.constant, int):
            others += [Step(kind, step.constant - 1), Step(kind, step.constant + 1)]
        for other in others:
            steps = [*task.steps, task.format]
            steps[position] = other
            yield Task(task.input, tuple(steps[:2]), steps[2])


def _draw_step(draws: Draws, operations: Sequence[Operation]) -> Step:
    operation = draws.choice(operations)
    return Step(operation, draws.choice(CONSTANTS[operation.constant]) if operation.constant else None)


def _draw_task(draws: Draws) -> Task:
    start = draws.choice(INPUTS)
    first = _draw_step(draws, OPERATIONS[start.type])
    second = _draw_step(draws, [o for o in OPERATIONS[first.operation.gives] if o is not first.operation])
    formats = FORMATS[second.operation.gives]
    return Task(start, (first, second), _draw_step(draws, formats[:1] if draws.integer(0, 1) else formats))


def _draw_input(draws: Draws, kind: str, numbers: Sequence[int]) -> tuple[Any, str]:
    """A value and its text on stdin. Integers are often 0, 1 or next to a number of the task, sometimes large."""
    near = [0, 1, *(number + offset for number in numbers for offset in (-1, 0, 1))]

    def integer() -> int:
        kind = draws.integer(0, 7)
        return draws.choice(near) if kind < 3 else draws.integer(100, 150) if kind == 3 else draws.integer(-9, 30)

    def word() -> str:
        return "".join(draws.choice(LETTERS) for _ in range(draws.integer(2, 9)))

    if kind == "text":
        value = word()
        return value, value
    if kind == "words":
        words = [word() for _ in range(draws.integer(2, 5))]
        return words, " ".join(words)
    count = {"int": 1, "pair": 2, "triple": 3, "ints": draws.integer(2, 7)}[kind]
    integers = [integer() for _ in range(count)]
    return integers[0] if kind == "int" else integers, " ".join(map(str, integers))


def _draw_tests(draws: Draws, task: Task) -> tuple[tuple[str, str], ...] | None:
    """Of the inputs drawn, those that together tell the task from most near misses, chosen one by one.

    None where a missing operation would not be noticed, or where every output is the same.
    """
    numbers = [step.constant for step in (*task.steps, task.format) if isinstance(step.constant, int)]
    candidates: dict[str, tuple[Any, str]] = {}
    for _ in range(CANDIDATES):
        value, stdin = _draw_input(draws, task.input.type, numbers)
        output = task.output(value)
        if output is not None:
            candidates[stdin] = (value, output)
    misses = [stops_short(task), *_near_misses(task)]
    caught = {
        stdin: {number for number, miss in enumerate(misses) if miss.output(value) != output}
        for stdin, (value, output) in candidates.items()
    }
    chosen: list[str] = []
    missed = set(range(len(misses)))
    while len(chosen) < TESTS and len(chosen) < len(candidates):
        best = max(
            (stdin for stdin in candidates if stdin not in chosen), key=lambda stdin: len(caught[stdin] & missed)
        )
        chosen.append(best)
        missed -= caught[best]
    first = task.steps[0].operation
    required = {0, 1} if first.takes == first.gives else {0}
    tests = tuple((f"{stdin}\n", f"{candidates[stdin][1]}\n") for stdin in chosen)
    trivial = len({stdout for _, stdout in tests}) < 2
    return None if len(tests) < TESTS or trivial or missed & required else tests


def _make_example(seed: int, split: Split, index: int) -> Example:
    draws = Draws(f"tiny_programs/{seed}/{split}/{index}")
    while True:
        task = _draw_task(draws)
        if is_held_out(task.key, ()) == (split == "test"):
            tests = _draw_tests(draws, task)
            if tests is not None:
                break
    phrasing = draws.integer(0, len(FRAMES) - 1)
    return Example(
        id=f"tiny_programs/{seed}/{split}/{index}",
        messages=(Message(role="user", content=task.statement(phrasing)),),
        answer="",
        extra={
            "problem": CodeProblem(StdinTests(tests)),
            "solution": task.program,
            "hasty_solution": stops_short(task).program,
            "template": task.template,
            "task": task.key,
            "phrasing": phrasing,
        },
    )


class TinyPrograms:
    """The dataset: `train` and `test`, each a lazy sequence of examples with one user message.

    `extra` holds a `CodeProblem` with five tests on stdin and stdout as `problem`, a Python program that passes them as
    `solution`, and one that lacks the second operation, and fails, as `hasty_solution`.

    Raises:
        DataError: a size is negative.
    """

    kind: ClassVar[str] = "prompts"

    def __init__(self, *, seed: int = 0, train_size: int = 20_000, test_size: int = 1_000) -> None:
        for name, size in (("train_size", train_size), ("test_size", test_size)):
            if size < 0:
                raise DataError(f"tiny_programs: {name} is {size}; it must be 0 or more")
        self.train: Sequence[Example] = GeneratedSequence(lambda index: _make_example(seed, "train", index), train_size)
        self.test: Sequence[Example] = GeneratedSequence(lambda index: _make_example(seed, "test", index), test_size)
