import json
from pathlib import Path

import pyarrow
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pyarrow import parquet

from cookbook.core.errors import DataError
from cookbook.data.kinds import PromptDataset
from cookbook.data.order import order_index
from cookbook.data.prompts.answers import GSM8K, GSM8K_INSTRUCTION, PromptAnswers
from rewards.math import GSM8K as GSM8KReward

CONF = Path(__file__).parents[2] / "conf" / "dataset"
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
    assert (dataset.train, dataset.test) == (expected.train, expected.test)


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


@pytest.mark.parametrize(
    ("third", "message"),
    [
        ('{"question": "x", "answer": \n', r"train.jsonl:3: broken JSON: Expecting value at column 1; fix the row"),
        ("[1, 2]\n", r"train.jsonl:3: not a JSON object: a list"),
        ("[" * 100_000 + "\n", r"train.jsonl:3: broken JSON: RecursionError"),
        ({"question": "x", "reply": "#### 1"}, r"train.jsonl:3: missing columns: no 'answer'; the row has 'question', 'reply'"),
        ({"question": None, "answer": "#### 1"}, r"train.jsonl:3: empty column: 'question' is None; it must be text"),
        ({"question": " ", "answer": "#### 1"}, r"train.jsonl:3: empty column: 'question' is ' '"),
        ({"question": "x", "answer": "forty-two"}, r"train.jsonl:3: no gold answer: column 'answer' ends with 'forty-two'"),
    ],
)
def test_a_broken_line_is_named(folder: Path, third, message: str):
    # The blank line counts as a line of the file.
    write_jsonl(folder / "train.jsonl", [ROWS[0], "\n", third, ROWS[1]])
    with pytest.raises(DataError, match=message) as caught:
        GSM8K(path=str(folder))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_line_that_is_not_utf8_is_named(folder: Path):
    (folder / "test.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"test.jsonl:1: broken JSON: UnicodeDecodeError"):
        GSM8K(path=str(folder))


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


@pytest.mark.skipif(not GSM8K_FOLDER.is_dir(), reason="needs shared/data/gsm8k beside the repository")
def test_the_real_dataset_through_the_shipped_yaml():
    config = OmegaConf.load(CONF / "gsm8k.yaml")
    assert config.instruction == GSM8K_INSTRUCTION
    dataset: PromptDataset = instantiate(config, path=str(GSM8K_FOLDER))
    assert [len(dataset.train), len(dataset.test)] == [7473, 1319]
    GSM8KReward().validate(dataset.test)


def test_word_problems_through_the_shipped_yaml():
    dataset: PromptDataset = instantiate(OmegaConf.load(CONF / "word_problems.yaml"))
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
