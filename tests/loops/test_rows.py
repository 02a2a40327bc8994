"""Which rows a run uses: large splits are checked as they are drawn, and a resumed run goes on with the same rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cookbook.backends.fake import FakeService
from cookbook.core.errors import DataError
from cookbook.core.examples import Conversation, Example
from cookbook.data.curriculum import Shuffled
from cookbook.data.generated.base import GeneratedSequence
from cookbook.envs.single_turn import SingleTurn
from cookbook.loops import sft
from cookbook.loops.algorithms import grpo
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import MeanCentered
from cookbook.tracking import NoLogger
from tests.loops import test_grpo, test_sft
from tests.loops.harness import Killed, assert_same_run, metric_lines, summary


class Mixed:
    """Problems of which every third has a prompt that is too long, made on demand."""

    def __init__(self, make: Any, size: int = 30) -> None:
        self.train = GeneratedSequence(make, size)
        self.test = [make(1), make(3), make(2)]


def example(index: int) -> Example:
    return Example(f"mixed/{index}", ({"role": "user", "content": "What? " * (1 if index % 3 else 100)},), "1")


def chat(index: int) -> Conversation:
    turns = ({"role": "user", "content": "What?"}, {"role": "assistant", "content": "So. " * (index % 3 or 100)})
    return Conversation(f"mixed/{index}", turns)  # type: ignore[arg-type]


class Lethal(NoLogger):
    def log(self, step, metrics):
        if step == 3:
            raise Killed


def run_grpo(run_dir: Path, logger: NoLogger | None = None, make: Any = example, **options: Any) -> Path:
    config = test_grpo.configured(run_dir, **options)
    service = FakeService(f"{run_dir}/checkpoints", context_length=100)
    grpo.run(
        config,
        grpo.Components(
            service,
            logger or NoLogger(),
            Mixed(make),
            SingleTurn(),
            test_grpo.share_of_vowels,
            BuiltinLoss("importance_sampling"),
            MeanCentered(),
            Shuffled(),
        ),
    )
    return run_dir


def test_rows_made_on_demand_are_checked_when_they_are_drawn(tmp_path: Path):
    whole = run_grpo(tmp_path / "whole")
    drawn = {json.loads(line)["example"] for line in (whole / "rollouts.jsonl").read_text().splitlines()}
    assert drawn and all(int(name.removeprefix("mixed/")) % 3 for name in drawn)
    assert "30 train rows, each checked when it is drawn, 2 of 3 test rows" in (whole / "console.log").read_text()
    bad = [json.loads(line) for line in (whole / "bad_rows.jsonl").read_text().splitlines()]
    assert {row["split"] for row in bad} == {"train", "test"}
    assert {row["problem"] for row in bad} == {"prompt too long"}
    with pytest.raises(Killed):
        run_grpo(tmp_path / "killed", Lethal())
    assert_same_run(run_grpo(tmp_path / "killed"), whole)


def test_a_run_does_not_draw_forever_where_no_row_can_be_used(tmp_path: Path):
    def hopeless(index: int) -> Example:
        return replace(example(0 if index > 2 else 1), id=f"mixed/{index}")

    with pytest.raises(DataError, match="no row of the train split can be used"):
        run_grpo(tmp_path / "run", make=hopeless, groups_per_batch=40)


def run_sft(run_dir: Path, logger: NoLogger | None = None, **loop: Any) -> Path:
    config = test_sft.configured(run_dir, max_length=100, **loop)
    service = FakeService(f"{run_dir}/checkpoints")
    sft.run(config, sft.Components(service, logger or NoLogger(), Mixed(chat)))
    return run_dir


def test_epochs_over_rows_of_which_some_do_not_fit_resume_exactly(tmp_path: Path):
    whole = run_sft(tmp_path / "whole", steps=None, epochs=2)
    assert [line["rows"] for line in metric_lines(whole) if "rows" in line] == [8, 8, 4, 8, 8, 4]
    assert summary(whole)["rows"]["train"] == {"used": 20, "of": 30}
    with pytest.raises(Killed):
        run_sft(tmp_path / "killed", Lethal(), steps=None, epochs=2)
    assert_same_run(run_sft(tmp_path / "killed", steps=None, epochs=2), whole)


def test_a_large_split_is_checked_as_far_as_the_run_goes(tmp_path: Path):
    run = run_sft(tmp_path / "run", steps=1)
    assert summary(run)["rows"]["train"] == {"used": 8, "of": 30}
    bad = (run / "bad_rows.jsonl").read_text().splitlines()
    assert len(bad) < 10 + 1


def test_a_row_longer_than_the_context_is_left_out(tmp_path: Path):
    config = test_sft.configured(tmp_path / "run", steps=2)  # max_length is 512
    service = FakeService(f"{tmp_path}/checkpoints", context_length=100)
    sft.run(config, sft.Components(service, NoLogger(), Mixed(chat)))
    bad = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert all("the model's context of 100 tokens" in row["detail"] for row in bad) and bad
