"""The command line before anything runs: its flags, help, and what the user sees of a mistake."""

import subprocess
import sys

import pytest
import yaml

from cookbook.cli.flags import FLAGS, parse
from cookbook.cli.programs import load_config
from cookbook.core.errors import ConfigError
from tests.conftest import SMALL, CommandLine

RECIPE = ("recipe=gsm8k_grpo", *SMALL)

HEAVY = ("torch", "transformers", "renderers", "datasets", "wandb", "matplotlib", "fastapi")
"""Packages that take long to import."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["recipe=gsm8k_grp0"], ["recipe=gsm8k_grp0", "did you mean gsm8k_grpo?"]),
        ([], ["recipe is missing", "gsm8k_grpo"]),
        ([*RECIPE, "optim.learning_rat=1"], ["optim.learning_rat", "did you mean optim.learning_rate?"]),
        ([*RECIPE, "learning_rate=1"], ["learning_rate", "did you mean optim.learning_rate?"]),
        ([*RECIPE, "modle=tiny"], ["modle", "did you mean model?"]),
        ([*RECIPE, "model=tinny"], ["model=tinny", "did you mean tiny?", "smollm2"]),
        ([*RECIPE, "+optim.momentum=1"], ["optim.momentum", "learning_rate"]),
        ([*RECIPE, "+dataset.train_sise=1"], ["dataset.train_sise", "did you mean train_size?"]),
        ([*RECIPE, "dataset.path=/nowhere"], ["dataset.path", "path is one of ", "dataset=gsm8k"]),
        ([*RECIPE, "dataset=gsm8k", "dataset.path=/nowhere"], ["dataset.path", "/nowhere", "does not exist"]),
        ([*RECIPE, "loop.steps=abc"], ["loop.steps=abc", "Integer"]),
        ([*RECIPE, "dataset.seed=abc"], ["dataset.seed=abc", "int"]),
        ([*RECIPE, "loop.group_size=0"], ["loop.group_size=0", "at least 1"]),
        ([*RECIPE, "loop.steps=${nope}"], ["loop.steps", "nope"]),
        ([*RECIPE, "loop.steps=[1"], ["loop.steps=[1", "key=value"]),
        (["recipe", "gsm8k_grpo"], ["recipe", "key=value"]),
        ([*RECIPE, "seed=0,1"], ["seed=0,1", "-m"]),
        ([*RECIPE, "reward=null"], ["reward=null", "gsm8k"]),
        ([*RECIPE, "sweep=learning_rate"], ["+sweep=NAME"]),
        (["recipe=gsm8k_grpo/paprr"], ["recipe=gsm8k_grpo/paprr", "did you mean gsm8k_grpo/paper?", "gsm8k_grpo/gpu"]),
        ([*RECIPE, "scale=gpu"], ["scale: there is no such setting"]),
        ([*RECIPE, "reward._target_=rewards.mth.GSM8K"], ["reward._target_", "did you mean rewards.math?"]),
        ([*RECIPE, "--mulitrun"], ["--mulitrun", "did you mean --multirun?"]),
        ([*RECIPE, "--config-path", "x"], ["--config-path", "there is no such flag"]),
        ([*RECIPE, "--cfg", "jbo"], ["--cfg jbo", "did you mean job?"]),
        ([*RECIPE, "--cfg"], ["--cfg: needs a value", "job, hydra, all"]),
        ([*RECIPE, "--debug=true"], ["--debug takes no value"]),
        ([*RECIPE, "-m", "hydra/launcher=jobblib"], ["hydra/launcher=jobblib", "post-training-cookbook[sweep]"]),
        ([*RECIPE, "resume=atuo"], ["resume=atuo", "did you mean auto?"]),
    ],
    ids=lambda value: (
        " ".join(argument for argument in value if argument not in RECIPE) if isinstance(value, list) else None
    ),
)
def test_a_mistake_is_one_line(arguments: list[str], expected: list[str], cli: CommandLine):
    line = cli(*arguments).line()
    assert line.startswith("error: ")
    assert all(part in line for part in expected), line


def test_flags_stand_anywhere_and_take_their_values_either_way():
    command = parse(
        ["-m", "recipe=a", "--cfg", "job", "--config-dir=one", "-cd", "two", "seed=0,1", "--info", "--debug"]
    )
    assert command.overrides == ["recipe=a", "seed=0,1", "debug=true"]
    assert command.config_dirs == ["one", "two"] and command.debug
    assert command.hydra_flags() == ["--multirun", "--cfg", "job", "--info", "all"]
    assert parse(["--info", "plugins", "recipe=a"]).hydra_flags() == ["--info", "plugins"]


def test_help_needs_no_recipe_and_lists_recipes_with_their_sizes_groups_and_options(cli: CommandLine):
    ran = cli("--help")
    assert ran.status == 0
    parts = [
        "recipe=NAME",
        "(also gsm8k_grpo/gpu, gsm8k_grpo/paper)",
        "smollm2",
        "word_problems",
        "optim.learning_rate",
    ]
    assert all(part in ran.out for part in [*parts, "resume=never|auto", "--config-dir"]), ran.out
    assert cli().line().startswith("error: recipe is missing")


def test_every_flag_does_something(cli: CommandLine):
    """Those that only show something, here; -m, --debug and --config-dir have tests of their own."""
    shown = {
        "--cfg": ["--cfg", "hydra", *RECIPE],
        "--resolve": ["--cfg", "job", "--resolve", *RECIPE],
        "--package": ["--cfg", "job", "--package", "optim", *RECIPE],
        "--info": ["--info", "searchpath", *RECIPE],
        "--hydra-help": ["--hydra-help"],
        "--version": ["--version"],
        "--help": ["-h"],
    }
    assert {*FLAGS} - {*shown} == {"--multirun", "--config-dir", "--shell-completion", "--debug"}
    for flag, arguments in shown.items():
        ran = cli(*arguments)
        assert ran.status == 0 and ran.out.strip() and not ran.err, flag
    assert yaml.safe_load(cli(*shown["--resolve"]).out)["recipe"] == "gsm8k_grpo"


def test_help_imports_nothing_that_takes_long():
    code = (
        "import sys, cookbook.cli, cookbook.run\n"
        "assert cookbook.run.main(['--help']) == 0\n"
        f"heavy = {{*{HEAVY}}} & {{*sys.modules}}\n"
        "assert not heavy, heavy\n"
        "assert 'hydra' not in sys.modules and 'cookbook.loops' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "recipe=NAME" in ran.stdout


def test_a_program_composes_what_the_command_line_does(cli: CommandLine):
    config = load_config("gsm8k_grpo/gpu", "optim.learning_rate=3e-4", "dataset=word_problems")
    composed = yaml.safe_load(cli("--cfg", "job", "recipe=gsm8k_grpo/gpu", "dataset=word_problems").out)
    assert config.recipe == "gsm8k_grpo/gpu" and config.run_dir.startswith("runs/gsm8k_grpo/gpu/")
    assert (config.optim.learning_rate, config.loop.steps) == (3e-4, composed["loop"]["steps"])
    assert config.dataset == composed["dataset"]
    assert (config.choices["recipe"], config.choices["dataset"]) == ("gsm8k_grpo/gpu", "word_problems")
    with pytest.raises(ConfigError, match="did you mean gsm8k_grpo/gpu"):
        load_config("gsm8k_grpo/gup")
