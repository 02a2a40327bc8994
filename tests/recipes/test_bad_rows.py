"""Recipes on folders with rows that cannot be used: those are left out with their place, and the run ends well."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandLine

LONG = "The crate holds nine jars. " * 60
"""More tokens than the context of either model has."""

KINDS: dict[str, str | bytes | dict[str, Any]] = {
    "broken JSON": '{"question": "1 plus 1 is?", "answer": ',
    "broken JSON: not UTF-8": b'{"question": "\xff", "answer": "#### 2"}',
    "not a JSON object": "[1, 2]",
    "missing columns": {"question": "1 plus 1 is?"},
    "empty column": {"question": None, "answer": "#### 2"},
    "empty column: blank": {"question": "  ", "answer": "#### 2"},
    "no gold answer": {"question": "1 plus 1 is?", "answer": "It is two."},
    "prompt too long": {"question": LONG, "answer": "#### 9"},
    "the chat format cannot write it": {"question": "1 plus \ud800 is?", "answer": "#### 2"},
    "no user turn at the end": {"question": [{"role": "system", "content": "Be brief."}], "answer": "#### 2"},
}

FAST = ("loop.group_size=2", "loop.max_tokens=8", "eval.every=0", "checkpoint.every=0")


def sum_row(number: int) -> dict[str, Any]:
    return {"question": f"{number} plus {number} is?", "answer": f"It is easy.\n#### {2 * number}"}


def write(file: Path, rows: list[Any]) -> None:
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    file.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))


def write_folder(folder: Path, train: list[Any], test: list[Any]) -> Path:
    folder.mkdir()
    write(folder / "train.jsonl", train)
    write(folder / "test.jsonl", test)
    return folder


def read(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_a_thousand_rows_of_which_fifty_are_bad_in_ten_ways(cli: CommandLine, tmp_path: Path):
    rows: list[Any] = [sum_row(number) for number in range(1000)]
    places = {}
    for number in range(50):
        kind = list(KINDS)[number % 10]
        rows[20 * number + 7] = KINDS[kind]
        places[f"train.jsonl:{20 * number + 8}"] = kind.partition(":")[0]
    folder = write_folder(tmp_path / "data", rows, [sum_row(number) for number in range(2000, 2200)])
    run = tmp_path / "run"
    ran = cli(
        "recipe=gsm8k_grpo",
        "backend=fake",
        "backend.context_length=512",
        "dataset=gsm8k",
        f"dataset.path={folder}",
        "loop.steps=4",
        "loop.groups_per_batch=238",
        *FAST,
        f"run_dir={run}",
    )
    assert ran.status == 0, ran.err
    assert "dataset: 950 of 1,000 train rows, 200 of 200 test rows; 50 rows skipped: " in ran.out
    assert "all in bad_rows.jsonl" in ran.out and "5 prompt too long (train.jsonl:148, train.jsonl:348, " in ran.out
    assert {row["place"]: row["problem"] for row in read(run, "bad_rows.jsonl")} == places
    assert summary(run)["status"] == "completed"
    assert summary(run)["rows"] == {
        "train": {"used": 950, "of": 1000},
        "test": {"used": 200, "of": 200},
        "skipped": Counter(places.values()),
    }
    drawn = Counter(rollout["example"] for rollout in read(run, "rollouts.jsonl"))
    good = {f"gsm8k/train/{index}" for index in range(1000) if f"train.jsonl:{index + 1}" not in places}
    assert set(drawn) == good  # 952 groups: two examples more than an epoch


def test_fail_names_the_first_row_that_cannot_be_used(cli: CommandLine, tmp_path: Path):
    folder = write_folder(tmp_path / "data", [sum_row(1), {"question": LONG, "answer": "#### 9"}], [sum_row(2)])
    arguments = ("recipe=gsm8k_grpo", "backend=fake", "backend.context_length=512", "dataset=gsm8k", *FAST)
    ran = cli(*arguments, f"dataset.path={folder}", "dataset.on_bad_row=fail", f"run_dir={tmp_path / 'run'}")
    assert ran.status != 0
    assert "train.jsonl:2: prompt too long" in ran.err and "dataset.on_bad_row=skip" in ran.err


def test_a_split_without_a_usable_row_says_why(cli: CommandLine, tmp_path: Path):
    folder = write_folder(tmp_path / "data", [{"question": LONG, "answer": "#### 9"}] * 3, [sum_row(2)])
    arguments = ("recipe=gsm8k_grpo", "backend=fake", "backend.context_length=512", "dataset=gsm8k", *FAST)
    ran = cli(*arguments, f"dataset.path={folder}", f"run_dir={tmp_path / 'run'}")
    assert ran.status != 0
    assert "no row of the train split can be used (3 rows skipped: 3 prompt too long" in ran.err
    assert "the model's context is 512" in ran.err


def test_a_long_prompt_is_left_out_on_the_local_backend(cli: CommandLine, tmp_path: Path):
    rows = [sum_row(number) for number in range(7)]
    folder = write_folder(tmp_path / "data", [*rows[:3], {"question": LONG, "answer": "#### 9"}, *rows[3:]], rows)
    ran = cli(
        "recipe=gsm8k_grpo",
        "dataset=gsm8k",
        f"dataset.path={folder}",
        "loop.steps=2",
        "loop.groups_per_batch=4",
        *FAST,
        f"run_dir={tmp_path / 'run'}",
    )
    assert ran.status == 0, ran.err
    assert "dataset: 7 of 8 train rows, 7 of 7 test rows; 1 row skipped: 1 prompt too long (train.jsonl:4)" in ran.out


def test_a_gold_answer_that_the_reward_cannot_read_is_left_out(cli: CommandLine, tmp_path: Path):
    pytest.importorskip("math_verify")
    rows = [{"problem": f"What is {number} plus {number}?", "answer": f"{2 * number}"} for number in range(6)]
    unreadable = {"problem": "What is it?", "answer": "\\begin{cases} who knows"}
    folder = write_folder(tmp_path / "data", [*rows, unreadable], rows)
    ran = cli(
        "recipe=gsm8k_grpo",
        "backend=fake",
        "dataset=prompts",
        f"dataset.path={folder}",
        "dataset.prompt_column=problem",
        "reward=latex",
        "loop.steps=1",
        "loop.groups_per_batch=6",
        *FAST,
        f"run_dir={tmp_path / 'run'}",
    )
    assert ran.status == 0, ran.err
    assert "1 row skipped: 1 the reward cannot judge it (train.jsonl:7)" in ran.out
    assert "reward/error" not in ran.err


def test_a_problem_whose_tests_import_a_missing_package_is_left_out(cli: CommandLine, tmp_path: Path):
    row = {
        "text": "Write a function half(n).",
        "code": "def half(n):\n    return n / 2",
        "test_list": ["assert half(2) == 1", "assert half(4) == 2"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    setup = {"test_setup_code": "import no_such_package_here\n"}
    numbers = (*range(11, 15), *range(601, 606))  # MBPP's held-out and training problems
    rows = [row | {"task_id": number} | (setup if number == 603 else {}) for number in numbers]
    write(tmp_path / "mbpp.jsonl", rows)
    ran = cli(
        "recipe=code_grpo",
        "backend=fake",
        "dataset=mbpp",
        f"dataset.path={tmp_path / 'mbpp.jsonl'}",
        "loop.steps=1",
        "loop.groups_per_batch=4",
        *FAST,
        f"run_dir={tmp_path / 'run'}",
    )
    assert ran.status == 0, ran.err
    (bad,) = read(tmp_path / "run", "bad_rows.jsonl")
    assert bad["place"] == "mbpp.jsonl:7" and "no_such_package_here" in bad["detail"]


def chat_row(number: int, words: int = 1) -> dict[str, Any]:
    return {"prompt": f"{number} plus {number}?", "completion": "it is " * words + f"{2 * number}."}


def test_every_epoch_trains_on_every_row_once_and_the_numbers_are_said(cli: CommandLine, tmp_path: Path):
    train = [*map(chat_row, range(10)), chat_row(99, words=400), {"prompt": "no answer"}]
    folder = write_folder(tmp_path / "data", train, [chat_row(50), chat_row(51, words=400)])
    arguments = ("recipe=chat_sft", "backend=fake", "dataset=chat", f"dataset.path={folder}", "eval.every=0")
    run = tmp_path / "run"
    ran = cli(*arguments, "loop.batch_size=4", "loop.steps=null", "loop.epochs=2", f"run_dir={run}")
    assert ran.status == 0, ran.err
    assert "dataset: 10 of 12 train rows, 1 of 2 test rows; 3 rows skipped: 2 too long (train.jsonl:11, " in ran.out
    assert "batches: 3 steps of 4 rows per epoch, the last of 2; 6 steps in all" in ran.out and "step 6/6" in ran.out
    assert [line["rows"] for line in read(run, "metrics.jsonl") if "rows" in line] == [4, 4, 2, 4, 4, 2]
    small = cli(*arguments, "loop.batch_size=16", "loop.steps=3", f"run_dir={tmp_path / 'small'}")
    assert "batches: 3 steps, each of all 10 rows, fewer than loop.batch_size=16" in small.out
    assert [line["rows"] for line in read(tmp_path / "small", "metrics.jsonl") if "rows" in line] == [10, 10, 10]


@pytest.mark.parametrize(
    ("truncation", "reason"), [("drop", "too long"), ("right", "both sides are the same after truncation")]
)
def test_pairs_that_do_not_fit_are_named(cli: CommandLine, tmp_path: Path, truncation: str, reason: str):
    story = "the crate holds nine jars and " * 12
    rows = [{"prompt": f"Spell {n}.", "chosen": "f" * n, "rejected": "e" * n} for n in (1, 2, 3)]
    long = {"prompt": "Tell me.", "chosen": f"{story}all are full.", "rejected": f"{story}all are empty."}
    folder = write_folder(tmp_path / "data", [*rows[:2], long], [rows[2], long])
    ran = cli(
        "recipe=preference_dpo",
        "backend=fake",
        "dataset=preference",
        f"dataset.path={folder}",
        "loop.max_length=100",
        f"loop.truncation={truncation}",
        "loop.steps=2",
        f"run_dir={tmp_path / 'run'}",
    )
    assert ran.status == 0, ran.err
    assert "dataset: 2 of 3 train rows, 1 of 2 test rows" in ran.out
    assert f"2 rows skipped: 2 {reason} (train.jsonl:3, test.jsonl:2)" in ran.out


@pytest.mark.parametrize("prompts", ["equal", "one row"])
def test_kto_needs_no_second_prompt(cli: CommandLine, tmp_path: Path, prompts: str):
    rows = [{"prompt": "Say it.", "completion": f"word {n}", "label": n % 2 == 0} for n in range(5)]
    folder = write_folder(tmp_path / "data", rows if prompts == "equal" else rows[:1], rows[:2])
    ran = cli(
        "recipe=preference_kto",
        "backend=fake",
        "dataset=kto",
        f"dataset.path={folder}",
        "loop.batch_size=2",
        "loop.steps=4",
        f"run_dir={tmp_path / 'run'}",
    )
    assert ran.status == 0, ran.err
    lines = read(tmp_path / "run", "metrics.jsonl")
    assert all(line["kl_baseline/train"] == 0 for line in lines if "kl_baseline/train" in line)
    sizes = [2, 2, 1, 2] if prompts == "equal" else [1, 1, 1, 1]
    assert [line["rows"] for line in lines if "rows" in line] == sizes
