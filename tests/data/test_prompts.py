import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from cookbook.core.errors import DataError
from cookbook.data.kinds import PromptDataset
from cookbook.data.order import order_index
from cookbook.data.prompts.answers import GSM8K, GSM8K_INSTRUCTION, PromptAnswers
from rewards.math import GSM8K as GSM8KReward
from tests.data.shipped import shipped_config, shipped_dataset

GSM8K_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
ROWS = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1:,}"} for i in (1, 2, 1233)]


def write_jsonl(file: Path, rows) -> None:
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS[:1])
    return tmp_path


def test_a_row_becomes_an_example(folder: Path):
    dataset = GSM8K(path=str(folder), instruction="Think.")
    assert [len(dataset.train), len(dataset.test)] == [3, 1]
    example = dataset.train[2]
    assert example.id == "gsm8k/train/2"
    assert example.messages == ({"role": "user", "content": "What is 1233 + 1?\n\nThink."},)
    assert example.answer == "1234"
    assert example.extra["solution"] == ROWS[2]["answer"]
    assert GSM8K(path=str(folder), instruction="").test[0].messages[0]["content"] == "What is 1 + 1?"


@pytest.mark.parametrize("place", ["", "main", "data"])
def test_parquet_as_the_hub_names_it(tmp_path: Path, folder: Path, place: str):
    target = tmp_path / "parquet" / place
    target.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:2]), target / "train-00000-of-00002.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[2:]), target / "train-00001-of-00002.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), target / "test.parquet")
    dataset = GSM8K(path=str(tmp_path / "parquet"))
    expected = GSM8K(path=str(folder))
    for split in ("train", "test"):
        items = [[replace(item, source="") for item in getattr(each, split)] for each in (dataset, expected)]
        assert items[0] == items[1]
    assert expected.train[2].source == "train.jsonl:3"
    assert dataset.train[2].source.endswith("train-00001-of-00002.parquet row 1")


def test_other_columns_and_answers(tmp_path: Path):
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [{"problem": "1+1?", "gold": 2}])
    dataset = PromptAnswers(name="sums", path=str(tmp_path), prompt_column="problem", answer_column="gold")
    assert (dataset.train[0].id, dataset.train[0].answer) == ("sums/train/0", "2")


def test_sizes_keep_the_first_rows(folder: Path):
    dataset = GSM8K(path=str(folder), train_size=2)
    assert [example.id for example in dataset.train] == ["gsm8k/train/0", "gsm8k/train/1"]
    with pytest.raises(DataError, match=r"3 usable rows in the train split .*dataset.train_size=4 asks for more"):
        GSM8K(path=str(folder), train_size=4)
    with pytest.raises(DataError, match=r"dataset.test_size=0"):
        GSM8K(path=str(folder), test_size=0)


def prompts(folder: Path, rows: list[dict[str, Any]], **options: Any) -> PromptAnswers:
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "test.jsonl", rows[-1:])
    return PromptAnswers(**{"name": "mine", "path": str(folder), "prompt_column": "prompt", **options})


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def test_prompts_of_ones_own_through_the_shipped_yaml(tmp_path: Path):
    rows = [{"prompt": "1+1?", "answer": "1+1=2\n#### 2"}, {"prompt": "1+2?", "answer": " 3 "}]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    dataset: PromptDataset = shipped_dataset("prompts", path=str(tmp_path / "mine.jsonl"))
    assert sorted(example.answer for example in (*dataset.train, *dataset.test)) == ["2", "3"]


def test_further_columns_go_into_extra(tmp_path: Path):
    row = {"prompt": "1+1?", "answer": "2", "level": 3, "choices": ["1", "2"]}
    first, second = prompts(tmp_path, [row, row | {"solution": "Count: 2."}]).train
    assert first.extra == {"solution": "2", "level": 3, "choices": ["1", "2"]}
    assert second.extra == {"solution": "Count: 2.", "level": 3, "choices": ["1", "2"]}


