import json
from pathlib import Path

import pytest

from cookbook.core.errors import DataError
from cookbook.data.bad_rows import BadRow
from cookbook.data.generated.courtesy import COURTEOUS, CURT, Courtesy
from cookbook.data.preference.labelled import LabelledCompletions, Unpaired, mismatched
from cookbook.data.preference.pairs import PreferencePairs
from cookbook.data.preference.rows import parse_pair

Row = dict[str, object]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
GOOD: Row = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}


def write(folder: Path, train: list[Row], test: list[Row]) -> str:
    for split, rows in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        pytest.param(GOOD, [user("Hi?")], [assistant("Hello.")], [assistant("No.")], id="texts"),
        pytest.param(
            {"prompt": [SYSTEM, user("Hi?")], "chosen": "Hello.", "rejected": "No."},
            [SYSTEM, user("Hi?")],
            [assistant("Hello.")],
            [assistant("No.")],
            id="prompt_messages_and_texts",
        ),
        pytest.param(
            {"prompt": [user("Hi?")], "chosen": [assistant("Hello.")], "rejected": [assistant("No.")]},
            [user("Hi?")],
            [assistant("Hello.")],
            [assistant("No.")],
            id="explicit_prompt",
        ),
        pytest.param(
            {"chosen": [user("Hi?"), assistant("Hello.")], "rejected": [user("Hi?"), assistant("No.")]},
            [user("Hi?")],
            [assistant("Hello.")],
            [assistant("No.")],
            id="implicit_prompt",
        ),
        pytest.param(
            {
                "prompt": "Hi?",
                "chosen": [user("Hi?"), assistant("Hello.")],
                "rejected": [user("Hi?"), assistant("No.")],
                "score_chosen": 8.0,
                "score_rejected": 2.0,
            },
            [user("Hi?")],
            [assistant("Hello.")],
            [assistant("No.")],
            id="ultrafeedback",
        ),
        pytest.param(
            {
                "chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: Well?\n\nAssistant: Fine.\nAnd you?",
                "rejected": "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: Well?\n\nAssistant: Bad.",
            },
            [user("Hi?"), assistant("Hello."), user("Well?")],
            [assistant("Fine.\nAnd you?")],
            [assistant("Bad.")],
            id="hh",
        ),
        pytest.param(
            {"prompt": "\n\nHuman: Hi?\n\nAssistant:", "chosen": "Hello.", "rejected": "No."},
            [user("Hi?")],
            [assistant("Hello.")],
            [assistant("No.")],
            id="hh_prompt",
        ),
        pytest.param(
            {
                "chosen": [user("Hi?"), assistant("Hello."), user("Well?"), assistant("Fine.")],
                "rejected": [user("Hi?"), assistant("No."), user("Oh."), assistant("Bye.")],
            },
            [user("Hi?")],
            [assistant("Hello."), user("Well?"), assistant("Fine.")],
            [assistant("No."), user("Oh."), assistant("Bye.")],
            id="several_turns_differ",
        ),
    ],
)
def test_layouts(row: Row, prompt, chosen, rejected):
    assert parse_pair(row) == (tuple(prompt), tuple(chosen), tuple(rejected))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "Hi?", "chosen": "Hello."}, "missing columns"),
        ({"prompt": "Hi?", "chosen": "Hello.", "rejected": None}, "missing columns"),
        ({"prompt": "Hi?", "chosen": "Same.", "rejected": "Same."}, "chosen equals rejected"),
        ({"prompt": "Hi?", "chosen": "Hello.", "rejected": "  "}, "empty assistant turn"),
        ({"prompt": " ", "chosen": "Hello.", "rejected": "No."}, "no prompt"),
        ({"prompt": "Hi?", "chosen": 3, "rejected": "No."}, "no messages"),
        ({"chosen": "Hello.", "rejected": "No."}, "not in HH form"),
        (
            {"chosen": [user("Hi?"), user("Hi?"), assistant("A")], "rejected": [user("Hi?"), assistant("B")]},
            "roles out of order",
        ),
        ({"chosen": [user("Hi?"), assistant("A")], "rejected": [user("Ho?"), assistant("B")]}, "prompts differ"),
        (
            {
                "chosen": [user("Hi?"), assistant("A")],
                "rejected": [user("Hi?"), assistant("A"), user("B"), assistant("C")],
            },
            "no completion",
        ),
        ({"chosen": [{"role": ["user"]}], "rejected": ["text"]}, "unknown role"),
    ],
)
def test_bad_rows_are_named(row: Row, problem: str):
    with pytest.raises(BadRow) as error:
        parse_pair(row)
    assert error.value.problem == problem


