"""The PPO loop on the fake backend, with a critic and without."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cookbook.backends.fake import FakeService
from cookbook.core.datums import scale_weights
from cookbook.core.errors import CapabilityError
from cookbook.core.types import AdamParams
from cookbook.data.curriculum import Shuffled
from cookbook.data.generated.word_problems import WordProblems
from cookbook.envs.single_turn import SingleTurn
from cookbook.loops.algorithms import ppo
from cookbook.loops.algorithms.ppo import PPOConfig
from cookbook.loops.config import CheckpointConfig, EvalConfig, ModelConfig, RunConfig
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import RLOO, MeanCentered
from cookbook.rl.gae import GAE, ReinforcePP
from cookbook.tracking import NoLogger
from tests.loops.harness import Killed, assert_same_run, metric_lines


def share_of_vowels(completion, example):
    return float(np.mean([letter in "aeiou" for letter in completion.text])) if completion.text else 0.0


def configured(run_dir: Path, **loop) -> RunConfig:
    settings = {
        "steps": 6,
        "groups_per_batch": 4,
        "group_size": 8,
        "max_tokens": 12,
        "critic_learning_rate": 0.05,
    } | loop
    return RunConfig(
        recipe="test",
        run_dir=str(run_dir),
        model=ModelConfig(name="fake"),
        optim=AdamParams(learning_rate=0.3),
        loop=PPOConfig(**settings),
        eval=EvalConfig(every=2, examples=4, temperature=1.0),
        checkpoint=CheckpointConfig(every=2, keep=2),
        backend={"_target_": "cookbook.backends.fake.FakeService"},
        advantage={"_target_": "cookbook.rl.gae.GAE"},
        loss={"_target_": "cookbook.losses.spec.BuiltinLoss", "name": "ppo"},
        logger={},
    )


def run(config: RunConfig, advantage=None, reward=share_of_vowels) -> Path:
    service = FakeService(state_dir=f"{config.run_dir}/checkpoints")
    advantage = advantage or GAE()
    components = ppo.Components(
        service,
        NoLogger(),
        dataset=WordProblems(),
        curriculum=Shuffled(),
        env=SingleTurn(),
        reward=reward,
        loss=BuiltinLoss("ppo"),
        advantage=advantage,
    )
    ppo.run(config, components)
    return Path(config.run_dir)


@pytest.mark.parametrize(
    "advantage", [GAE(), ReinforcePP(), RLOO(), MeanCentered()], ids=lambda each: type(each).__name__
)
def test_the_reward_rises(tmp_path, advantage):
    lines = metric_lines(run(configured(tmp_path / "run", steps=20, num_minibatches=2), advantage))
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    assert all(line["kl/sample_train"] < 1e-9 for line in lines if "kl/sample_train" in line)


def test_the_critic_learns_the_returns(tmp_path):
    config = configured(tmp_path / "run", steps=20, critic_learning_rate=0.02)
    config.optim.learning_rate = 1e-4  # a policy that stands still, so that its returns do
    lines = metric_lines(run(config))
    errors = [abs(line["value/mean"] - line["value/return"]) for line in lines if "value/mean" in line]
    assert np.mean(errors[-5:]) < 0.5 * errors[0]


@pytest.mark.parametrize("killed_at", [1, 3])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, killed_at):
    calls = 0

    def lethal(completion, example):
        nonlocal calls
        calls += 1
        if calls > killed_at * 32 + (killed_at // 2 + 1) * 4 + 5:
            raise Killed
        return share_of_vowels(completion, example)

    settings = {"num_epochs": 2, "num_minibatches": 2}
    whole = run(configured(tmp_path / "whole", **settings))
    with pytest.raises(Killed):
        run(configured(tmp_path / "killed", **settings), reward=lethal)
    assert_same_run(run(configured(tmp_path / "killed", **settings)), whole)


def test_a_kl_penalty_holds_the_policy_near_where_it_started(tmp_path):
    def distance(name, coef):
        lines = metric_lines(run(configured(tmp_path / name, steps=12, kl_penalty_coef=coef)))
        return np.mean([line["kl/reference"] for line in lines if "kl/reference" in line][-3:])

    assert distance("held", 3.0) < 0.6 * distance("free", 1e-9)


def test_a_backend_without_a_critic_names_the_choices(tmp_path):
    config = configured(tmp_path / "run")
    with pytest.raises(CapabilityError, match="reinforce_pp, rloo or mean_centered"):
        config.check(replace(FakeService().capabilities, critic=False))
    config.advantage = {"_target_": "cookbook.rl.advantages.RLOO"}
    config.check(replace(FakeService().capabilities, critic=False))


def only_where_the_answer_is_odd(completion, example):
    """Rewards differ within the groups of some problems; in the others all are 0."""
    return share_of_vowels(completion, example) if len(example.messages[0]["content"]) % 2 else 0.0


@pytest.mark.parametrize("advantage", [RLOO(), ReinforcePP(), GAE()], ids=lambda each: type(each).__name__)
def test_groups_without_signal_are_left_out_only_where_credit_comes_from_the_group(tmp_path, monkeypatch, advantage):
    batches = []

    def spying(data, loss_agg, max_tokens):
        batches.append(len(data))
        return scale_weights(data, loss_agg, max_tokens)

    monkeypatch.setattr(ppo, "scale_weights", spying)
    lines = metric_lines(run(configured(tmp_path / "run", steps=3), advantage, only_where_the_answer_is_odd))
    silent = [line["groups/without_signal"] for line in lines if "groups/total" in line]
    assert 0 < sum(silent) < 12
    left_out = silent if isinstance(advantage, RLOO) else [0, 0, 0]
    assert batches == [8 * (4 - int(count)) for count in left_out if count < 4]
