from __future__ import annotations

import contextlib
import io
import itertools
import subprocess
import sys
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.data.generated.base import is_held_out
from cookbook.data.generated.tiny_formats import FORMATS
from cookbook.data.generated.tiny_operations import OPERATIONS
from cookbook.data.generated.tiny_parts import INPUTS
from cookbook.data.generated.tiny_programs import FRAMES, TESTS, TinyPrograms


def cases(example: Example) -> Sequence[tuple[str, str]]:
    return example.extra["problem"].tests.cases


def passed(program: str, example: Example) -> int:
    """How many tests this program of ours passes; one that raises passes no further test."""
    code = compile(program, "program", "exec")
    for number, (stdin, expected) in enumerate(cases(example)):
        stdout = io.StringIO()
        with patch("sys.stdin", io.StringIO(stdin)), contextlib.redirect_stdout(stdout):
            try:
                exec(code, {})
            except (ValueError, TypeError):
                return number
        if stdout.getvalue() != expected:
            return number
    return len(cases(example))


@pytest.fixture(scope="module")
def train() -> list[Example]:
    """Enough for every operation, format and phrasing to occur many times."""
    return list(TinyPrograms().train[:1200])


@pytest.fixture(scope="module")
def held_out() -> list[Example]:
    return list(TinyPrograms().test[:500])


@pytest.fixture(scope="module")
def examples(train: list[Example], held_out: list[Example]) -> list[Example]:
    return train + held_out


def test_gold_programs_print_what_the_operations_compute_and_hasty_ones_fail(examples: list[Example]) -> None:
    for example in examples:
        assert len(cases(example)) == TESTS == len({stdin for stdin, _ in cases(example)})
        assert passed(example.extra["solution"], example) == TESTS, example
        assert passed(example.extra["hasty_solution"], example) < TESTS, example


def test_every_part_occurs_in_both_splits(train: list[Example], held_out: list[Example]) -> None:
    parts = {i.name for i in INPUTS} | {o.name for family in (*OPERATIONS.values(), *FORMATS.values()) for o in family}
    for split in (train, held_out):
        assert {name for example in split for name in example.extra["template"].split(" | ")} == parts
        assert {example.extra["phrasing"] for example in split} == set(range(len(FRAMES)))


def test_a_gold_program_in_a_process_of_its_own() -> None:
    example = TinyPrograms().test[0]
    for stdin, expected in cases(example):
        run = subprocess.run(
            [sys.executable, "-c", example.extra["solution"]], input=stdin, capture_output=True, text=True, check=True
        )
        assert run.stdout == expected


def test_tests_tell_tasks_of_the_same_input_apart(examples: list[Example]) -> None:
    by_input: dict[str, list[Example]] = {}
    for example in examples:
        by_input.setdefault(example.extra["template"].split(" | ")[0], []).append(example)
    pairs = [
        pair
        for family in by_input.values()
        for pair in itertools.pairwise(family)
        if pair[0].extra["task"] != pair[1].extra["task"]
    ]
    fooled = sum(passed(other.extra["solution"], example) == TESTS for example, other in pairs)
    assert len(pairs) > 1200
    assert fooled <= 0.005 * len(pairs)  # a few tasks are equal: to sort what was reversed is to sort


def test_tests_catch_comparisons_and_loops_that_are_off_by_one(examples: list[Example]) -> None:
    slips = {
        "keep_above": (">", ">="),
        "count_above": (">", ">="),
        "keep_below": ("<", "<="),
        "keep_long": (">", ">="),
        "sum_below": ("range(n)", "range(n + 1)"),
    }
    tried = caught = 0
    for example in examples:
        right, wrong = slips.get(example.extra["template"].split(" | ")[1], ("", ""))
        if right:
            tried += 1
            caught += passed(example.extra["solution"].replace(right, wrong, 1), example) < TESTS
    assert tried > 50
    assert caught >= 0.8 * tried  # in some it makes no difference: keep those below 8, then the multiples of 5


def test_splits_are_disjoint_tasks_whatever_the_seeds(train: list[Example], held_out: list[Example]) -> None:
    learned = {example.extra["task"] for example in train}
    kept = {example.extra["task"] for example in (*held_out, *TinyPrograms(seed=3).test[:200])}
    assert not learned & kept
    assert not any(is_held_out(task, ()) for task in learned)
    assert all(is_held_out(task, ()) for task in kept)
    assert len(learned) > 1000 and len(kept) > 500  # many different tasks, not a few in other words


def test_statements_name_their_constants(examples: list[Example]) -> None:
    for example in examples:
        (message,) = example.messages
        assert message["role"] == "user" and example.answer == ""
        assert message["content"].endswith(".") and "{" not in message["content"]
        for part in example.extra["task"].split(" | "):
            _, _, constant = part.partition(" ")
            assert constant in message["content"]


def test_items_are_pure_functions_of_seed_split_and_index() -> None:
    forwards = TinyPrograms(seed=4).train[:10]
    again = TinyPrograms(seed=4, train_size=10)
    assert [again.train[i] for i in reversed(range(10))] == forwards[::-1]
    assert again.train[-1] == forwards[-1] and len(again.train) == 10
    assert TinyPrograms(seed=5).train[0] != forwards[0]
    assert forwards[3].id == "tiny_programs/4/train/3"
    code = "from cookbook.data.generated.tiny_programs import TinyPrograms as T; print(T(seed=4).train[:10])"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "123"}
    ).stdout
    assert printed.strip() == str(forwards)


def test_sizes() -> None:
    with pytest.raises(IndexError):
        TinyPrograms(train_size=3).train[3]
    with pytest.raises(DataError, match="test_size is -1"):
        TinyPrograms(test_size=-1)
