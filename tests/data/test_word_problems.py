from __future__ import annotations

import re
import subprocess
import sys

import pytest

from cookbook.core.errors import DataError
from cookbook.data.generated.base import is_held_out
from cookbook.data.generated.word_problems import LARGEST, TEMPLATES, WordProblems

NOTE = re.compile(r"[A-Z][a-z]+ <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


def test_every_note_is_right_and_the_last_line_is_the_answer() -> None:
    problems = WordProblems()
    for example in [*problems.train[:1500], *problems.test[:500]]:
        *steps, last = example.extra["solution"].split("\n")
        assert 1 <= len(steps) <= 3
        result = None
        for step in steps:
            match = NOTE.fullmatch(step)
            assert match, step
            left, right, result = int(match[1]), int(match[3]), int(match[4])
            exact = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[match[2]]
            assert result == exact and match[4] == match[5], step
            assert 1 <= result <= LARGEST
        assert max(example.extra["numbers"]) <= LARGEST
        assert last == f"#### {example.answer}" and example.answer == str(result)


def test_questions_state_their_numbers_and_name_their_people() -> None:
    for example in WordProblems().train[:300]:
        (message,) = example.messages
        assert message["role"] == "user"
        assert sorted(map(int, re.findall(r"\d+", message["content"]))) == sorted(example.extra["numbers"])
        assert "{" not in message["content"] and message["content"].endswith("?")


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (7, 3)])
def test_splits_are_disjoint_in_template_and_numbers_whatever_the_seeds(seeds: tuple[int, int]) -> None:
    train = {(e.extra["template"], e.extra["numbers"]) for e in WordProblems(seed=seeds[0]).train[:4000]}
    test = {(e.extra["template"], e.extra["numbers"]) for e in WordProblems(seed=seeds[1]).test[:1000]}
    assert not train & test
    assert not any(is_held_out(*problem) for problem in train)
    assert all(is_held_out(*problem) for problem in test)
    assert len(test) > 300  # many different problems, not a few in other words


def test_every_template_phrasing_and_number_of_steps_occurs_in_both_splits() -> None:
    problems = WordProblems()
    for split in (problems.train[:2000], problems.test):
        assert {(e.extra["template"], e.extra["phrasing"]) for e in split} == {
            (template.name, phrasing) for template in TEMPLATES for phrasing in range(len(template.questions))
        }
        assert {e.extra["solution"].count("\n") for e in split} == {1, 2, 3}


def test_items_are_pure_functions_of_seed_split_and_index() -> None:
    forwards = [WordProblems(seed=4).train[i] for i in range(20)]
    again = WordProblems(seed=4, train_size=20)
    assert [again.train[i] for i in reversed(range(20))] == forwards[::-1]
    assert again.train[5:8] == forwards[5:8] and again.train[-1] == forwards[-1]
    assert WordProblems(seed=5).train[0] != forwards[0]
    assert len({example.id for example in forwards} | {example.id for example in WordProblems(seed=4).test[:20]}) == 40


def test_items_are_the_same_in_another_process() -> None:
    code = (
        "from cookbook.data.generated.word_problems import WordProblems\n"
        "data = WordProblems(seed=2)\n"
        "print([*data.train[:5], *data.test[:5]])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "123"}
    ).stdout
    problems = WordProblems(seed=2)
    assert printed.strip() == str([*problems.train[:5], *problems.test[:5]])


def test_size_and_bounds() -> None:
    problems = WordProblems(train_size=3, test_size=0)
    assert len(problems.train) == 3 and len(list(problems.train)) == 3 and len(problems.test) == 0
    with pytest.raises(IndexError):
        problems.train[3]
    with pytest.raises(DataError, match="test_size is -1"):
        WordProblems(test_size=-1)
