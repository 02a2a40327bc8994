"""What a run records of its settings and surroundings, and that it can be run and resumed from that alone."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from cookbook.cli import environment
from cookbook.core.errors import CookbookError
from cookbook.tracking.lock import locked
from tests.conftest import SMALL, CommandLine
from tests.loops.harness import assert_same_run

RECIPE = ("recipe=gsm8k_grpo", *SMALL, "checkpoint.every=1")


def test_a_configuration_can_be_run_again_elsewhere(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE, "seed=3", "optim.learning_rate=1e-4", "run_dir=first").status == 0
    ran = cli("recipe=first/config.yaml", "run_dir=second")
    assert ran.status == 0, ran.err
    assert_same_run(tmp_path / "first", tmp_path / "second")
    configs = [yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("first", "second")]
    assert [config.pop("run_dir") for config in configs] == [str(tmp_path / "first"), str(tmp_path / "second")]
    assert configs[0] == configs[1]
    assert list((tmp_path / "second" / "checkpoints" / "states").iterdir())


def test_overrides_change_what_is_run_again(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE, "run_dir=first").status == 0
    ran = cli("recipe=first/config.yaml", "run_dir=second", "logger=tensorboard", "loop.steps=1", "model.name=other")
    assert ran.status == 0, ran.err
    config = yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())
    assert (config["loop"]["steps"], config["model"]["name"]) == (1, "other")
    assert config["logger"]["_target_"].endswith("TensorBoardLogger")
    assert config["loop"]["max_tokens"] == 8
    assert "there is no such setting" in cli("recipe=first/config.yaml", "loop.stepz=1").line()


def test_the_folder_alone_is_enough_to_resume(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE, "seed=3", "loop.steps=4", "run_dir=whole").status == 0
    assert cli(*RECIPE, "seed=3", "run_dir=run").status == 0
    assert "nothing to do" in cli("resume=run").out
    ran = cli("resume=run", "loop.steps=4")
    assert ran.status == 0 and "continuing at step 3" in ran.out, ran.err
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert "seed was 3, is now 4" in cli("resume=run", "seed=4").line()
    assert "is not a run" in cli("resume=nowhere").line()
    assert "already taken 4 steps" in cli("resume=run", "loop.steps=3").line()


def test_a_copy_is_resumed_without_touching_the_run_it_was_copied_from(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE, "loop.steps=4", "run_dir=whole").status == 0
    assert cli(*RECIPE, "run_dir=first").status == 0
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    before = sorted(str(path) for path in (tmp_path / "first").rglob("*"))
    assert cli("resume=second", "loop.steps=4").status == 0
    assert sorted(str(path) for path in (tmp_path / "first").rglob("*")) == before
    assert_same_run(tmp_path / "whole", tmp_path / "second")
    assert not any(str(tmp_path / "first") in path.read_text() for path in (tmp_path / "second").glob("*.jsonl"))


def test_a_secret_that_was_not_saved_is_asked_for(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE, "run_dir=first").status == 0
    file = tmp_path / "first" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["dataset"]["api_key"] = "***"
    file.write_text(yaml.safe_dump(config))
    assert "dataset.api_key was not saved" in cli("recipe=first/config.yaml", "run_dir=second").line()


def test_command_line_commit_and_versions_are_recorded_without_secrets(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SERVICE_API_KEY", "a-secret-of-the-environment")
    path = "model.path=/a-secret-of-the-environment"
    assert cli(*RECIPE, path, "run_dir=run").status == 0
    assert cli(*RECIPE, path, "run_dir=run", "resume=auto", "loop.steps=3").status == 0
    text = (tmp_path / "run" / "environment.json").read_text()
    record = json.loads(text)
    assert record["command"][1:] == [*RECIPE, "model.path=/***", "run_dir=run", "resume=auto", "loop.steps=3"]
    assert record["packages"]["torch"] and record["python"] and record["host"] and "commit" in record
    assert [earlier["command"][-1] for earlier in record["earlier"]] == ["run_dir=run"]
    assert "a-secret-of-the-environment" not in text


def test_secrets_of_the_configuration_are_taken_out_of_the_command_line(monkeypatch: pytest.MonkeyPatch):
    import cookbook

    overrides = ("backend=fake", "+dataset.api_key=pass", "+dataset.other={password: open}")
    monkeypatch.setattr(environment, "_command", ["cookbook", "--run", *overrides])
    config = cookbook.load_config("gsm8k_grpo", *overrides)
    assert environment.command_line(config) == [
        "cookbook",
        "--run",
        "backend=fake",
        "+dataset.api_key=***",
        "+dataset.other={***word: ***}",
    ]


def test_a_live_run_is_neither_joined_nor_shared(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE).status == 0
    [run] = (tmp_path / "runs" / "gsm8k_grpo").iterdir()
    (run / "summary.json").unlink()
    with locked(run):
        before = (run / "metrics.jsonl").read_bytes()
        for arguments in ((*RECIPE, f"run_dir={run}", "resume=auto"), (f"resume={run}",)):
            assert "has been running there since" in cli(*arguments).line()
        ran = cli(*RECIPE, "resume=auto")
        assert ran.status == 0 and len(list(run.parent.iterdir())) == 2
        assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_failed_before_its_first_step_can_be_repeated(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(self, *arguments):
        raise CookbookError("not today")

    with monkeypatch.context() as patch:
        patch.setattr("cookbook.backends.fake.clients.FakeTrainingClient.forward_backward", fail)
        patch.setattr("cookbook.backends.fake.clients.FakeTrainingClient.forward", fail)
        assert "not today" in cli(*RECIPE, "run_dir=run").line()
    assert (tmp_path / "run" / "config.yaml").exists()
    ran = cli(*RECIPE, "run_dir=run")
    assert ran.status == 0, ran.err
    assert cli(*RECIPE, "run_dir=whole").status == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")