def test_a_template_makes_the_prompt_from_columns(tmp_path: Path):
    row = {"passage": "Ada has {2} cats.", "question": "How many?", "n": 1, "answer": "2", "note": ""}
    template = "{passage}\n\n{n}. {question}{note} Answer as {{number}}."
    dataset = prompts(tmp_path, [row], template=template, instruction="Think.", system="Be brief.")
    content = "Ada has {2} cats.\n\n1. How many? Answer as {number}.\n\nThink."
    assert list(dataset.train[0].messages) == [system("Be brief."), user(content)]
    assert dataset.train[0].extra["question"] == "How many?"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question", r"dataset\.template='{question': expected '}' before end of string; write {{ and }}"),
        ("question}", r"Single '}' encountered"),
        ("{}", r"braces must hold the name of a column"),
        ('{question} as {"answer": 2}', r"braces must hold the name of a column"),
        ("{question!r}", r"braces must hold the name of a column"),
        ("the question", r"has no placeholder"),
        (
            "{topic}",
            r"jsonl:1: missing columns: dataset\.template uses {topic}; the row has 'question', 'answer'",
        ),
        ("{choices}", r"train\.jsonl:1: not a text: dataset\.template uses {choices}, which is \['1'\]"),
    ],
)
def test_a_wrong_template_is_named(tmp_path: Path, template: str, message: str):
    with pytest.raises(DataError, match=message) as caught:
        row = {"question": "1+1?", "answer": "2", "choices": ["1"]}
        prompts(tmp_path, [row], template=template, on_bad_row="fail")
    assert "\n" not in str(caught.value)


def test_a_prompt_may_be_a_list_of_messages(tmp_path: Path):
    chat = [user("Hi."), assistant("Hello."), user("1+1?")]
    rows = [{"prompt": chat, "answer": "2"}, {"prompt": [system("Own."), *chat], "answer": "2"}]
    plain, own = prompts(tmp_path, rows, system="Be brief.", instruction="Think.").train
    asked = [*chat[:2], user("1+1?\n\nThink.")]
    assert [list(plain.messages), list(own.messages)] == [[system("Be brief."), *asked], [system("Own."), *asked]]
    bad = [{"prompt": chat[:2], "answer": "2"}, {"prompt": [user("a"), user("b")], "answer": "2"}, *rows]
    assert dict(prompts(tmp_path, bad, on_bad_row="skip").bad_rows.counts) == {
        "no user turn at the end": 1,
        "roles out of order": 1,
    }


def test_few_shot_turns_from_the_first_training_rows_or_a_list(tmp_path: Path):
    rows = [{"prompt": f"{n}+1?", "answer": f"{n + 1}", "solution": f"It is {n + 1}."} for n in range(5)]
    dataset = prompts(tmp_path, rows, few_shot=2, system="Be brief.", instruction="Think.", train_size=2)
    shots = [user("0+1?\n\nThink."), assistant("It is 1."), user("1+1?\n\nThink."), assistant("It is 2.")]
    assert [example.id for example in dataset.train] == ["mine/train/2", "mine/train/3"]
    assert list(dataset.train[0].messages) == [system("Be brief."), *shots, user("2+1?\n\nThink.")]
    assert list(dataset.test[0].messages) == [system("Be brief."), *shots, user("4+1?\n\nThink.")]
    given = prompts(tmp_path, rows, few_shot=[{"prompt": "8+1?", "answer": "9"}])
    assert len(given.train) == 5
    assert list(given.train[0].messages) == [user("8+1?"), assistant("9"), user("0+1?")]
    for few_shot, message in (
        (5, r"0 usable rows in the train split"),
        (6, r"dataset\.few_shot=6: there are only 5 training rows"),
        (-1, r"dataset\.few_shot=-1: must be 0 or more"),
        ([{"prompt": "1+1?"}], r"dataset\.few_shot\[0\]=.*: must have prompt and answer"),
    ):
        with pytest.raises(DataError, match=message):
            prompts(tmp_path, rows, few_shot=few_shot)


def test_prompts_options_do_not_change_what_is_held_out(tmp_path: Path):
    rows = [{"prompt": f"{n}+1?", "answer": f"{n + 1}"} for n in range(20)]
    plain = prompts(tmp_path, rows, test_split=None, test_fraction=0.3)
    dressed = prompts(tmp_path, rows, test_split=None, test_fraction=0.3, system="Be brief.", instruction="Think.")
    assert [example.id for example in plain.test] == [example.id for example in dressed.test]
    assert len(plain.test) == 6


