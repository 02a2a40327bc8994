import asyncio
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from cookbook.core.errors import ConfigError, DataError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.core.scoring import as_result, call
from cookbook.core.types import StopReason
from rewards.compose import Weighted
from rewards.format import EndsProperly
from rewards.math import GSM8K

CONF = Path(__file__).parents[2] / "conf" / "reward"
EXAMPLE = Example("x/1", (), "5", {"solution": "2 + 3 = 5\n#### 5"})


def half(completion: Completion, example: Example) -> float:
    return 0.5


def down(completion: Completion, example: Example) -> RewardResult:
    return RewardResult(0.0, "error", {"tries": 3.0})


def run(reward, text: str = "#### 5", stop_reason: StopReason = "eos") -> RewardResult:
    return as_result(asyncio.run(call(reward, Completion(text, stop_reason, 1), EXAMPLE)), "reward")


def test_weighted_sum_with_the_parts_as_metrics_and_the_status_of_the_first():
    reward = Weighted(
        {"correct": GSM8K(), "half": half, "ends": EndsProperly()}, {"ends": 0.25, "correct": 2.0, "half": -1.0}
    )
    assert run(reward) == RewardResult(1.75, "correct", {"correct": 1.0, "half": 0.5, "ends": 1.0})
    assert run(reward, "#### 6", "length") == RewardResult(-0.5, "wrong", {"correct": 0.0, "half": 0.5, "ends": 0.0})


def test_status_from_another_component():
    reward = Weighted({"correct": GSM8K(), "ends": EndsProperly()}, {"correct": 1, "ends": 1}, status_from="ends")
    assert run(reward, stop_reason="length").status == "malformed"


def test_an_error_of_one_component_is_an_error_of_the_whole():
    reward = Weighted({"correct": GSM8K(), "judge": down}, {"correct": 1.0, "judge": 0.1})
    assert run(reward) == RewardResult(0.0, "error", {"correct": 1.0, "judge": 0.0, "judge/tries": 3.0})

    def raises(completion: Completion, example: Example) -> float:
        raise RewardError("judge down")

    with pytest.raises(RewardError, match="judge down"):
        run(Weighted({"correct": GSM8K(), "judge": raises}, {"correct": 1.0, "judge": 0.1}))


def test_a_component_that_returns_no_score_is_named():
    with pytest.raises(RewardError, match="reward odd returned None"):
        run(Weighted({"odd": lambda completion, example: None}, {"odd": 1.0}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("weights", "status_from", "message"),
    [
        ({"corect": 1.0}, None, r"weights names corect \(did you mean correct\?\); the components are correct, ends"),
        ({"zzz": 1.0}, None, "weights names zzz; the components are correct, ends"),
        ({"correct": 1.0}, None, "component 'ends' has no weight; add weights.ends"),
        ({"correct": float("nan"), "ends": 1.0}, None, "weights.correct=nan"),
        ({"correct": 1.0, "ends": 1.0}, "end", r"status_from names end \(did you mean ends\?\)"),
    ],
)
def test_names_that_do_not_match(weights, status_from, message: str):
    with pytest.raises(ConfigError, match=message):
        Weighted({"correct": GSM8K(), "ends": EndsProperly()}, weights, status_from)


def test_no_components():
    with pytest.raises(ConfigError, match="components is empty"):
        Weighted({}, {})


def test_validate_reaches_the_components_and_passes_over_plain_functions():
    reward = Weighted({"half": half, "correct": GSM8K()}, {"half": 1.0, "correct": 1.0})
    reward.validate(iter([EXAMPLE]))
    with pytest.raises(DataError, match="x/2"):
        reward.validate([Example("x/2", (), "6", {"solution": "#### 5"})])


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_with_format"])
def test_shipped_rewards_accept_gold(name: str):
    reward = instantiate(OmegaConf.load(CONF / f"{name}.yaml"))
    reward.validate([EXAMPLE])
    assert run(reward, EXAMPLE.extra["solution"]).status == "correct"


def test_the_format_bonus_is_worth_less_than_a_right_answer():
    reward = instantiate(OmegaConf.load(CONF / "gsm8k_with_format.yaml"))
    scores = [run(reward, text).value for text in ("x\n#### 5", "#### 5 apples in all", "x\n#### 6", "x")]
    assert scores == pytest.approx([1.1, 1.0, 0.1, 0.0])


def test_the_shipped_latex_reward_names_only_parameters_that_exist():
    pytest.importorskip("math_verify")
    assert instantiate(OmegaConf.load(CONF / "latex.yaml")) is not None
