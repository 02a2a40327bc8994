"""The SFT loop on the fake backend."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.backends.fake import FakeService
from cookbook.core.errors import ConfigError, DataError
from cookbook.core.types import AdamParams
from cookbook.data.chat.dataset import ChatDataset
from cookbook.data.generated.small_talk import SmallTalk
from cookbook.loops import sft
from cookbook.loops.config import CheckpointConfig, EvalConfig, ModelConfig, RunConfig
from cookbook.loops.sft import SFTConfig
from cookbook.tracking import NoLogger
from tests.loops.harness import Killed, assert_same_run, metric_lines, summary


def configured(run_dir: Path, **loop) -> RunConfig:
    settings = {"steps": 8, "batch_size": 8, "max_length": 512} | loop
    return RunConfig(
        recipe="test",
        run_dir=str(run_dir),
        model=ModelConfig(name="fake"),
        optim=AdamParams(learning_rate=0.1),
        loop=SFTConfig(**settings),
        eval=EvalConfig(every=4, examples=16),
        checkpoint=CheckpointConfig(every=3, keep=2),
        backend={"_target_": "cookbook.backends.fake.FakeService"},
        dataset={"_target_": "cookbook.data.generated.small_talk.SmallTalk"},
        logger={},
    )


def run(config: RunConfig, dataset=None, logger=None) -> Path:
    service = FakeService(state_dir=f"{config.run_dir}/checkpoints")
    sft.run(config, sft.Components(service, logger or NoLogger(), dataset or SmallTalk()))
    return Path(config.run_dir)


def test_held_out_loss_falls(tmp_path):
    run_dir = run(configured(tmp_path / "run", steps=20))
    evaluations = summary(run_dir)["eval"]
    assert evaluations["after"]["nll"] < 0.8 * evaluations["before"]["nll"]
    assert [line["step"] for line in metric_lines(run_dir) if "eval/nll" in line] == [0, 4, 8, 12, 16, 20]


def test_the_learning_rate_follows_its_schedule(tmp_path):
    lines = metric_lines(run(configured(tmp_path / "run", schedule="linear", warmup_fraction=0.25)))
    rates = [line["optim/lr"] for line in lines if "optim/lr" in line]
    assert rates == pytest.approx([0.1 * factor for factor in (1 / 2, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)])


@pytest.mark.parametrize("killed_at", [1, 5])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, killed_at):
    class Lethal(NoLogger):
        def log(self, step, metrics):
            if step == killed_at:
                raise Killed

    whole = run(configured(tmp_path / "whole"))
    with pytest.raises(Killed):
        run(configured(tmp_path / "killed"), logger=Lethal())
    assert_same_run(run(configured(tmp_path / "killed")), whole)


def test_epochs_visit_every_conversation_once_in_an_order_of_their_own(tmp_path):
    data = SmallTalk(train_size=16, test_size=4)
    config = configured(tmp_path / "run", steps=None, epochs=2)
    run_dir = run(config, dataset=data)
    lines = [line for line in metric_lines(run_dir) if "nll/train" in line]
    assert len(lines) == 4
    tokens = [line["tokens/trained"] for line in lines]
    assert tokens[0] + tokens[1] == tokens[2] + tokens[3]
    assert tokens[:2] != tokens[2:]


def test_conversations_that_do_not_fit_are_left_out_before_batching_and_counted(tmp_path):
    run_dir = run(configured(tmp_path / "run", max_length=180, steps=2))
    assert [line["rows"] for line in metric_lines(run_dir) if "rows" in line] == [8, 8]
    rows = summary(run_dir)["rows"]
    assert rows["train"]["used"] == 16 and rows["test"]["used"] == 16 and rows["skipped"]["too long"] > 0
    bad = [json.loads(line) for line in (run_dir / "bad_rows.jsonl").read_text().splitlines()]
    assert len(bad) == rows["skipped"]["too long"]
    assert all("loop.max_length of 180 tokens" in row["detail"] and row["place"] for row in bad)


def test_nothing_that_fits_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"loop\.max_length"):
        run(configured(tmp_path / "run", max_length=4))
    assert summary(tmp_path / "run")["status"] == "failed"


def test_bad_rows_are_said_on_the_console(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"hello {index}"}]}
        for index in range(12)
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        lines = [json.dumps(row) for row in rows]
        lines[3] = json.dumps({"messages": []})
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    run_dir = run(configured(tmp_path / "run", steps=1), dataset=ChatDataset(path=str(folder)))
    assert "2 rows skipped" in (run_dir / "console.log").read_text()
    assert "train.jsonl:4" in (run_dir / "console.log").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "cosin"}, "did you mean cosine"),
        ({"truncation": "cut"}, "loop.truncation=cut"),
        ({"train_on": "all"}, "loop.train_on=all"),
    ],
)
def test_unknown_choices_are_refused(tmp_path, change, message):
    config = configured(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        replace(config, loop=replace(config.loop, **change)).check(FakeService().capabilities)
