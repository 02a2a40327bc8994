"""The examples of docs/datasets.md and docs/curriculum.md."""

import json
import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from cookbook.core.examples import Example
from cookbook.data.kinds import bad_rows_of
from tests.data.shipped import CONF


def blocks(page: str, language: str) -> list[str]:
    text = (CONF.parent / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_blocks(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "examples"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec", dont_inherit=True), names)
    return names


def test_datasets_of_ones_own(tmp_path: Path):
    names = run_blocks("datasets.md")
    doubling = names["Doubling"](size=20)
    assert (len(doubling.train), doubling.test[3].answer, bad_rows_of(doubling).total) == (10, "6", 0)
    rows = [{"question": "Why?", "reply": reply, "draft": reply == "Hm."} for reply in ("So.", "", "Hm.", "No.")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    interviews = names["Interviews"](path=str(tmp_path / "rows.jsonl"), test_path=str(tmp_path / "rows.jsonl"))
    assert [chat.id for chat in interviews.train] == ["interviews/train/0", "interviews/train/3"]
    assert str(interviews.bad_rows) == "2 rows skipped: 2 no reply (rows.jsonl:2, rows.jsonl:2)"


def test_a_multiple_choice_benchmark_in_yaml(tmp_path: Path):
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "science.yaml").write_text(blocks("datasets.md", "yaml")[1])
    header, row = "question,a,b,label,topic\n", "What is {}?,yes,no,A,{}\n"
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text(header + "".join(row.format(f"{split} {n}", n) for n in range(3)))
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        overrides = [
            f"hydra.searchpath=[file://{CONF}]",
            f"dataset.path={tmp_path}/train.csv",
            f"dataset.test_path={tmp_path}/test.csv",
        ]
        dataset = instantiate(compose("dataset/science", overrides=overrides).dataset, _convert_="all")
    example = dataset.test[2]
    assert (len(dataset.train), example.answer, example.extra["topic"]) == (1, "A", "2")
    assert [message["role"] for message in example.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert example.messages[-1]["content"] == ('What is test 2?\nA) yes\nB) no\n\nEnd with "#### " and the letter.')


def test_a_curriculum_of_ones_own():
    curriculum = run_blocks("curriculum.md")["Backwards"]()([Example(str(n), (), "") for n in range(5)], 0)
    assert curriculum.choose(3) + curriculum.choose(3) == [4, 3, 2, 1, 0, 4]
