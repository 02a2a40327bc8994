"""Every file in conf/: it composes, builds, runs two steps, and says in its first line what it is."""

import importlib.util
import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from cookbook.backends.fake import FAKE_CAPABILITIES
from cookbook.cli.folders import CONF
from cookbook.cli.options import groups, option_file, options, size_name, sizes, summary_line
from tests.code_files import CODE_DATASETS, code_dataset_overrides
from tests.conftest import SMALL, CommandLine
from tests.sandbox.fusion_stand_in import StandIn

OPTIONS = [(group, option) for group, names in groups().items() for option in names if group not in ("recipe", "sweep")]
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
    "cookbook.loops.algorithms.ppo": "gsm8k_ppo",
    "cookbook.rl.gae": "gsm8k_ppo",
}
"""The recipe that tries an option, by the beginning of its `_target_` (the longest counts)."""


def read(group: str, option: str) -> dict:
    return yaml.safe_load(option_file(group, option).read_text()) or {}


def recipe_for(group: str, option: str) -> str:
    target = read(group, option).get("_target_", "")
    return RECIPES[max((beginning for beginning in RECIPES if target.startswith(beginning)), key=len)]


def small(recipe: str) -> list[str]:
    """Overrides that make a recipe, of any size, end within seconds after two steps, or two of each stage."""
    composed = read("recipe", recipe.split("/")[0])
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


def local_data(recipe: str, data_folder: Path, folder: Path) -> list[str]:
    """Overrides with which a recipe of a larger size reads a folder instead of the hub."""
    if "/" not in recipe:
        return []
    if recipe.startswith("code_grpo"):
        return code_dataset_overrides("deepcoder", folder)
    if recipe.startswith("gsm8k_pipeline"):
        return [
            f"+loop.stages.sft.settings.dataset.path={data_folder}",
            f"+loop.stages.grpo.settings.dataset.path={data_folder}",
        ]
    return [f"dataset.path={data_folder}"]


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
    path = [f"dataset.path={data_folder}"] if group == "dataset" and "path" in read(group, option) else []
    if group == "dataset" and option in CODE_DATASETS:
        path = code_dataset_overrides(option, tmp_path / "code")
    with ExitStack() as servers:
        if option == "sandbox_fusion":
            path = [f"sandbox.base_url={servers.enter_context(StandIn()).url}"]
        ran = cli(f"recipe={recipe}", *overrides, f"{group}={option}", f"run_dir={tmp_path / 'run'}", *path)
    assert ran.status == 0, ran.err
    completed(tmp_path / "run")


@pytest.mark.parametrize("recipe", options("recipe"))
def test_recipe_at_each_size_runs_two_steps(recipe: str, cli: CommandLine, tmp_path: Path, data_folder: Path):
    skip_without_critic(("recipe", recipe.split("/")[0]))
    data = local_data(recipe, data_folder, tmp_path / "code")
    ran = cli(f"recipe={recipe}", *small(recipe), *data, f"run_dir={tmp_path / 'run'}")
    assert ran.status == 0, ran.err
    assert completed(tmp_path / "run")["recipe"] == recipe
    first_line = ran.out.splitlines()[0]
    assert first_line.startswith(f"recipe {recipe} at {size_name(recipe)} size")
    assert all(other in first_line for other in sizes(recipe))


@pytest.mark.parametrize("recipe", options("recipe"))
def test_a_size_keeps_the_loop_and_reward_of_its_recipe(recipe: str, cli: CommandLine):
    composed, base = (
        yaml.safe_load(cli("--cfg", "job", f"recipe={name}").out) for name in (recipe, recipe.split("/")[0])
    )
    for key in ("loop._target_", "reward", "loss", "advantage"):
        first, _, rest = key.partition(".")
        values = [config[first][rest] if rest else config[first] for config in (composed, base)]
        assert values[0] == values[1], key


@pytest.mark.parametrize("sweep", options("sweep"))
def test_sweep_preset_runs_every_job(sweep: str, cli: CommandLine, tmp_path: Path):
    params = yaml.safe_load((CONF / "sweep" / f"{sweep}.yaml").read_text())["hydra"]["sweeper"]["params"]
    jobs = 1
    for values in params.values():
        jobs *= len(str(values).split(","))
    ran = cli("recipe=gsm8k_grpo", f"+sweep={sweep}", *SMALL, f"run_dir={tmp_path / 'sweep'}")
    assert ran.status == 0, ran.err
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == jobs


def test_a_size_replaces_values_of_its_recipe_and_yields_to_the_command_line(cli: CommandLine):
    ran = cli("--cfg", "job", "recipe=gsm8k_grpo/paper", "loop.steps=3", "model=smollm2")
    assert ran.status == 0, ran.err
    composed = yaml.safe_load(ran.out)
    loop = composed["loop"]
    assert (loop["top_p"], loop["temperature"], loop["max_tokens"]) == (0.9, 0.7, 512)
    assert (composed["lora"]["rank"], composed["lora"]["alpha"]) == (32, 64.0)
    assert (loop["steps"], composed["model"]["name"]) == (3, "smollm2")


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(CONF)) for file in FILES])
def test_a_file_says_what_it_is(file: Path):
    first = next(line for line in file.read_text().splitlines() if not line.startswith("# @package"))
    assert re.fullmatch(r"# \S.{10,}[.:,].*", first), f"{file}: begins with {first!r}"


def test_the_root_composes_itself_before_the_groups_and_the_recipe_last():
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    names = [entry if isinstance(entry, str) else next(iter(entry)) for entry in defaults]
    assert names[:2] == ["run_schema", "_self_"]
    assert [name for name in names if not name.startswith("override ")][-1] == "recipe"


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
