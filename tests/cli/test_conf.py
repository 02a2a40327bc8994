"""Every file in conf/: it composes, builds, runs two steps, and explains each of its fields."""

import importlib.util
import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from cookbook.backends.fake import FAKE_CAPABILITIES
from cookbook.cli.compose import CONF, groups, options, scales, summary_line
from tests.code_files import CODE_DATASETS, code_dataset_overrides
from tests.conftest import SMALL, CommandLine
from tests.sandbox.fusion_stand_in import StandIn

OPTIONS = [
    (group, option)
    for group, names in groups().items()
    for option in names
    if group not in ("recipe", "scale", "sweep")
]
FILES = sorted(CONF.rglob("*.yaml"))
RENDERER = "model.renderer=default"
"""The fake backend's tokenizer does not have the special tokens that real models' formats are made of."""

PACKAGES = {"trackio": "trackio", "tensorboard": "tensorboard", "latex": "math_verify"}
"""Options that need an optional package."""

CRITIC = {("advantage", "gae"), ("recipe", "gsm8k_ppo"), ("loop", "ppo")}
"""Options that need a backend with a critic."""

RECIPES = {
    "": "gsm8k_grpo",
    "cookbook.data.chat.dataset": "chat_sft",
    "cookbook.data.code": "code_grpo",
    "cookbook.data.generated.tiny_programs": "code_grpo",
    "rewards.code": "code_grpo",
    "cookbook.sandbox": "code_grpo",
    "cookbook.data.generated.small_talk": "chat_sft",
    "cookbook.data.preference.pairs": "preference_dpo",
    "cookbook.data.preference.labelled": "preference_kto",
    "cookbook.data.generated.courtesy": "preference_dpo",
    "cookbook.data.generated.worked": "chat_sft",
    "cookbook.losses.preference": "preference_dpo",
    "cookbook.losses.preference.KTO": "preference_kto",
    "cookbook.loops.sft": "chat_sft",
    "cookbook.loops.preference": "preference_dpo",
    "cookbook.cli.pipeline": "gsm8k_pipeline",
    "cookbook.loops.ppo": "gsm8k_ppo",
}
"""The recipe that tries an option, by the beginning of its `_target_` (the longest counts)."""


def read(group: str, option: str) -> dict:
    return yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}


def recipe_for(group: str, option: str) -> str:
    target = read(group, option).get("_target_", "")
    return RECIPES[max((beginning for beginning in RECIPES if target.startswith(beginning)), key=len)]


def small(recipe: str) -> list[str]:
    """Overrides that make the recipe end within seconds after two steps, or two of each stage: SMALL, or its like for another loop."""
    composed = read("recipe", recipe)
    loop = next(choice["override /loop"] for choice in composed["defaults"] if "override /loop" in choice)
    settings = read("loop", loop)
    overrides = [RENDERER, "backend=fake"]
    if "stages" in settings:
        for stage, values in composed["loop"]["stages"].items():
            overrides += [
                f"++loop.stages.{stage}.settings.{value}"
                for value in small(values["recipe"])
                if value.startswith(("loop.", "eval."))
            ]
        return overrides
    return overrides + (
        list(SMALL[1:]) if "groups_per_batch" in settings else ["loop.steps=2", "loop.batch_size=2", "eval.examples=2"]
    )


def skip_without_critic(*choices: tuple[str, str]) -> None:
    if CRITIC & {*choices} and not FAKE_CAPABILITIES.critic:
        pytest.skip("the fake backend has no critic")


