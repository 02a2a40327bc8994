"""Sweeps: a folder for each job, the status of each, and what the sweeper gets to see."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

from cookbook.cli import job
from cookbook.cli.sweep import LONGEST_NAME, job_name, job_settings, read_outcome
from tests.conftest import SMALL, CommandLine

JOBLIB = importlib.util.find_spec("joblib") and importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher")

RECIPE = ("recipe=gsm8k_grpo", *SMALL)
SWEEP = ("-m", *RECIPE, "optim.learning_rate=3e-4,1e-3", "seed=0,1")


def test_a_sweep_runs_every_job_in_a_folder_of_its_own_and_is_skipped_when_repeated(cli: CommandLine, tmp_path: Path):
    ran = cli(*SWEEP)
    assert ran.status == 0, ran.err
    folders = sorted((tmp_path / "runs" / "gsm8k_grpo" / "sweep").iterdir())
    assert len(folders) == 4
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert {(config["optim"]["learning_rate"], config["seed"]) for config in configs} == {
        (3e-4, 0),
        (3e-4, 1),
        (1e-3, 0),
        (1e-3, 1),
    }
    assert "sweep of 4 jobs" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]

    (folders[0] / "summary.json").unlink()  # as after a kill: its checkpoint is there
    before = {folder: (folder / "summary.json").stat().st_mtime_ns for folder in folders[1:]}
    again = cli(*reversed(SWEEP))
    assert again.status == 0, again.err
    assert again.out.count("nothing to do") == 3
    assert "continuing at step 3" in again.out
    assert sorted((tmp_path / "runs" / "gsm8k_grpo" / "sweep").iterdir()) == folders
    assert before == {folder: (folder / "summary.json").stat().st_mtime_ns for folder in folders[1:]}


LAUNCHERS = [
    "basic",
    pytest.param("joblib", marks=pytest.mark.skipif(not JOBLIB, reason="needs hydra-joblib-launcher")),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failing_job_does_not_stop_the_others_and_fails_the_sweep(launcher: str, cli: CommandLine, tmp_path: Path):
    ran = cli("-m", *RECIPE, "loop.temperature=0.0,1.0", "seed=0,1", "run_dir=sweep", f"hydra/launcher={launcher}")
    assert ran.status == 1
    message = "loop.temperature=0.0: must be above 0; greedy rollouts of a group are all the same"
    assert ran.err.splitlines() == [f"failed: loop.temperature=0.0 seed={seed}: {message}" for seed in (0, 1)]
    assert "sweep of 4 jobs" in ran.out
    outcomes = [outcome for folder in (tmp_path / "sweep").iterdir() if (outcome := read_outcome(folder))]
    assert sorted((outcome.status, outcome.error) for outcome in outcomes) == sorted(
        [("completed", None), ("failed", message)] * 2, key=str
    )


def test_an_error_that_cannot_be_pickled_fails_its_job_only(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    class Odd(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(f"{first} {second}")

    def build(config):
        raise Odd("no", "luck")

    monkeypatch.setattr("cookbook.cli.job.build", build)
    ran = cli("-m", *RECIPE, "seed=0,1")
    assert ran.status == 1
    lines = ran.err.splitlines()
    assert len(lines) == 2 and all("unexpected Odd: no luck" in line for line in lines)


def test_a_job_returns_the_headline_metric_also_when_it_is_skipped(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    returned = []

    def recorded(config):
        returned.append((HydraConfig.get().job.num, run_job(config)))
        return returned[-1][1]

    run_job = job.run_job
    monkeypatch.setattr(job, "run_job", recorded)
    for _ in range(2):
        assert cli("-m", *RECIPE, "seed=0,1", "run_dir=sweep").status == 0
    assert [number for number, _ in returned] == [0, 1, 0, 1]
    assert returned[:2] == returned[2:]
    summaries = [json.loads(file.read_text()) for file in sorted((tmp_path / "sweep").glob("*/summary.json"))]
    assert [metric for _, metric in returned[:2]] == [summary["eval"]["after"]["accuracy"] for summary in summaries]


@pytest.mark.parametrize("run_dir", [(), ("run_dir=sweep",)])
def test_a_sweep_over_recipes_and_sizes(run_dir: tuple[str, ...], cli: CommandLine, tmp_path: Path):
    local = ("dataset=word_problems", "model=tiny", "seed=0,1")
    ran = cli("-m", "recipe=gsm8k_grpo,gsm8k_grpo/gpu", *SMALL, *local, *run_dir)
    assert ran.status == 0, ran.err
    summaries = list(tmp_path.rglob("summary.json"))
    assert (
        sorted(json.loads(file.read_text())["recipe"] for file in summaries)
        == ["gsm8k_grpo"] * 2 + ["gsm8k_grpo/gpu"] * 2
    )
    if not run_dir:
        assert len(list((tmp_path / "runs" / "gsm8k_grpo" / "gpu" / "sweep").glob("*/summary.json"))) == 2


def test_a_sweep_that_does_not_compose_runs_nothing(cli: CommandLine, tmp_path: Path):
    line = cli("-m", *RECIPE, "seed=0,1", "optim.learning_rat=1").line()
    assert "did you mean optim.learning_rate?" in line
    assert list(tmp_path.iterdir()) == []


def test_the_arguments_of_the_process_are_left_as_they_were(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["program", "an argument"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert cli("-m", *RECIPE, "seed=0,x").status == 1
    assert sys.argv == ["program", "an argument"] and "HYDRA_FULL_ERROR" not in os.environ


def test_a_name_depends_on_the_settings_and_not_on_their_order_or_on_where_they_are_written():
    given = ["seed=1", "optim.learning_rate=0.0003", "run_dir=here", "resume=auto", "+sweep=learning_rate"]
    name = job_name(job_settings(given))
    assert name == "optim.learning_rate=0.0003,seed=1"
    assert name == job_name(job_settings(["optim.learning_rate=0.0003", "seed=1", "debug=true"]))


def test_names_are_single_short_folders_and_never_collide():
    long = [f"dataset.path=/data/{'x' * 300}/{split}" for split in ("a", "b")]
    names = [
        job_name(job_settings([setting]))
        for setting in (*long, "dataset.path=a/b", "dataset.path=a_b", "dataset.path=a b")
    ]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) <= LONGEST_NAME + 9 for name in names)