def test_bad_rows_are_skipped_and_counted_or_stop_the_reading(tmp_path: Path):
    same = {**GOOD, "rejected": "Hello."}
    path = write(tmp_path, [GOOD, same, {"prompt": "Hi?"}, GOOD, same], [GOOD])
    pairs = PreferencePairs(path=path, name="mine")
    assert [(pair.id, pair.source) for pair in pairs.train] == [
        ("mine/train/0", "train.jsonl:1"),
        ("mine/train/3", "train.jsonl:4"),
    ]
    assert pairs.bad_rows.total == 3
    assert str(pairs.bad_rows) == (
        "3 rows skipped: 2 chosen equals rejected (train.jsonl:2, train.jsonl:5), 1 missing columns (train.jsonl:3)"
    )
    with pytest.raises(DataError, match=r"train\.jsonl:2: chosen equals rejected.*on_bad_row=skip"):
        PreferencePairs(path=path, on_bad_row="fail")
    with pytest.raises(
        DataError, match=r"2 usable rows in the train split \(3 rows skipped.*train_size=3 asks for more"
    ):
        PreferencePairs(path=path, train_size=3)
    assert len(PreferencePairs(path=path, train_size=1).train) == 1
    with pytest.raises(DataError, match="on_bad_row=ignore"):
        PreferencePairs(path=path, on_bad_row="ignore")  # type: ignore[arg-type]


def test_pairs_of_nearly_equal_scores_can_be_left_out(tmp_path: Path):
    rows: list[Row] = [{**GOOD, "score_chosen": chosen, "score_rejected": 3} for chosen in (9.0, 3.0, 3.5)]
    path = write(tmp_path, [*rows, GOOD], rows[:1])
    pairs = PreferencePairs(path=path, min_score_gap=0.5)
    assert [pair.id for pair in pairs.train] == ["preference/train/0", "preference/train/2"]
    assert (pairs.left_out, str(pairs.bad_rows)) == (1, "1 row skipped: 1 missing columns (train.jsonl:4)")
    assert len(PreferencePairs(path=path).train) == 4


def test_splits_may_have_other_names(tmp_path: Path):
    for name, answer in (("train_prefs", "A"), ("train_sft", "B"), ("test_prefs", "C")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**GOOD, "chosen": answer}))
    pairs = PreferencePairs(path=str(tmp_path), train_split="train_prefs", test_split="test_prefs")
    assert [pair.chosen[0]["content"] for pair in (*pairs.train, *pairs.test)] == ["A", "C"]


def test_labelled_completions(tmp_path: Path):
    rows: list[Row] = [
        {"prompt": "Hi?", "completion": "Hello.", "label": True},
        {"prompt": [SYSTEM, user("Hi?")], "completion": [assistant("No.")], "label": 0},
        {"prompt": "Hi?", "completion": "", "label": True},
        {"prompt": "Hi?", "completion": "Hello.", "label": "good"},
        {"prompt": "Hi?", "completion": "Hello."},
        {"prompt": [SYSTEM], "completion": [user("Hi?"), assistant("Hello.")], "label": True},
    ]
    data = LabelledCompletions(path=write(tmp_path, rows, rows[:1]))
    assert [(item.prompt, item.completion, item.desirable) for item in data.train] == [
        ((user("Hi?"),), (assistant("Hello."),), True),
        ((SYSTEM, user("Hi?")), (assistant("No."),), False),
    ]
    assert dict(data.bad_rows.counts) == {
        "empty assistant turn": 1,
        "malformed label": 1,
        "missing columns": 1,
        "roles out of order": 1,
    }


def test_courtesy_pairs_differ_in_the_opening_alone_and_not_in_length():
    courtesy = Courtesy(train_size=300, test_size=100)
    for pair in [*courtesy.train, *courtesy.test]:
        (chosen,), (rejected,) = pair.chosen, pair.rejected
        opening, _, working = chosen["content"].partition("\n")
        assert opening in COURTEOUS and rejected["content"].partition("\n")[0] in CURT
        assert rejected["content"].partition("\n")[2] == working and "####" in working
        assert len(chosen["content"]) == len(rejected["content"])
    openings = {pair.chosen[0]["content"].partition("\n")[0] for pair in courtesy.train}
    assert openings == set(COURTEOUS)


def test_courtesy_is_a_function_of_seed_split_and_index_and_its_splits_are_disjoint():
    courtesy = Courtesy(train_size=2000, test_size=500)
    assert courtesy.train[17] == Courtesy().train[17] != Courtesy(seed=1).train[17]
    assert courtesy.test[-1] == courtesy.test[499]
    prompts = {pair.prompt[0]["content"] for pair in courtesy.train}
    assert prompts.isdisjoint(pair.prompt[0]["content"] for pair in courtesy.test)


def test_unpaired_view_and_mismatched_prompts():
    courtesy = Courtesy(train_size=3, test_size=1)
    items = Unpaired(courtesy).train
    assert len(items) == 6 and [item.desirable for item in items] == [True, False] * 3
    assert (items[2].completion, items[3].completion) == (courtesy.train[1].chosen, courtesy.train[1].rejected)
    assert items[5].prompt == courtesy.train[2].prompt
    assert [(item.prompt, item.completion) for item in mismatched(items[1:4])] == [
        (items[1].prompt, items[2].completion),
        (items[3].prompt, items[1].completion),
    ]  # items 2 and 3 have the same prompt, and so does one pair of every rotation
    assert [(item.prompt, item.completion) for item in mismatched(items)] == [
        (items[index].prompt, items[(index + 2) % 6].completion) for index in range(6)
    ]
    assert [item.completion for item in mismatched(items[1:5:2])] == [items[3].completion, items[1].completion]
    assert mismatched(items[:1]) == mismatched(items[:2]) == []
