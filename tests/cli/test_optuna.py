"""Sweeps by Optuna: what a run returns is maximized, and a failed run fails the sweep."""

import sys
from pathlib import Path

import pytest
import yaml

from cookbook.cli.run_dir import read_summary
from tests.conftest import CommandLine

pytest.importorskip("optuna")

SEARCH = (
    "-m",
    "hydra/sweeper=optuna",
    "recipe=chat_sft",
    "backend=fake",
    "loop.steps=1",
    "eval.examples=2",
    "run_dir=sweep",
    "optim.learning_rate=tag(log,interval(1e-2,1))",
    "loop.batch_size=choice(2,4)",
)


def results(folder: Path) -> dict:
    return yaml.safe_load((folder / "optimization_results.yaml").read_text())


def test_six_trials_and_the_best_is_that_of_the_runs(cli: CommandLine, tmp_path: Path):
    ran = cli(*SEARCH, "hydra.sweeper.n_trials=6")
    assert ran.status == 0, ran.err
    found = results(tmp_path / "sweep")
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 6
    for trial in found["trials"]:
        assert trial["objective"] == -read_summary(Path(trial["run_dir"]))["eval"]["after"]["nll"]
    objectives = [trial["objective"] for trial in found["trials"]]
    assert len({*objectives}) > 1
    assert found["best"]["objective"] == max(objectives)
    assert "best of 6 trials" in ran.out
    rates = [float(trial["settings"][0].removeprefix("optim.learning_rate=")) for trial in found["trials"]]
    assert len({*rates}) == 6 and all(1e-2 <= rate <= 1 for rate in rates)


def test_a_repeated_search_finds_its_runs(cli: CommandLine, tmp_path: Path):
    assert cli(*SEARCH, "hydra.sweeper.n_trials=2").status == 0
    found = results(tmp_path / "sweep")
    again = cli(*SEARCH, "hydra.sweeper.n_trials=2")
    assert again.status == 0 and again.out.count("nothing to do") == 2
    assert results(tmp_path / "sweep") == found


def test_a_study_in_a_database_is_continued(cli: CommandLine, tmp_path: Path):
    kept = (*SEARCH, f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db")
    assert cli(*kept, "hydra.sweeper.n_trials=2").status == 0
    first = results(tmp_path / "sweep")["trials"]
    ran = cli(*kept, "hydra.sweeper.n_trials=3")
    assert ran.status == 0 and "nothing to do" not in ran.out
    trials = results(tmp_path / "sweep")["trials"]
    assert len(trials) == 3 and trials[:2] == first


def test_a_failing_run_is_a_failed_trial_and_fails_the_sweep(cli: CommandLine, tmp_path: Path):
    ran = cli(*SEARCH, "hydra.sweeper.n_trials=3", "loop.batch_size=choice(2,0)")
    assert ran.status == 1 and "Traceback" not in ran.err
    assert "loop.batch_size=0" in ran.err
    trials = results(tmp_path / "sweep")["trials"]
    assert {trial["state"] for trial in trials} == {"complete", "fail"}
    assert all(("loop.batch_size=0" in trial["settings"]) == (trial["state"] == "fail") for trial in trials)


def test_numbers_of_a_range_and_integers(cli: CommandLine, tmp_path: Path):
    ran = cli(*SEARCH, "hydra.sweeper.n_trials=3", "loop.batch_size=range(2,7,2)", "seed=int(interval(1,3))")
    assert ran.status == 0, ran.err
    settings = [dict(pair.split("=") for pair in trial["settings"]) for trial in results(tmp_path / "sweep")["trials"]]
    assert {values["loop.batch_size"] for values in settings} <= {"2", "4", "6"}
    assert {values["seed"] for values in settings} <= {"1", "2", "3"}


def test_another_search_needs_another_study(cli: CommandLine, tmp_path: Path):
    kept = (*SEARCH, "hydra.sweeper.n_trials=2", f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db")
    assert cli(*kept, "hydra.sweeper.n_trials=1").status == 0
    line = cli(*kept, "loop.batch_size=choice(2,3)").line()
    assert "hydra.sweeper.study_name=cookbook: holds trials of another search" in line
    assert cli(*kept, "loop.batch_size=choice(2,3)", "hydra.sweeper.study_name=another").status == 0


@pytest.mark.slow
def test_trials_in_parallel_processes(cli: CommandLine, tmp_path: Path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    ran = cli(
        *SEARCH,
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.n_trials=4",
    )
    assert ran.status == 0, ran.err
    assert [trial["state"] for trial in results(tmp_path / "sweep")["trials"]] == ["complete"] * 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials=0: must be at least 1"),
        (["hydra.sweeper.direction=up"], "hydra.sweeper.direction=up: must be maximize or minimize"),
        (
            ["optim.learning_rate=tag(log,interval(0,1))"],
            "optim.learning_rate=tag(log,interval(0,1)): cannot be searched",
        ),
        (["optim.learning_rate=1e-3", "loop.batch_size=2"], "there is nothing to search"),
        (["hydra.sweeper.storage=study.db"], "hydra.sweeper.storage=study.db: cannot be used"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], expected: str, cli: CommandLine):
    assert expected in cli(*SEARCH, *arguments).line()


def test_a_missing_package_is_named(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    line = cli(*SEARCH).line()
    assert "needs the package optuna" in line and "pip install" in line
