"""Curricula and dynamic sampling in the loops: which problems are sampled, and that resuming changes nothing."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cookbook.backends.fake import FakeService
from cookbook.core.errors import ConfigError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.core.types import AdamParams
from cookbook.data.curriculum import CurriculumMaker, Difficulty, InOrder, RewardDriven, Shuffled
from cookbook.data.generated.word_problems import WordProblems
from cookbook.envs.single_turn import SingleTurn
from cookbook.loops.algorithms import grpo, ppo
from cookbook.loops.algorithms.grpo import GRPOConfig
from cookbook.loops.algorithms.ppo import PPOConfig
from cookbook.loops.config import CheckpointConfig, EvalConfig, ModelConfig, RunConfig
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import RLOO, MeanCentered
from cookbook.tracking import NoLogger
from cookbook.tracking.checkpoints import CheckpointLog
from tests.loops.harness import Killed, assert_same_run, metric_lines, summary

STEPS, GROUPS, SIZE = 6, 4, 4
SETTINGS = {"steps": STEPS, "groups_per_batch": GROUPS, "group_size": SIZE, "max_tokens": 8}
DRIVEN = RewardDriven(visits=1, postpone=12)

Graded = Callable[[Completion, Example], float | RewardResult]


def uneven(completion: Completion, example: Example) -> float:
    """A third of the problems is hopeless, a third is solved from the start, the rest depends on what is sampled."""
    kind = int(example.id.rsplit("/")[-1]) % 3
    return float(kind == 1 or (kind == 2 and "a" in completion.text))


def configured(run_dir: Path, **loop: int) -> RunConfig:
    return RunConfig(
        recipe="test",
        run_dir=str(run_dir),
        model=ModelConfig(name="fake"),
        optim=AdamParams(learning_rate=0.1),
        loop=GRPOConfig(**(SETTINGS | loop)),
        eval=EvalConfig(examples=0),
        checkpoint=CheckpointConfig(every=2, keep=2),
        backend={"_target_": "cookbook.backends.fake.FakeService"},
        dataset={"_target_": "cookbook.data.generated.word_problems.WordProblems"},
        logger={},
    )


def run_grpo(config: RunConfig, curriculum: CurriculumMaker, reward: Graded = uneven) -> Path:
    service = FakeService(state_dir=f"{config.run_dir}/checkpoints")
    loss, advantage, dataset = BuiltinLoss("importance_sampling"), MeanCentered(), WordProblems(train_size=18)
    grpo.run(config, grpo.Components(service, NoLogger(), dataset, SingleTurn(), reward, loss, advantage, curriculum))
    return Path(config.run_dir)


def run_ppo(config: RunConfig, curriculum: CurriculumMaker, reward: Graded = uneven) -> Path:
    config.loop = PPOConfig(**SETTINGS, critic_learning_rate=0.1)
    service, dataset = FakeService(state_dir=f"{config.run_dir}/checkpoints"), WordProblems(train_size=60)
    ppo.run(
        config,
        ppo.Components(service, NoLogger(), dataset, SingleTurn(), reward, BuiltinLoss("ppo"), RLOO(), curriculum),
    )
    return Path(config.run_dir)


def rollout_lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


def curriculum_state(run_dir: Path) -> dict:
    checkpoint = CheckpointLog(run_dir).latest()
    assert checkpoint is not None and checkpoint.next_step == STEPS
    return checkpoint.loop_state["curriculum"]


def lethal_after(calls_left: int) -> Graded:
    def reward(completion: Completion, example: Example) -> float:
        nonlocal calls_left
        calls_left -= 1
        if calls_left < 0:
            raise Killed
        return uneven(completion, example)

    return reward


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, reward-driven and with refills, in which problems are dropped, postponed and replaced."""
    run_dir = run_grpo(configured(tmp_path_factory.mktemp("runs") / "whole", dynamic_sampling_rounds=2), DRIVEN)
    lines = metric_lines(run_dir)
    assert sum(line["groups/resampled"] for line in lines) > STEPS
    assert all(any(line[f"curriculum/{name}"] for line in lines) for name in ("solved", "postponed"))
    return run_dir


@pytest.mark.parametrize("share", [0.05, 0.4, 0.6, 0.95])
def test_reward_driven_with_refills_killed_and_resumed_equals_uninterrupted(whole: Path, tmp_path: Path, share: float):
    config = configured(tmp_path / "killed", dynamic_sampling_rounds=2)
    with pytest.raises(Killed):
        run_grpo(config, DRIVEN, lethal_after(int(share * len(rollout_lines(whole)))))
    resumed = run_grpo(config, DRIVEN)
    assert_same_run(resumed, whole)
    assert curriculum_state(resumed) == curriculum_state(whole)