def completed(run_dir: Path) -> dict:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 2 * len(summary.get("stages", [None])))
    return summary


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS])
def test_option_runs_two_steps(group: str, option: str, cli: CommandLine, tmp_path: Path, data_folder: Path):
    if option in PACKAGES and importlib.util.find_spec(PACKAGES[option]) is None:
        pytest.skip(f"needs the optional package {PACKAGES[option]}")
    if (group, option) == ("backend", "tinker"):
        pytest.skip("needs a server: tests/backends/test_tinker.py runs it")
    skip_without_critic((group, option))
    recipe = recipe_for(group, option)
    overrides = [override for override in small(recipe) if not override.startswith(f"{group}=")]
    keys = (
        ["path"]
        if "path" in read(group, option)
        else ["problems.path"]
        if "path" in read(group, option).get("problems", {})
        else []
    )
    path = [f"{group}.{key}={data_folder}" for key in keys if group == "dataset"]
    if group == "dataset" and option in CODE_DATASETS:
        path = code_dataset_overrides(option, tmp_path / "code")
    with ExitStack() as servers:
        if option == "sandbox_fusion":
            path = [f"sandbox.base_url={servers.enter_context(StandIn()).url}"]
        ran = cli(f"recipe={recipe}", *overrides, f"{group}={option}", f"run_dir={tmp_path / 'run'}", *path)
    assert ran.status == 0, ran.err
    completed(tmp_path / "run")


@pytest.mark.parametrize(
    ("recipe", "scale"), [(recipe, scale) for recipe in options("recipe") for scale in scales(recipe)]
)
def test_recipe_at_each_scale_runs_two_steps(
    recipe: str, scale: str, cli: CommandLine, tmp_path: Path, data_folder: Path
):
    skip_without_critic(("recipe", recipe))
    path = [] if scale == "laptop" else [f"dataset.path={data_folder}"]
    if path and recipe == "code_grpo":
        path = code_dataset_overrides("deepcoder", tmp_path / "code")
    ran = cli(f"recipe={recipe}", f"scale={scale}", *small(recipe), *path, f"run_dir={tmp_path / 'run'}")
    assert ran.status == 0, ran.err
    assert completed(tmp_path / "run")["scale"] == scale
    first_line = ran.out.splitlines()[0]
    assert f"{recipe} at scale={scale}" in first_line
    assert all(other in first_line for other in scales(recipe))


@pytest.mark.parametrize("sweep", options("sweep"))
def test_sweep_preset_runs_every_job(sweep: str, cli: CommandLine, tmp_path: Path):
    params = yaml.safe_load((CONF / "sweep" / f"{sweep}.yaml").read_text())["hydra"]["sweeper"]["params"]
    jobs = 1
    for values in params.values():
        jobs *= len(str(values).split(","))
    ran = cli("recipe=gsm8k_grpo", f"+sweep={sweep}", *SMALL, f"run_dir={tmp_path / 'sweep'}")
    assert ran.status == 0, ran.err
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == jobs


def test_scale_values_replace_those_of_the_recipe_and_yield_to_the_command_line(cli: CommandLine, tmp_path: Path):
    ran = cli("--cfg", "job", "recipe=gsm8k_grpo", "scale=paper", "loop.steps=3", "model=smollm2")
    assert ran.status == 0, ran.err
    composed = yaml.safe_load(ran.out)
    assert (composed["loop"]["top_p"], composed["loop"]["temperature"], composed["loop"]["max_tokens"]) == (
        0.9,
        0.7,
        512,
    )
    assert (composed["lora"]["rank"], composed["lora"]["alpha"]) == (32, 64.0)
    assert (composed["loop"]["steps"], composed["model"]["name"], composed["scale"]) == (3, "smollm2", "paper")


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(CONF)) for file in FILES])
def test_a_comment_stands_above_every_field(file: Path):
    previous = ""
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        is_field = re.match(r"\s*(- )?(override )?[\w./@-]+:(\s|$)", line) is not None
        assert not is_field or previous.lstrip().startswith("#"), f"{file}:{number}: no comment above {line.strip()!r}"
        previous = line


@pytest.mark.parametrize("group", ["recipe", "sweep"])
def test_help_has_a_line_for_every_recipe_and_preset(group: str):
    assert all(summary_line(group, option) for option in options(group))


def test_recipes_and_rewards_are_those_of_this_checkout():
    import recipes
    import rewards

    checkout = Path(__file__).resolve().parents[2]
    assert Path(str(recipes.__file__)).resolve().parent == checkout / "recipes"
    assert Path(str(rewards.__file__)).resolve().parent == checkout / "rewards"
    assert checkout / "conf" == CONF
