"""From configuration to objects: every mistake is found by name, before anything is made that costs something."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cookbook.backends.fake import FakeService
from cookbook.cli.build import build
from cookbook.cli.targets import check_component, locate
from cookbook.core.errors import CapabilityError, ConfigError, DataError
from cookbook.core.examples import Conversation
from cookbook.loops.algorithms import grpo
from cookbook.loops.algorithms.grpo import GRPOConfig
from cookbook.loops.config import ModelConfig, RunConfig
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import StdNormalized
from rewards.compose import Weighted
from rewards.math import GSM8K
from tests.conftest import SMALL, CommandLine

GRADED = {"_target_": "rewards.math.GSM8K"}
REPOSITORY = Path(__file__).resolve().parents[2]


def component(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


def configured(tmp_path: Path, **changes: Any) -> RunConfig:
    config = RunConfig(
        recipe="test",
        run_dir=str(tmp_path),
        model=ModelConfig(name="fake"),
        loop=GRPOConfig(steps=1, groups_per_batch=1, group_size=2, max_tokens=4),
        backend=component("cookbook.backends.fake.FakeService"),
        dataset=component("cookbook.data.generated.word_problems.WordProblems", train_size=3),
        env=component("cookbook.envs.single_turn.SingleTurn"),
        reward=GRADED,
        loss=component("cookbook.losses.spec.BuiltinLoss", name="ppo", config={"clip_low_threshold": 0.8}),
        advantage=component("cookbook.rl.advantages.StdNormalized", eps=1e-4),
        curriculum=component("cookbook.data.curriculum.Shuffled"),
        logger=component("cookbook.tracking.NoLogger"),
    )
    return replace(config, **changes)


def test_builds_every_component_that_the_loop_asks_for(tmp_path: Path):
    loop, components = build(configured(tmp_path))
    assert isinstance(components, grpo.Components)
    assert loop.__module__ == "cookbook.loops.algorithms.grpo"
    assert isinstance(components.service, FakeService)
    assert len(components.dataset.train) == 3
    assert isinstance(components.advantage, StdNormalized) and components.advantage.eps == 1e-4
    assert components.loss == BuiltinLoss("ppo", {"clip_low_threshold": 0.8})


def test_nested_components_are_built_and_keep_their_names(tmp_path: Path):
    reward = component("rewards.compose.Weighted", components={"correct": GRADED}, weights={"correct": 1.0})
    _, components = build(configured(tmp_path, reward=reward))
    assert isinstance(components, grpo.Components)
    assert isinstance(components.reward, Weighted)
    assert isinstance(components.reward._components["correct"], GSM8K)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "dataset",
            component("cookbook.data.generated.word_problems.WordProblems", train_sise=3),
            "dataset.train_sise: .*did you mean train_size?",
        ),
        (
            "dataset",
            component("cookbook.data.generated.word_problems.WordProblems", seed="abc"),
            "dataset.seed=abc: must be of type int",
        ),
        (
            "dataset",
            component("cookbook.data.generated.word_problems.WordProblems", seed=True),
            "dataset.seed=True: must be of type int",
        ),
        ("loss", component("cookbook.losses.spec.BuiltinLoss"), "loss: .*missing a required argument: 'name'"),
        ("loss", {"name": "ppo"}, "loss: has no _target_"),
        (
            "advantage",
            component("cookbook.rl.advantages.StdNormalised"),
            "did you mean cookbook.rl.advantages.StdNormalized?",
        ),
        ("advantage", component("cookbook.rl.advantges.StdNormalized"), "did you mean cookbook.rl.advantages?"),
        ("advantage", component("nowhere.Advantage"), "there is no module nowhere"),
        (
            "advantage",
            component("cookbook.rl.advantages.ZERO_VARIANCE_TOLERANCE"),
            "is a float, not a class or a function",
        ),
        (
            "reward",
            component(
                "rewards.compose.Weighted",
                components={"form": component("rewards.format.MatchesPattern", patern="x")},
                weights={},
            ),
            "reward.components.form.patern: .*did you mean pattern?",
        ),
        ("advantage", None, "advantage: cookbook.loops.algorithms.grpo.run needs one"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_nothing_is_made(
    path: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cookbook.cli.build.instantiate", lambda *args, **kwargs: pytest.fail("something was made"))
    with pytest.raises(ConfigError, match=message) as raised:
        build(configured(tmp_path, **{path: value}))
    assert "\n" not in str(raised.value)


def test_a_failed_import_shows_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "needy_reward.py").write_text("import a_package_that_is_not_there\nclass Reward: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"reward\._target_=needy_reward\.Reward: .*No module named 'a_package_that_is_not_there'"
    ):
        locate("needy_reward.Reward", "reward")


def test_what_a_component_raises_reaches_the_user_as_it_is(tmp_path: Path):
    with pytest.raises(DataError, match="word_problems: train_size is -1"):
        build(
            configured(tmp_path, dataset=component("cookbook.data.generated.word_problems.WordProblems", train_size=-1))
        )
    nested = component(
        "rewards.compose.Weighted",
        components={"form": component("rewards.format.MatchesPattern", pattern="(")},
        weights={"form": 1},
    )
    with pytest.raises(ConfigError, match="pattern"):
        build(configured(tmp_path, reward=nested))


def test_a_partial_is_checked_for_the_arguments_that_it_has():
    check_component(component("cookbook.losses.spec.BuiltinLoss", _partial_=True), "loss")
    with pytest.raises(ConfigError, match=r"loss\.nmae"):
        check_component(component("cookbook.losses.spec.BuiltinLoss", _partial_=True, nmae="ppo"), "loss")


class Recorder:
    """Stands in for a logger, a service and a dataset; records when they are made, checked and stopped."""

    events: list[str] = []  # noqa: RUF012

    def __init__(self, what: str) -> None:
        self.events.append(what)
        self.capabilities = FakeService().capabilities

    def check(self) -> None:
        self.events.append("check")

    def stop(self) -> None:
        self.events.append("stop")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, "recorder", sys.modules[__name__])
    monkeypatch.setattr(Recorder, "events", [])
    return Recorder.events


def test_the_logger_is_checked_before_the_service_and_the_service_stopped_after_a_failure(
    tmp_path: Path, events: list[str]
):
    recorded = {name: component("recorder.Recorder", what=name) for name in ("logger", "backend")}
    with pytest.raises(DataError):
        build(
            configured(
                tmp_path,
                **recorded,
                dataset=component("cookbook.data.generated.word_problems.WordProblems", train_size=-1),
            )
        )
    assert events == ["logger", "check", "backend", "stop"]


def test_the_backend_is_held_against_the_run_before_the_data_is_read(tmp_path: Path, events: list[str]):
    with pytest.raises(CapabilityError, match="loss=ppoo"):
        build(
            configured(
                tmp_path,
                dataset=component("recorder.Recorder", what="dataset"),
                loss=component("cookbook.losses.spec.BuiltinLoss", name="ppoo"),
            )
        )
    assert events == []


def test_neither_the_command_line_nor_a_loop_imports_torch_or_a_service_sdk():
    code = (
        "import sys, pkgutil, importlib, cookbook.cli.launch, cookbook.loops as loops, cookbook.losses.spec\n"
        "names = [module.name for module in pkgutil.walk_packages(loops.__path__, 'cookbook.loops.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'tinker', 'boto3', 'sagemaker', 'ray') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"


def test_a_sandbox_that_nothing_uses_is_refused(cli: CommandLine):
    assert "sandbox: nothing in this run runs programs" in cli("recipe=gsm8k_grpo", *SMALL, "sandbox=local").line()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["recipe=chat_sft", "dataset=word_problems"],
            [
                "dataset=word_problems: holds prompts, but recipe chat_sft (cookbook.loops.sft) trains on chat;",
                "no_robots",
            ],
        ),
        (
            ["recipe=gsm8k_grpo", "dataset=small_talk"],
            ["dataset=small_talk: holds chat, but recipe gsm8k_grpo", "trains on prompts; choose one of", "gsm8k"],
        ),
        (["recipe=gsm8k_grpo", "dataset=courtesy"], ["holds pairs"]),
        (
            ["recipe=preference_dpo", "dataset=gsm8k"],
            ["holds prompts", "trains on pairs or labelled;", "ultrafeedback"],
        ),
        (
            ["recipe=gsm8k_grpo", "loss=dpo"],
            ["loss=dpo: is a loss on pairs, but recipe gsm8k_grpo", "choose one of cispo"],
        ),
        (["recipe=gsm8k_grpo", "advantage=gae"], ["advantage=gae: is an advantage from a critic", "mean_centered"]),
        (["recipe=preference_dpo", "loss=ppo"], ["loss=ppo: is a built-in loss", "choose one of dpo, ipo, kto"]),
        (["recipe=chat_sft", "loss=ppo"], ["loss=ppo: is a built-in loss", "takes a custom loss"]),
        (
            ["recipe=gsm8k_pipeline", "+loop.stages.grpo.groups.dataset=small_talk"],
            ["holds chat, but recipe gsm8k_grpo"],
        ),
    ],
    ids=lambda value: " ".join(value) if "recipe" in value[0][:6] else None,
)
def test_a_wrong_kind_is_refused_before_anything_runs(
    arguments: list[str], expected: list[str], cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("something was downloaded"))
    line = cli(*arguments, "backend=fake", "run_dir=run").line()
    assert all(part in line for part in expected), line
    assert not list(tmp_path.rglob("metrics.jsonl"))


class Chats:
    """A dataset that does not say its kind."""

    def __init__(self) -> None:
        self.train = self.test = [Conversation("1", ({"role": "user", "content": "Hello"},))]


def test_a_dataset_that_does_not_say_its_kind_is_judged_by_its_first_row(tmp_path: Path, events: list[str]):
    with pytest.raises(ConfigError, match=r"dataset\._target_=recorder\.Chats: holds chat, but recipe test"):
        build(configured(tmp_path, dataset=component("recorder.Chats")))


def scaled(data: Any, logprobs: Any, scale: float) -> Any:
    """A custom loss."""


def test_any_callable_is_a_custom_loss_and_its_settings_are_checked(tmp_path: Path, events: list[str]):
    loss = component("recorder.scaled", _partial_=True, scale=0.5)
    _, components = build(configured(tmp_path, loss=loss))
    assert isinstance(components, grpo.Components)
    assert isinstance(components.loss, partial) and components.loss.keywords == {"scale": 0.5}
    with pytest.raises(ConfigError, match=r"loss\.scal: .*did you mean scale\?"):
        build(configured(tmp_path, loss=component("recorder.scaled", _partial_=True, scal=0.5)))
    with pytest.raises(ConfigError, match=r"set loss\._partial_=true to use the function itself"):
        build(configured(tmp_path, loss=component("recorder.scaled", scale=0.5)))


def loop_without_components(config: RunConfig) -> None:
    """Not a loop."""


def test_a_loop_must_say_what_it_is_built_from(tmp_path: Path, events: list[str]):
    config = configured(tmp_path)
    config.loop._target_ = "recorder.loop_without_components"
    with pytest.raises(ConfigError, match="must be a function of"):
        build(config)
