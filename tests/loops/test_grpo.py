"""The GRPO loop on the fake backend: it learns, resumes exactly, and stops for the right reasons."""

import json
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from cookbook.backends.fake import FakeService
from cookbook.core.clients import APIFuture
from cookbook.core.errors import ConfigError, RewardError
from cookbook.core.rollouts import RewardResult
from cookbook.core.types import AdamParams
from cookbook.data.curriculum import Shuffled
from cookbook.data.generated.word_problems import WordProblems
from cookbook.envs.single_turn import SingleTurn
from cookbook.loops.algorithms import grpo
from cookbook.loops.algorithms.grpo import GRPOConfig
from cookbook.loops.config import CheckpointConfig, EvalConfig, ModelConfig, RunConfig
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import MeanCentered
from cookbook.tracking import NoLogger
from cookbook.tracking.cost import Budget, BudgetExceeded
from tests.loops.harness import Killed, assert_same_run, metric_lines

STEPS = 6


def share_of_vowels(completion, example):
    """Learnable by a bigram model: the share of vowels in the completion."""
    return float(np.mean([letter in "aeiou" for letter in completion.text])) if completion.text else 0.0


def configured(run_dir: Path, **loop) -> RunConfig:
    settings = {"steps": STEPS, "groups_per_batch": 4, "group_size": 8, "max_tokens": 12} | loop
    return RunConfig(
        recipe="test",
        run_dir=str(run_dir),
        model=ModelConfig(name="fake"),
        optim=AdamParams(learning_rate=0.3),
        loop=GRPOConfig(**settings),
        eval=EvalConfig(every=2, examples=8, temperature=1.0),
        checkpoint=CheckpointConfig(every=2, keep=2),
        backend={"_target_": "cookbook.backends.fake.FakeService"},
        dataset={"_target_": "cookbook.data.generated.word_problems.WordProblems"},
        env={},
        reward={},
        loss={"_target_": "cookbook.losses.spec.BuiltinLoss", "name": "importance_sampling"},
        advantage={},
        logger={},
    )


def components(
    config: RunConfig, reward=share_of_vowels, loss="importance_sampling", **capabilities
) -> grpo.Components:
    service = FakeService(state_dir=f"{config.run_dir}/checkpoints")
    if capabilities:
        service._capabilities = replace(service.capabilities, **capabilities)
    return grpo.Components(
        service, NoLogger(), WordProblems(), SingleTurn(), reward, BuiltinLoss(loss), MeanCentered(), Shuffled()
    )


def run(config: RunConfig, **changes) -> Path:
    grpo.run(config, components(config, **changes))
    return Path(config.run_dir)


def rewards(run_dir: Path) -> list[float]:
    return [line["reward/mean"] for line in metric_lines(run_dir) if "reward/mean" in line]


def test_the_reward_rises_and_the_ratio_is_one(tmp_path):
    run_dir = run(configured(tmp_path / "run", steps=20))
    curve = rewards(run_dir)
    assert np.mean(curve[-3:]) > np.mean(curve[:3]) + 0.2
    assert all(line["kl/sample_train"] < 1e-9 for line in metric_lines(run_dir) if "kl/sample_train" in line)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == 20
    assert summary["eval"]["after"]["reward/mean"] > summary["eval"]["before"]["reward/mean"] + 0.2
    assert summary["tokens"]["sampled"] > 20 * 32


@pytest.mark.parametrize("killed_at", [0, 3, 5])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, killed_at):
    whole = run(configured(tmp_path / "whole"))

    calls = 0

    def lethal(completion, example):
        nonlocal calls
        calls += 1
        # Steps of 4 x 8 completions, and evaluations of 8 before steps 0, 2 and 4.
        if calls > killed_at * 32 + (killed_at // 2 + 1) * 8 + 5:
            raise Killed
        return share_of_vowels(completion, example)

    config = configured(tmp_path / "killed")
    with pytest.raises(Killed):
        run(config, reward=lethal)
    resumed = run(config)

    assert_same_run(resumed, whole)


def test_the_same_run_twice_is_the_same(tmp_path):
    first, second = run(configured(tmp_path / "a")), run(configured(tmp_path / "b"))
    assert metric_lines(first) == metric_lines(second)
    other = configured(tmp_path / "c")
    other.seed = 1
    assert metric_lines(run(other)) != metric_lines(first)


def test_temperature_keeps_the_ratio_at_one_with_and_without_a_loss_temperature(tmp_path):
    for name, supported in (("with", True), ("without", False)):
        run_dir = run(configured(tmp_path / name, temperature=0.7, steps=2), loss_temperature=supported)
        lines = [line for line in metric_lines(run_dir) if "kl/sample_train" in line]
        assert lines and all(line["kl/sample_train"] < 1e-9 for line in lines)


def test_sub_steps_share_one_batch_of_rollouts(tmp_path):
    whole = metric_lines(run(configured(tmp_path / "one", steps=2), loss="ppo"))
    lines = metric_lines(run(configured(tmp_path / "four", num_substeps=4, steps=2), loss="ppo"))
    lines = [line for line in lines if "optim/substeps" in line]
    assert {line["optim/substeps"] for line in lines} == {4}
    assert lines[0]["reward/mean"] == whole[1]["reward/mean"] and lines[1]["reward/mean"] != whole[2]["reward/mean"]
    assert all(line["kl/sample_train"] < 1e-9 for line in lines)  # measured at the first sub-step, still on-policy


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("k2", "loss"), ("k3", "loss")])
def test_a_kl_penalty_holds_the_policy_near_the_base_model(tmp_path, estimator, placement):
    def final_reward(name, coef):
        config = configured(
            tmp_path / name, steps=20, kl_penalty_coef=coef, kl_estimator=estimator, kl_placement=placement
        )
        return np.mean(rewards(run(config))[-3:])

    assert final_reward("free", 0.0) > final_reward("held", 1.0) + 0.1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric_mean"])
