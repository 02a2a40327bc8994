import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from cookbook.core.clients import APIFuture
from cookbook.core.datums import policy_datums, scale_weights
from cookbook.core.errors import BackendError
from cookbook.core.examples import Example
from cookbook.core.rollouts import RewardResult, Trajectory, TrajectoryGroup, Transition
from cookbook.core.types import ForwardBackwardOutput, ModelInput, SampledSequence, SampleResponse, SamplingParams
from cookbook.envs.base import Observation, StepResult
from cookbook.rl.advantages import RLOO, MeanCentered, StdNormalized
from cookbook.rl.batch import (
    grading_failures,
    group_datums,
    kl_per_trajectory,
    mismatch_metrics,
    rollout_metrics,
)
from cookbook.rl.rollouts import collect
from cookbook.tracking.tracker import rollout_records

EXAMPLES = [Example(str(index), (), "") for index in range(3)]
PARAMS = SamplingParams(max_tokens=4)


class ScriptedSampler:
    """Sample j of a prompt continues with token 100 + j; every request is kept."""

    context_length: int | None = None

    def __init__(self, fail=False):
        self.requests = []
        self.fail = fail

    def sample(self, prompt, num_samples, sampling_params, include_prompt_logprobs=False, topk_prompt_logprobs=0):
        self.requests.append((prompt, num_samples, sampling_params))
        future: Future[SampleResponse] = Future()
        if self.fail:
            future.set_exception(BackendError("sampler down"))
        else:
            future.set_result(
                SampleResponse([SampledSequence([100 + j, 0], [-0.5, -0.25], "eos") for j in range(num_samples)])
            )
        return APIFuture(future)

    def compute_logprobs(self, prompt: ModelInput):
        future: Future[list[float | None]] = Future()
        future.set_result([None, *[-1.0] * (prompt.length - 1)])
        return APIFuture(future)


class TwoTurns:
    """The first turn is answered with tokens 7 and 8; the second ends the episode with the sample's token as reward."""

    def __init__(self, example, status="correct"):
        self.prompt = (1, 2, int(example.id))
        self.status = status
        self.tokens = []

    def initial_observation(self):
        return Observation(self.prompt, (0,))

    async def step(self, action):
        await asyncio.sleep(0)
        if not self.tokens:
            self.tokens = [*self.prompt, *action.tokens]
            return StepResult("one", RewardResult(0.0, "partial"), Observation((*self.tokens, 7, 8), (0, "stop")))
        return StepResult("two", RewardResult(float(self.tokens[3] - 100), self.status))


def test_a_group_shares_its_first_request_and_goes_its_own_ways_after():
    sampler = ScriptedSampler()
    rollouts = collect(sampler, EXAMPLES, TwoTurns, 4, PARAMS, (0, "rollout", 3))
    assert [group.example.id for group in rollouts.groups] == ["0", "1", "2"]
    assert [(prompt.to_ints(), count) for prompt, count, _ in sampler.requests[:3]] == [
        ([1, 2, place], 4) for place in range(3)
    ]
    assert all(count == 1 for _, count, _ in sampler.requests[3:])
    assert len(sampler.requests) == 3 + 3 * 4
    assert sampler.requests[3][2].stop == (0, "stop")
    trajectory = rollouts.groups[1].trajectories[2]
    assert trajectory.reward == 2.0
    assert trajectory.transitions[1].prompt_tokens == (1, 2, 1, 102, 0, 7, 8)
    assert len(policy_datums(trajectory, 1.0)) == 1
    assert rollouts.num_prefill_tokens == 3 * 3 + 12 * 7
    assert rollouts.num_sampled_tokens == 12 * 4


def test_seeds_are_a_function_of_run_step_problem_sample_and_turn():
    def seeds(path):
        sampler = ScriptedSampler()
        collect(sampler, EXAMPLES, TwoTurns, 4, PARAMS, path)
        return sorted(params.seed for _, _, params in sampler.requests)

    assert seeds((0, "rollout", 3)) == seeds((0, "rollout", 3))
    assert not set(seeds((0, "rollout", 3))) & set(seeds((0, "rollout", 4)))
    assert len(set(seeds((0, "rollout", 3)))) == 15


