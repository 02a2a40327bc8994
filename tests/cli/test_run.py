"""A run from the command line: what the user sees of an error, where files go, and how a run is resumed."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

import cookbook
from cookbook.loops.common import CommonComponents
from cookbook.tracking import NoLogger
from cookbook.tracking.checkpoints import CheckpointLog
from tests.conftest import SMALL, CommandLine

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = ("recipe=gsm8k_grpo", *SMALL)


def metrics_of(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def test_a_mistake_leaves_no_run_behind(cli: CommandLine, tmp_path: Path):
    cli(*RECIPE, "loop.group_size=0").line()
    cli(*RECIPE, "dataset=gsm8k", "dataset.path=/nowhere").line()
    assert list(tmp_path.iterdir()) == []


def test_a_broken_row_is_named_with_its_line(cli: CommandLine, data_folder: Path):
    file = data_folder / "train.jsonl"
    rows = file.read_text().splitlines()
    file.write_text("\n".join([*rows[:2], rows[2][:-5], *rows[3:]]))
    arguments = (*RECIPE, "dataset=gsm8k", f"dataset.path={data_folder}")
    assert "train.jsonl:3" in cli(*arguments, "dataset.on_bad_row=fail").line()
    ran = cli(*arguments)
    assert ran.status == 0 and "train.jsonl:3" in ran.out, ran.err


def test_a_reward_that_raises_is_named_with_its_error(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_reward.py").write_text(
        "class Broken:\n    def __call__(self, completion, example):\n        return {}['answer']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = cli(*RECIPE, "reward._target_=broken_reward.Broken", "run_dir=run").line()
    assert all(part in line for part in ("broken_reward.Broken", "KeyError", "broken_reward.py:3")), line
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_a_model_folder_without_a_tokenizer_is_named(cli: CommandLine, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(
        REPOSITORY / "cookbook" / "assets" / "tiny", model, ignore=shutil.ignore_patterns("token*", "chat*")
    )
    line = cli(*RECIPE, "backend=local", f"model.path={model}").line()
    assert all(part in line for part in (str(model), "tokenizer")), line


@pytest.mark.parametrize("flag", ["debug=true", "--debug", "hydra.verbose=true"])
def test_debug_shows_the_traceback_as_well(flag: str, cli: CommandLine):
    ran = cli(*RECIPE, "loop.group_size=0", flag)
    assert ran.status == 1
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: loop.group_size=0")


class StoppedService:
    def stop(self) -> None: ...


def loop_that_raises(error: BaseException):
    """Stands in for `build`: a run whose loop does nothing but fail."""

    def loop(config, components):
        raise error

    return lambda config: (loop, CommonComponents(StoppedService(), NoLogger()))


def test_an_unexpected_error_is_one_line_too(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cookbook.cli.job.build", loop_that_raises(ZeroDivisionError("of two\nlines")))
    assert (
        cli(*RECIPE).line()
        == "error: unexpected ZeroDivisionError: of two lines (rerun with debug=true for the traceback)"
    )


def test_ctrl_c_says_how_to_continue(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cookbook.cli.job.build", loop_that_raises(KeyboardInterrupt()))
    ran = cli(*RECIPE, "run_dir=run")
    assert ran.status == 130
    assert ran.line() == f"interrupted; to continue, repeat the command with run_dir={tmp_path / 'run'} resume=auto"


def test_a_run_leaves_its_configuration_and_nothing_of_hydra(cli: CommandLine, tmp_path: Path):
    ran = cli(*RECIPE, "seed=3")
    assert ran.status == 0, ran.err
    [run_dir] = (tmp_path / "runs" / "gsm8k_grpo").iterdir()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (config["seed"], config["recipe"], config["run_dir"]) == (3, "gsm8k_grpo", str(run_dir))
    assert config["backend"]["state_dir"] == "${run_dir}/checkpoints"  # stays true when the folder is moved
    assert (
        (run_dir / "console.log")
        .read_text()
        .startswith(
            "recipe gsm8k_grpo at laptop size (others: gsm8k_grpo/gpu, gsm8k_grpo/paper)\nbackend fake, model tiny"
        )
    )


def test_secrets_do_not_reach_the_configuration_file(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICE_API_KEY", "very-secret-value")
    ran = cli(*RECIPE, "run_dir=run", "model.path=/models/${oc.env:SERVICE_API_KEY}")
    assert ran.status == 0, ran.err
    assert "very-secret-value" not in (tmp_path / "run" / "config.yaml").read_text()


def test_a_run_in_a_used_folder_is_refused_and_resume_auto_finds_it_finished(cli: CommandLine):
    assert cli(*RECIPE, "run_dir=run").status == 0
    assert "resume=auto" in cli(*RECIPE, "run_dir=run").line()
    again = cli(*RECIPE, "run_dir=run", "resume=auto")
    assert again.status == 0 and "nothing to do" in again.out
    line = cli(*RECIPE, "run_dir=run", "resume=auto", "seed=1", "optim.eps=1e-6").line()
    assert "seed was 0, is now 1" in line and "optim.eps was 1e-08, is now 1e-06" in line


def test_a_longer_run_continues_a_finished_one_as_if_it_had_never_ended(cli: CommandLine, tmp_path: Path):
    assert cli(*RECIPE, "run_dir=whole", "loop.steps=4").status == 0
    assert cli(*RECIPE, "run_dir=split", "loop.steps=2").status == 0
    ran = cli(*RECIPE, "run_dir=split", "loop.steps=4", "resume=auto")
    assert ran.status == 0 and "continuing at step 3" in ran.out
    assert metrics_of(tmp_path / "split") == metrics_of(tmp_path / "whole")


def test_a_killed_run_goes_on_where_its_last_checkpoint_was(tmp_path: Path, cli: CommandLine):
    """kill -9 in a real process; then resume=auto without run_dir finds the run."""
    overrides = [*RECIPE, "loop.steps=400", "checkpoint.every=1", "eval.every=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cookbook.run", *overrides],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/gsm8k_grpo/*/checkpoints.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [run_dir] = tmp_path.glob("runs/gsm8k_grpo/*")
    checkpoint = CheckpointLog(run_dir).latest()
    assert checkpoint is not None
    steps = checkpoint.next_step + 2

    ran = cli(*overrides, "resume=auto", f"loop.steps={steps}")
    assert ran.status == 0, ran.err
    assert f"continuing at step {checkpoint.next_step + 1}" in ran.out
    assert list(tmp_path.glob("runs/gsm8k_grpo/*")) == [run_dir]
    assert cli(*overrides, "run_dir=whole", f"loop.steps={steps}").status == 0
    assert metrics_of(run_dir) == metrics_of(tmp_path / "whole")


def test_a_real_process_prints_one_line_and_exits_with_1(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, "-m", "cookbook.run", "recipe=gsm8k_grp0"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "did you mean gsm8k_grpo?" in result.stderr


def test_interrupting_a_notebook_interrupts_the_training_in_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started, ended = threading.Event(), []

    def loop(config, components):
        started.set()
        try:
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            ended.append(threading.current_thread())
            raise

    def press_ctrl_c() -> None:
        started.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def cell() -> None:
        cookbook.train("gsm8k_grpo", *SMALL, f"run_dir={tmp_path / 'run'}")

    monkeypatch.setattr("cookbook.cli.job.build", lambda config: (loop, CommonComponents(StoppedService(), NoLogger())))
    notebook = asyncio.new_event_loop()
    threading.Thread(target=press_ctrl_c).start()
    with pytest.raises(KeyboardInterrupt):
        notebook.run_until_complete(cell())
    notebook.close()
    assert len(ended) == 1 and ended[0] is not threading.main_thread()
