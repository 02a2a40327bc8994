"""The fingerprint of a dataset."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cookbook.core.errors import CheckpointError
from cookbook.core.examples import Example
from cookbook.data.fingerprint import compare, fingerprint
from cookbook.data.generated.word_problems import WordProblems


def rows(count: int, **extra) -> list[Example]:
    return [
        Example(f"d/train/{index}", ({"role": "user", "content": f"{index}?"},), str(index), extra)
        for index in range(count)
    ]


def taken(train: list[Example], test: list[Example]) -> dict:
    return fingerprint(SimpleNamespace(train=train, test=test))


def test_the_same_rows_have_the_same_fingerprint_whatever_objects_hold_them():
    assert taken(rows(3, tests={"b", "a"}, what=object()), []) == taken(rows(3, tests={"a", "b"}, what=object()), [])
    assert compare(taken(rows(3), rows(2)), taken(rows(3), rows(2))) == []


def test_changed_content_is_said_and_changed_rows_are_refused():
    before = taken(rows(3), rows(2))
    edited = [*rows(2), replace(rows(3)[2], answer="other")]
    [warning] = compare(before, taken(edited, rows(2)))
    assert "the train split of the dataset has changed" in warning
    [warning] = compare(before, taken(rows(3), rows(1)))
    assert "the test split of the dataset has changed since this run was saved (2 rows then, 1 now)" in warning
    for other in (rows(4), rows(3)[::-1]):
        with pytest.raises(CheckpointError, match="the order of the rows would be another"):
            compare(before, taken(other, rows(2)))


def test_rows_that_are_made_when_asked_for_are_hashed_in_part():
    first, second = WordProblems(seed=0), WordProblems(seed=1)
    assert fingerprint(first) == fingerprint(WordProblems(seed=0))
    assert fingerprint(first)["train"]["content"] != fingerprint(second)["train"]["content"]