def test_the_cause_of_a_failure_comes_through_bare():
    with pytest.raises(BackendError, match="sampler down"):
        collect(ScriptedSampler(fail=True), EXAMPLES, TwoTurns, 4, PARAMS, (0,))


def collected(status="correct"):
    return collect(ScriptedSampler(), EXAMPLES, lambda example: TwoTurns(example, status), 4, PARAMS, (0,)).groups


def test_group_datums_center_within_the_group():
    data, metrics = group_datums(collected(), MeanCentered())
    assert metrics == {"groups/total": 3, "groups/without_signal": 0, "datums/total": 12}
    assert sorted({float(datum.loss_fn_inputs["advantages"].sum()) for datum in data}) == [-6.0, -2.0, 2.0, 6.0]


def test_a_failed_grader_is_in_no_baseline_and_no_batch():
    groups = collected()
    trajectories = groups[0].trajectories
    last = trajectories[3].transitions[1]
    broken = replace(
        trajectories[3], transitions=(trajectories[3].transitions[0], replace(last, reward=RewardResult(0.0, "error")))
    )
    groups[0] = replace(groups[0], trajectories=(*trajectories[:3], broken))
    data, _ = group_datums(groups[:1], MeanCentered())
    # Rewards 0, 1 and 2 remain; the middle one has advantage 0.
    assert [float(datum.loss_fn_inputs["advantages"].sum()) for datum in data] == [-4.0, 0.0, 4.0]
    metrics = rollout_metrics(groups[0].trajectories)
    assert metrics["reward/error"] == 0.25
    assert metrics["reward/mean"] == 1.0


def rewarded(*rewards: float) -> TrajectoryGroup:
    """A group whose trajectory i has one turn of i + 1 sampled tokens."""
    turns = [
        Transition((1, 2), (5,) * (i + 1), (-0.5,) * (i + 1), "eos", "", RewardResult(reward, "partial"))
        for i, reward in enumerate(rewards)
    ]
    return TrajectoryGroup(EXAMPLES[0], tuple(Trajectory((turn,)) for turn in turns))


@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("advantage", [MeanCentered(), StdNormalized(), RLOO()], ids=lambda each: type(each).__name__)
def test_an_advantage_of_exactly_zero_changes_no_other_weight(loss_agg, advantage):
    def weights(*rewards):
        data, metrics = group_datums([rewarded(*rewards)], advantage)
        assert metrics["datums/total"] == 3
        scaled = scale_weights(data, loss_agg, max_tokens=8)
        return [datum.loss_fn_inputs["weights"][-1] for datum in scaled]

    middle = {"token_mean": 1 / 6, "sequence_mean": 1 / (3 * 2), "constant": 1 / (3 * 8)}[loss_agg]
    assert weights(0, 0.5, 1) == weights(0, 0.5001, 1)
    assert weights(0, 0.5, 1)[1] == pytest.approx(middle)


def test_a_group_without_signal_is_left_out_and_counted():
    groups = [replace(group, trajectories=(group.trajectories[1],) * 4) for group in collected()]
    data, metrics = group_datums(groups, MeanCentered())
    assert data == []
    assert metrics["groups/without_signal"] == 3


def test_kl_of_a_trajectory_is_summed_over_its_sampled_tokens():
    (first, *_), *_ = kl_per_trajectory(collected(), ScriptedSampler())
    # Two turns of two tokens, sampled at -0.5 and -0.25, reference -1.
    assert first == pytest.approx(2 * (0.5 + 0.75))


def test_a_penalty_lowers_the_reward_before_the_baseline():
    groups = collected()[:1]
    data, _ = group_datums(groups, MeanCentered(), penalties=[[0.0, 1.0, 2.0, 3.0]])
    assert data == []  # the penalty cancels the rewards 0, 1, 2, 3 exactly


class OwnPrompt:
    """Every episode begins with a prompt of its own, as where a game is set up at random; it lasts two turns."""

    made = 0

    def __init__(self, example):
        self.number = OwnPrompt.made % 4
        OwnPrompt.made += 1
        self.turns = 0

    def initial_observation(self):
        return Observation((1, 2, 10 + self.number), (0,))

    async def step(self, action):
        self.turns += 1
        following = Observation((*self.initial_observation().prompt_tokens, *action.tokens, 7), (0,))
        return StepResult("", RewardResult(1.0, "correct", {"moves": 2.0}), following if self.turns == 1 else None)