def test_ppo_by_difficulty_killed_and_resumed_equals_uninterrupted(tmp_path: Path):
    make = Difficulty(open_after=2 * GROUPS)
    uninterrupted = run_ppo(configured(tmp_path / "whole"), make)
    assert [line["curriculum/buckets_open"] for line in metric_lines(uninterrupted)] == [1, 2, 2, 3, 3, 3]

    config = configured(tmp_path / "killed")
    with pytest.raises(Killed):
        run_ppo(config, make, lethal_after(3 * GROUPS * SIZE + 2))
    resumed = run_ppo(config, make)
    assert_same_run(resumed, uninterrupted)
    assert curriculum_state(resumed) == curriculum_state(uninterrupted)


def test_a_step_that_could_not_be_graded_is_repeated_with_the_same_problems(whole: Path, tmp_path: Path):
    # Within step 3: past the checkpoint at step 2, and past this step's first round of sampling.
    graded = sum(line["step"] < 3 for line in rollout_lines(whole)) + GROUPS * SIZE

    def fails_for_a_while(completion: Completion, example: Example) -> float | RewardResult:
        nonlocal graded
        graded -= 1
        return uneven(completion, example) if graded >= 0 else RewardResult(0.0, "error")

    config = configured(tmp_path / "failed", dynamic_sampling_rounds=2, reward_retries=0)
    with pytest.raises(RewardError, match="step 3: "):
        run_grpo(config, DRIVEN, fails_for_a_while)
    checkpoint = CheckpointLog(Path(config.run_dir)).latest()
    assert checkpoint is not None and checkpoint.next_step == 3
    resumed = run_grpo(config, DRIVEN)
    assert metric_lines(resumed) == metric_lines(whole)
    assert rollout_lines(resumed) == rollout_lines(whole)
    assert curriculum_state(resumed) == curriculum_state(whole)


def test_groups_without_signal_are_replaced_and_all_is_counted(tmp_path: Path):
    run_dir = run_grpo(configured(tmp_path / "run", dynamic_sampling_rounds=3), Shuffled())
    lines, rollouts = metric_lines(run_dir), rollout_lines(run_dir)
    per_step = Counter(line["step"] for line in rollouts)
    for line in lines:
        assert line["groups/total"] == GROUPS
        assert line["groups/resampled"] == per_step[line["step"]] / SIZE - GROUPS <= 3 * GROUPS
        assert line["tokens/sampled"] == sum(
            rollout["tokens"] for rollout in rollouts if rollout["step"] == line["step"]
        )
    tokens = summary(run_dir)["tokens"]
    assert tokens["sampled"] == sum(rollout["tokens"] for rollout in rollouts)
    assert tokens["prefill"] == sum(line["tokens/prefill"] for line in lines)

    without = metric_lines(run_grpo(configured(tmp_path / "without"), Shuffled()))
    assert sum(line["groups/without_signal"] for line in lines) < sum(line["groups/without_signal"] for line in without)
    assert all("groups/resampled" not in line for line in without)
    # The first round of the first step is the same step without refills; then the weights differ.
    assert rollouts[: GROUPS * SIZE] == rollout_lines(tmp_path / "without")[: GROUPS * SIZE]


def test_refills_end_at_their_bound_and_sample_anew(tmp_path: Path):
    config = configured(tmp_path / "run", steps=1, dynamic_sampling_rounds=2, groups_per_batch=18)
    run_dir = run_grpo(config, InOrder(), lambda completion, example: 0.0)
    (line,) = metric_lines(run_dir)
    assert (line["groups/total"], line["groups/without_signal"], line["groups/resampled"]) == (18, 18, 36)
    # Every round has all 18 problems, each at the same place: only the seeds tell the rounds apart.
    texts = [rollout["completion"] for rollout in rollout_lines(run_dir)]
    rounds = [texts[start : start + 18 * SIZE] for start in range(0, len(texts), 18 * SIZE)]
    assert len(rounds) == 3
    for place in range(0, 18 * SIZE, SIZE):
        assert len({tuple(texts[place : place + SIZE]) for texts in rounds}) == 3


def test_no_refill_where_every_group_has_a_signal(tmp_path: Path):
    def varied(completion: Completion, example: Example) -> float:
        return sum(map(ord, completion.text)) / 1000

    run_dir = run_grpo(configured(tmp_path / "run", dynamic_sampling_rounds=2), Shuffled(), varied)
    assert {line["groups/resampled"] for line in metric_lines(run_dir)} == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamic_sampling_rounds": -1}, "loop.dynamic_sampling_rounds=-1: must be at least 0"),
        ({"dynamic_sampling_rounds": 2, "group_size": 1}, "a group of one never has a signal"),
    ],
)
def test_bad_settings_are_refused_in_one_line(tmp_path: Path, change: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        configured(tmp_path / "run", **change).check(FakeService().capabilities)
    assert "\n" not in str(raised.value)