@pytest.mark.parametrize(
    ("third", "message"),
    [
        ('{"question": "x", "answer": \n', r"train.jsonl:3: broken JSON: Expecting value at column 1; fix the row"),
        ("[1, 2]\n", r"train.jsonl:3: not a JSON object: a list"),
        ("[" * 100_000 + "\n", r"train.jsonl:3: broken JSON: RecursionError"),
        (
            {"question": "x", "reply": "#### 1"},
            r"train.jsonl:3: missing columns: no 'answer'; the row has 'question', 'reply'",
        ),
        ({"question": None, "answer": "#### 1"}, r"train.jsonl:3: empty column: 'question' is None; it must be text"),
        ({"question": " ", "answer": "#### 1"}, r"train.jsonl:3: empty column: 'question' is ' '"),
        ({"question": "q", "answer": {"a": 1}}, r"train.jsonl:3: not text: 'answer' is "),
        (
            {"question": "x", "answer": "forty-two"},
            r"train.jsonl:3: no gold answer: column 'answer' ends with 'forty-two'",
        ),
    ],
)
def test_a_broken_line_is_named(folder: Path, third, message: str):
    # The blank line counts as a line of the file.
    write_jsonl(folder / "train.jsonl", [ROWS[0], "\n", third, ROWS[1]])
    with pytest.raises(DataError, match=message) as caught:
        GSM8K(path=str(folder), on_bad_row="fail")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_line_that_is_not_utf8_is_named(folder: Path):
    (folder / "test.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"test.jsonl:1: broken JSON: UnicodeDecodeError"):
        GSM8K(path=str(folder), on_bad_row="fail")


def test_places_that_hold_no_dataset(folder: Path):
    with pytest.raises(DataError, match=r"dataset.path=/nowhere does not exist; give a file or a folder"):
        GSM8K(path="/nowhere")
    (folder / "test.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"no test split: looked for test\*.jsonl, .*test\*.parquet there and in main/ and data/"
    ):
        GSM8K(path=str(folder))
    (folder / "test.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"test.parquet: not a readable Parquet file"):
        GSM8K(path=str(folder))
    (folder / "test.parquet").unlink()
    (folder / "test.jsonl").write_text("")
    with pytest.raises(DataError, match=r"0 usable rows in the test split \(no row skipped\)"):
        GSM8K(path=str(folder))
    with pytest.raises(DataError, match=r"neither dataset.path nor dataset.hub_id"):
        PromptAnswers(name="x")


def test_the_hub_is_asked_for_both_splits_and_its_failure_is_one_line(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def load_dataset(hub_id, config, split):
        calls.append((hub_id, config, split))
        if split == "test":
            raise ConnectionError("Couldn't reach\nthe hub")
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"openai/gsm8k \(test\) .* ConnectionError: Couldn't reach the hub; check"):
        GSM8K()
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


@pytest.mark.skipif(not GSM8K_FOLDER.is_dir(), reason="the GSM8K files are not in ../shared/data/gsm8k")
def test_the_real_dataset_through_the_shipped_yaml():
    assert shipped_config("gsm8k")["instruction"] == GSM8K_INSTRUCTION
    dataset: PromptDataset = shipped_dataset("gsm8k", path=str(GSM8K_FOLDER))
    assert [len(dataset.train), len(dataset.test)] == [7473, 1319]
    GSM8KReward().validate(dataset.test)


def test_word_problems_through_the_shipped_yaml():
    dataset: PromptDataset = shipped_dataset("word_problems")
    GSM8KReward().validate(dataset.train[:200])
    GSM8KReward().validate(dataset.test[:200])


def test_every_epoch_is_a_permutation_of_its_own_and_any_position_is_found_directly():
    length, seed = 10, 3
    drawn = [order_index(position, length, seed) for position in range(3 * length)]
    epochs = [drawn[start : start + length] for start in (0, length, 2 * length)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    # Out of order, as after a resume.
    assert [order_index(position, length, seed) for position in reversed(range(3 * length))] == drawn[::-1]
    assert [order_index(position, length, seed + 1) for position in range(length)] != epochs[0]
    # Golden values: a change would silently reorder every run.
    assert epochs[0] == [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]


def test_order_index_refuses_nonsense():
    for arguments in ((0, 0, 0), (-1, 5, 0), (0, 5, -1)):
        with pytest.raises(DataError):
            order_index(*arguments)