def test_every_episode_begins_with_its_own_observation():
    OwnPrompt.made = 0
    sampler = ScriptedSampler()
    rollouts = collect(sampler, EXAMPLES[:1], OwnPrompt, 4, PARAMS, (0,))
    prompts = [trajectory.transitions[0].prompt_tokens for trajectory in rollouts.groups[0].trajectories]
    assert prompts == [(1, 2, 10), (1, 2, 11), (1, 2, 12), (1, 2, 13)]
    assert sorted(prompt.to_ints() for prompt, _, _ in sampler.requests[:4]) == [list(prompt) for prompt in prompts]
    assert all(count == 1 for _, count, _ in sampler.requests)
    assert len({params.seed for _, _, params in sampler.requests}) == 8
    assert rollouts.num_prefill_tokens == 4 * 3 + 4 * 6


def test_metrics_are_summed_over_turns_and_averaged_over_trajectories_everywhere():
    rollouts = collect(ScriptedSampler(), EXAMPLES[:1], OwnPrompt, 4, PARAMS, (0,))
    assert rollout_metrics(rollouts.trajectories)["reward/part/moves"] == 4.0
    assert [record["parts"] for record in rollout_records(0, rollouts.groups)] == [{"moves": 4.0}] * 4


def test_only_positions_that_the_loss_evaluated_are_compared():
    data, _ = group_datums([rewarded(0, 0.5, 1)], MeanCentered())
    outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"] + 0.1} for datum in data]
    outputs[1] = {"logprobs": np.zeros_like(outputs[1]["logprobs"])}  # what a backend returns for what it skipped
    metrics = mismatch_metrics(data, ForwardBackwardOutput(outputs, {}))
    assert metrics["kl/sample_train"] == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-3)
    assert metrics["kl/sample_train_max_gap"] == pytest.approx(0.1, rel=1e-3)
    assert mismatch_metrics(data[1:2], ForwardBackwardOutput(outputs[1:2], {})) == {}


@pytest.mark.parametrize("blocking", [False, True])
def test_a_line_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch, blocking: bool):
    monkeypatch.setattr("cookbook.rl.pending.FIRST_NOTICE_S", 0.02)
    said, heard = [], threading.Event()

    def say(line):
        said.append(line)
        heard.set()

    class Slow(TwoTurns):
        async def step(self, action):
            # Goes on only once the line was said.
            if blocking:
                heard.wait()
            else:
                await asyncio.to_thread(heard.wait)
            return await super().step(action)

    collect(ScriptedSampler(), EXAMPLES, Slow, 1, PARAMS, (0,), say)
    assert said[0].startswith("waiting for the rewards of ") and "loop.reward_timeout_s" in said[0]
    assert ": 0" in said[0]


def test_what_no_grader_can_judge_is_not_held_against_this_one():
    def failed(**details):
        turn = rewarded(1.0).trajectories[0].transitions[0]
        return Trajectory((replace(turn, reward=RewardResult(0.0, "error", details=details)),))

    good = rewarded(1.0).trajectories[0]
    assert grading_failures([good]) == (0.0, "")
    assert grading_failures([good, failed(error="down"), failed(error="late")]) == (2 / 3, "down")
    assert grading_failures([good, failed(error="gold", unjudgeable=True)]) == (0.0, "gold")
    assert grading_failures([failed(error="gold", unjudgeable=True)]) == (1.0, "gold")


@pytest.mark.parametrize(("context", "second_turn"), [(11, 4), (9, 2), (8, 1), (7, None)])
def test_a_later_turn_uses_what_is_left_of_the_context_and_ends_the_episode_where_nothing_is(context, second_turn):
    sampler = ScriptedSampler()
    sampler.context_length = context  # the second prompt has 7 tokens
    trajectory = collect(sampler, EXAMPLES[:1], TwoTurns, 1, PARAMS, (0,)).groups[0].trajectories[0]
    later = [params.max_tokens for _, _, params in sampler.requests[1:]]
    assert later == ([] if second_turn is None else [second_turn])
    assert len(trajectory.transitions) == 1 + len(later)
    assert trajectory.transitions[-1].stop_reason == ("length" if second_turn is None else "eos")
