"""What all datasets that are read have in common: formats, splits, sizes, bad rows."""

import csv
import gzip
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from cookbook.core import examples
from cookbook.core.errors import DataError
from cookbook.core.kinds import DATASET_KINDS
from cookbook.data.chat.dataset import ChatDataset
from cookbook.data.code.json_problems import TACO
from cookbook.data.generated.courtesy import Courtesy
from cookbook.data.generated.small_talk import SmallTalk
from cookbook.data.generated.tiny_programs import TinyPrograms
from cookbook.data.generated.word_problems import WordProblems
from cookbook.data.generated.worked import WorkedAnswers
from cookbook.data.kinds import PromptDataset, bad_rows_of
from cookbook.data.preference.labelled import LabelledCompletions, Unpaired
from cookbook.data.preference.pairs import PreferencePairs
from cookbook.data.prompts.answers import PromptAnswers
from cookbook.data.source import RowDataset, Source
from tests.code_files import taco_row
from tests.data.shipped import CONF, shipped_config

Rows = Sequence[Mapping[str, Any]]


def row(number: int) -> dict[str, Any]:
    """Columns for every kind of dataset."""
    return {
        "prompt": f"What is {number} plus 1?",
        "answer": str(number + 1),
        "completion": f"It is {number + 1}.",
        "chosen": f"It is {number + 1}.",
        "rejected": "No idea.",
        "label": "true",
    }


def prompts(**options: Any) -> PromptAnswers:
    return PromptAnswers(**{"name": "sums", "prompt_column": "prompt", **options})


KINDS: dict[str, Callable[..., Source[Any]]] = {
    "prompts": prompts,
    "chat": ChatDataset,
    "pairs": PreferencePairs,
    "labelled": LabelledCompletions,
}