def test_a_sampler_that_is_off_is_weighed_and_seen(tmp_path, level):
    class OffSampler(FakeService):
        """Its samplers report logprobs a little below the truth."""

        def create_lora_training_client(self, *args, **kwargs):
            client = super().create_lora_training_client(*args, **kwargs)
            make = client.save_weights_and_get_sampling_client

            def off():
                sampler = make()
                sample = sampler.sample

                def lower(*arguments, **keywords):
                    response = sample(*arguments, **keywords).result()
                    sequences = [
                        replace(one, logprobs=[value - 0.1 for value in one.logprobs]) for one in response.sequences
                    ]
                    return resolved(replace(response, sequences=sequences))

                sampler.sample = lower
                return sampler

            client.save_weights_and_get_sampling_client = off
            return client

    config = configured(tmp_path / level, steps=2, importance_cap=1.05, importance_level=level)
    service = OffSampler(state_dir=f"{config.run_dir}/checkpoints")
    grpo.run(config, replace(components(config), service=service))
    lines = [line for line in metric_lines(Path(config.run_dir)) if "importance/weight_mean" in line]
    assert lines and all(
        line["importance/weight_mean"] == pytest.approx(1.05) and line["importance/capped"] == 1 for line in lines
    )
    assert all(line["kl/sample_train"] == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-3) for line in lines)


def resolved(value):
    future = Future()
    future.set_result(value)
    return APIFuture(future)


def test_graders_that_fail_stop_the_run_with_a_checkpoint(tmp_path):
    def broken(completion, example):
        return (
            RewardResult(0.0, "error") if int(example.id.rsplit("/")[-1]) % 2 else share_of_vowels(completion, example)
        )

    config = configured(tmp_path / "run", reward_retries=0, max_reward_error_rate=0.05)
    with pytest.raises(RewardError, match="could not be graded"):
        run(config, reward=broken)
    assert (tmp_path / "run" / "checkpoints.jsonl").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_few_grading_failures_are_counted_and_left_out(tmp_path):
    def flaky(completion, example):
        return RewardResult(0.0, "error") if completion.text.startswith("e") else share_of_vowels(completion, example)

    lines = metric_lines(run(configured(tmp_path / "run", reward_retries=0, max_reward_error_rate=1.0), reward=flaky))
    assert any(line.get("reward/error", 0) > 0 for line in lines)


def test_the_budget_stops_the_run_with_a_checkpoint(tmp_path):
    config = configured(tmp_path / "run")
    config.budget = Budget(max_tokens=3000)
    with pytest.raises(BudgetExceeded):
        run(config)
    assert (tmp_path / "run" / "checkpoints.jsonl").exists()


def test_rewards_that_never_differ_teach_nothing_and_say_so(tmp_path):
    run_dir = run(configured(tmp_path / "run", steps=2), reward=lambda completion, example: 0.0)
    lines = [line for line in metric_lines(run_dir) if "groups/total" in line]
    assert all(line["groups/without_signal"] == 4 and "optim/grad_norm" not in line for line in lines)
    assert all(line["kl/sample_train"] < 1e-9 for line in lines)  # still measured
    assert "all rewards of this step are the same" in (run_dir / "console.log").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_penalty_coef": 0.1, "kl_placement": "loss"}, "gradient is not that of a KL"),
        ({"kl_penalty_coef": 0.1, "kl_estimator": "k3"}, "gradient is not that of a KL"),
        ({"kl_penalty_coef": 0.1, "temperature": 0.7}, "temperature 1"),
        ({"group_size": 0}, "loop.group_size=0"),
        ({"temperature": 0.0}, "loop.temperature=0.0"),
        ({"loss_agg": "mean"}, "loop.loss_agg=mean"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(tmp_path, change, message):
    config = configured(tmp_path / "run", **change)
    with pytest.raises(ConfigError, match=message):
        config.check(FakeService().capabilities)
    assert asdict(config)["loop"] | change == asdict(config)["loop"]
