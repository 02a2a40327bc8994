"""Options in a folder of the user's own: docs/your_own.md step by step, names that collide, hidden modules."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import cookbook
from cookbook.cli import folders
from cookbook.cli.main import main
from cookbook.core.errors import ConfigError
from tests.conftest import SMALL, CommandLine

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "your_own.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"In\s+`([\w./]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
PROGRAM = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "import cookbook\n" in block)
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that docs/your_own.md builds, as the working directory."""
    folder = tmp_path / "sums"
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = {Path(name).stem for name in FILES if name.endswith(".py")}
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(folder)
    yield folder
    for module in modules:
        sys.modules.pop(module, None)
    folders.use()


def test_the_page_names_every_file_of_its_tree():
    tree = set(re.findall(r"[\w./]+\.(?:py|yaml)", PAGE.partition("```\n")[2].partition("```")[0]))
    assert {name.removeprefix("conf/") for name in FILES} == tree
    assert len(COMMANDS) == 7


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_does_what_it_says(command: str, project: Path, capsys: pytest.CaptureFixture[str]):
    program, *arguments = shlex.split(command)
    trains = any(argument.startswith("recipe=") for argument in arguments)
    small = [*SMALL, "model.renderer=default"] if trains else []
    assert program == "cookbook"
    assert main([*arguments, *small]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    if not trains:
        assert "sums_grpo" in out
        assert "help" in arguments or all(
            name in out for name in ("sums_grpo/gpu", "closeness", "unsure", str(project))
        )
        return
    summaries = [json.loads(file.read_text()) for file in project.rglob("summary.json")]
    assert len(summaries) == (4 if "-m" in arguments else 1)
    assert all((summary["status"], summary["steps"]) == ("completed", 2) for summary in summaries)


def test_the_loss_of_the_page_trains_and_its_metrics_are_recorded(project: Path, capsys: pytest.CaptureFixture[str]):
    with (project / "my_rewards.py").open("a") as file:
        file.write("\n\ndef early(completion, example):\n    return float(completion.text < 'm')\n")
    reward = ["reward._target_=my_rewards.early", "~reward.scale", "loop.group_size=8"]
    assert main(["run", "recipe=sums_grpo", *SMALL, *reward, "run_dir=run"]) == 0, capsys.readouterr().err
    steps = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [0 <= step["train/unsure_mean"] <= 1 for step in steps if "tokens/trained" in step] == [True, True]


def test_the_program_of_the_page(project: Path):
    (project / "program.py").write_text(PROGRAM.replace('"seed=1"', ", ".join(f'"{value}"' for value in SMALL)))
    ran = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].split()[1].startswith(str(project / "runs" / "sums_grpo"))


def test_the_installed_command_finds_modules_of_the_working_directory_and_beside_conf(project: Path, tmp_path: Path):
    command = ["cookbook", "run", "recipe=sums_grpo", *SMALL, "run_dir=run"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for place, more in ((project, []), (elsewhere, ["--config-dir", str(project / "conf")])):
        ran = subprocess.run(
            [*command, *more], cwd=place, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        assert (place / "run" / "summary.json").exists()


def test_a_sweep_in_other_processes_finds_them_too(project: Path, capsys: pytest.CaptureFixture[str]):
    if importlib.util.find_spec("joblib") is None:
        pytest.skip("needs hydra-joblib-launcher")
    arguments = ["recipe=sums_grpo", *SMALL, "reward.scale=5,10", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert main(["run", "-m", *arguments]) == 0, capsys.readouterr().err
    assert len(list(project.glob("runs/sums_grpo/sweep/*/summary.json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["recipe=sums_grp"], ["did you mean sums_grpo?", "gsm8k_grpo"]),
        (["recipe=sums_grpo/gup"], ["did you mean sums_grpo/gpu?"]),
        (["recipe=gsm8k_grpo", "reward=closenes"], ["did you mean closeness?"]),
        (["recipe=sums_grpo", "reward.scael=1"], ["did you mean reward.scale?"]),
        (["recipe=sums_grpo", "loss.ceilling=1"], ["did you mean loss.ceiling?"]),
        (["recipe=sums_grpo", "+loss.ceilling=1"], ["loss.ceilling", "did you mean ceiling?"]),
        (["recipe=chat_sft", "dataset=sums"], ["dataset=sums: holds prompts", "chat_sft"]),
        (["recipe=preference_dpo", "loss=unsure"], ["my_losses.unsure raised KeyError: 'advantages'", "my_losses.py:"]),
        (["recipe=sums_grpo", "--config-dir", "cnof"], ["--config-dir cnof", "did you mean conf?"]),
    ],
    ids=lambda value: " ".join(value) if any("=" in part for part in value) and "mean" not in value[0] else None,
)
def test_mistakes_are_found_as_in_shipped_options(
    arguments: list[str], expected: list[str], project: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["run", *arguments, "backend=fake"]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and all(part in err for part in expected), err


def test_a_program_names_the_folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = cookbook.load_config("sums_grpo/gpu", config_dir=project / "conf")
    assert config.dataset and config.dataset["largest"] == 9999
    summary = cookbook.train("sums_grpo", *SMALL, config_dir="sums/conf")
    assert summary["recipe"] == "sums_grpo" and summary["status"] == "completed"
    with pytest.raises(ConfigError, match="there is no such recipe"):
        cookbook.load_config("sums_grpo")


def test_a_pipeline_runs_recipes_of_the_folder(project: Path, capsys: pytest.CaptureFixture[str]):
    (project / "conf" / "recipe" / "twice.yaml").write_text(
        textwrap.dedent("""\
            # @package _global_
            # Twice.
            defaults:
              - override /loop: pipeline

            loop:
              stages:
                first:
                  recipe: sums_grpo
                  settings: {loop: {steps: 2, max_tokens: 8, groups_per_batch: 2, group_size: 2}}
            """)
    )
    assert main(["run", "recipe=twice", "backend=fake", "run_dir=run"]) == 0, capsys.readouterr().err
    assert json.loads((project / "run" / "summary.json").read_text())["stages"]["first"]["recipe"] == "sums_grpo"


def test_a_shipped_name_is_refused_unless_the_file_is_the_same(project: Path, cli: CommandLine):
    shipped = folders.CONF / "reward" / "gsm8k.yaml"
    mine = project / "conf" / "reward" / "gsm8k.yaml"
    mine.write_bytes(shipped.read_bytes())
    assert cli("--help", "--config-dir", str(project / "conf")).status == 0
    mine.write_text("# Mine.\n_target_: my_rewards.closeness\n_partial_: true\n")
    line = cli("recipe=gsm8k_grpo", "--config-dir", str(project / "conf")).line()
    assert all(part in line for part in ("sums/conf/reward/gsm8k.yaml", str(shipped), "rename yours"))


@pytest.mark.parametrize("door", [["python", "-m", "cookbook.run"], ["cookbook", "run"]], ids=" ".join)
def test_a_module_that_hides_a_package_is_named(door: list[str], tmp_path: Path):
    (tmp_path / "rewards.py").write_text("def brevity(completion, example):\n    return 1.0\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*door, "recipe=gsm8k_grpo", *SMALL, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
        )

    ran = run("reward._target_=rewards.brevity", "+reward._partial_=true")
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1
    assert str(tmp_path / "rewards.py") in ran.stderr and "rename that file" in ran.stderr
    ran = run()
    hidden = door[0] == "python"  # python -m puts the working directory first
    assert ran.returncode == int(hidden)
    if hidden:
        assert "rewards.py hides the package rewards of the cookbook; rename that file" in ran.stderr