def write_jsonl(file: Path, rows: Rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_gzip(file: Path, rows: Rows) -> Path:
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return file


def write_csv(file: Path, rows: Rows) -> Path:
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_parquet(file: Path, rows: Rows) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file


def write_saved(folder: Path, rows: Rows) -> Path:
    Dataset.from_list([*rows]).save_to_disk(str(folder))
    return folder


FORMATS = {
    "{}.jsonl": write_jsonl,
    "{}-0.jsonl.gz": write_gzip,
    "{}.csv": write_csv,
    "{}-00000-of-00001.parquet": write_parquet,
}
SINGLE = {
    "rows.jsonl": write_jsonl,
    "rows.jsonl.gz": write_gzip,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "saved": write_saved,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_reads_every_format(tmp_path: Path, kind: str):
    splits = {"train": [row(number) for number in range(3)], "test": [row(9)]}
    read = []
    for number, (name, write) in enumerate(FORMATS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for split, rows in splits.items():
            write(folder / name.format(split), rows)
        read.append(KINDS[kind](path=str(folder)))
    DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()}).save_to_disk(
        str(tmp_path / "saved")
    )
    read.append(KINDS[kind](path=str(tmp_path / "saved")))
    first = read[0]
    assert first.train[2].id == f"{first.name}/train/2" and first.test[0].id == f"{first.name}/test/0"
    for dataset in read[1:]:
        assert [_content(item) for item in dataset.train] == [_content(item) for item in first.train]
        assert [_content(item) for item in dataset.test] == [_content(item) for item in first.test]


def _content(item: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(item).items() if key != "source"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SINGLE)
def test_one_file_is_split_by_content(tmp_path: Path, kind: str, name: str):
    rows = [row(number // 2) for number in range(40)]  # each twice

    def split(place: str, rows: Rows) -> list[list[str]]:
        (tmp_path / place).mkdir()
        dataset = KINDS[kind](path=str(SINGLE[name](tmp_path / place / name, rows)), test_fraction=0.25)
        assert all(item.id.startswith(f"{dataset.name}/test/") for item in dataset.test)
        return [sorted(repr(_content(item) | {"id": ""}) for item in part) for part in (dataset.train, dataset.test)]

    train, test = split("a", rows)
    assert (len(train), len(test)) == (30, 10) and not {*train} & {*test}
    assert split("b", rows[::-1]) == [train, test], "the order of the rows must not matter"


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_are_counted_or_stop_the_reading(tmp_path: Path, kind: str):
    file = write_jsonl(tmp_path / "train.jsonl", [row(0), {"other": 1}, row(2), row(3)])
    file.write_text(file.read_text() + '{"cut": "off\n[1]\n')
    write_jsonl(tmp_path / "test.jsonl", [row(9)])
    dataset = KINDS[kind](path=str(tmp_path), on_bad_row="skip")
    assert [item.id for item in dataset.train] == [f"{dataset.name}/train/{number}" for number in (0, 2, 3)]
    assert str(dataset.bad_rows) == (
        "3 rows skipped: 1 missing columns (train.jsonl:2), 1 broken JSON (train.jsonl:5), "
        "1 not a JSON object (train.jsonl:6)"
    )
    with pytest.raises(DataError, match=r"train\.jsonl:2: missing columns: .*set dataset\.on_bad_row=skip"):
        KINDS[kind](path=str(tmp_path), on_bad_row="fail")
    with pytest.raises(DataError, match=r"3 usable rows in the train split \(3 rows skipped.*train_size=4"):
        KINDS[kind](path=str(tmp_path), on_bad_row="skip", train_size=4)
    assert len(KINDS[kind](path=str(tmp_path), on_bad_row="fail", train_size=1).train) == 1


def test_the_evaluation_set_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train = write_jsonl(tmp_path / "mine.jsonl", [row(number) for number in range(5)])
    (tmp_path / "benchmark").mkdir()
    test = write_csv(tmp_path / "benchmark" / "hard.csv", [row(7), row(8)])
    dataset = prompts(path=str(train), test_path=str(test), test_size=1)
    assert ([item.answer for item in dataset.train], dataset.test[0].answer) == (["1", "2", "3", "4", "5"], "8")
    asked = []

    def load_dataset(hub_id: str, config: str | None, split: str) -> Rows:
        asked.append((hub_id, config, split))
        return [row(9)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    dataset = prompts(path=str(train), test_hub_id="owner/hard", test_hub_config="en", test_split="validation")
    assert (len(dataset.train), dataset.test[0].answer) == (5, "10")
    assert asked == [("owner/hard", "en", "validation")]
    with pytest.raises(DataError, match=r"dataset\.test_path=/nowhere does not exist"):
        prompts(path=str(train), test_path="/nowhere")
    with pytest.raises(DataError, match=r"dataset\.test_split=null: name the split"):
        prompts(path=str(train), test_hub_id="owner/hard", test_split=None)


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl", [row(number) for number in range(4)])
    dataset = ChatDataset(path="~/rows.jsonl", test_path="~/rows.jsonl")
    assert (len(dataset.train), dataset.test[0].source) == (4, "rows.jsonl:1")


def test_files_that_cannot_be_read(tmp_path: Path):
    saved = tmp_path / "saved"
    DatasetDict({"train": Dataset.from_list([row(0)])}).save_to_disk(str(saved))
    with pytest.raises(DataError, match=r"holds no test split; it has train$"):
        prompts(path=str(saved))
    (saved / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"train: not a readable saved dataset"):
        prompts(path=str(saved), test_split=None)
    table = tmp_path / "rows.csv"
    table.write_text('prompt,answer\n1+1,2\n1+2,3,4\n"1+\n3",4\n')
    dataset = prompts(path=str(table), on_bad_row="skip", test_path=str(table))
    assert [item.messages[0]["content"] for item in dataset.train] == ["1+1", "1+\n3"]
    assert "2 wrong number of columns (rows.csv:3, rows.csv:3)" in str(dataset.bad_rows)
    table.write_text('prompt,answer\n"open,2\n')
    with pytest.raises(DataError, match=r"rows\.csv: not readable as CSV"):
        prompts(path=str(table))
    for wrong in (0, 1, 1.5):
        with pytest.raises(DataError, match=rf"dataset\.test_fraction={wrong}: must be above 0 and below 1"):
            prompts(path=str(table), test_fraction=wrong)


def test_code_problems_are_read_like_all_others(tmp_path: Path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [taco_row(number) for number in range(10)])
    dataset = TACO(path=str(rows), test_fraction=0.3)
    assert (len(dataset.train), len(dataset.test)) == (7, 3)


def test_the_shared_options_in_conf_are_those_of_the_classes():
    for file, owner in (("rows", RowDataset), ("splits", Source), ("prompts", PromptAnswers)):
        written = yaml.safe_load((CONF / "dataset" / "_source" / f"{file}.yaml").read_text())
        defaults = {field.name: field.default for field in fields(owner)}
        assert all(defaults[key] == value for key, value in written.items() if key != "defaults"), file
    config = shipped_config("gsm8k")
    assert {field.name for field in fields(Source)} - {"name"} <= config.keys()
    assert config.keys() - {"_target_"} <= inspect.signature(PromptAnswers).parameters.keys()


def test_a_dataset_of_five_lines_is_enough():
    class Mine:
        def __init__(self) -> None:
            self.train = [examples.Example("mine/0", ({"role": "user", "content": "1+1?"},), "2")]
            self.test = self.train

    dataset: PromptDataset = Mine()
    assert bad_rows_of(dataset).total == 0
    assert bad_rows_of(WorkedAnswers(dataset)).total == 0


def test_datasets_say_their_kind(tmp_path: Path):
    write_jsonl(tmp_path / "rows.jsonl", [row(number) for number in range(4)])
    read = [kind(path=str(tmp_path / "rows.jsonl")) for kind in KINDS.values()]
    generated = [WordProblems(), TinyPrograms(), SmallTalk(), WorkedAnswers(WordProblems()), Courtesy()]
    for dataset in [*read, *generated, Unpaired(Courtesy())]:
        assert isinstance(dataset.train[0], getattr(examples, DATASET_KINDS[dataset.kind])), dataset
    assert [dataset.kind for dataset in read] == [*KINDS]


def test_importing_datasets_imports_no_heavy_library():
    modules = [
        f"cookbook.data.{file.relative_to(CONF.parent / 'cookbook' / 'data').with_suffix('')}".replace("/", ".")
        for file in (CONF.parent / "cookbook" / "data").rglob("[a-z]*.py")
    ]
    heavy = "renderers datasets transformers torch pyarrow openai jinja2 pandas"
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {heavy.split()} if name in sys.modules])"
    assert len(modules) > 25
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
