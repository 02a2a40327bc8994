import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest

from cookbook.core.clients import APIFuture
from cookbook.core.datums import policy_datums
from cookbook.core.errors import BackendError
from cookbook.core.examples import Example
from cookbook.core.rollouts import RewardResult
from cookbook.core.types import ModelInput, SampledSequence, SampleResponse, SamplingParams
from cookbook.envs.base import Observation, StepResult
from cookbook.rl.advantages import MeanCentered
from cookbook.rl.batch import group_datums, kl_per_trajectory, rollout_metrics
from cookbook.rl.rollouts import collect

EXAMPLES = [Example(str(index), (), "") for index in range(3)]
PARAMS = SamplingParams(max_tokens=4)


class ScriptedSampler:
    """Sample j of a prompt continues with token 100 + j; every request is kept."""

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
    # Rewards 0, 1 and 2 remain: the middle one has advantage 0 and no datum.
    assert sorted(float(datum.loss_fn_inputs["advantages"].max()) for datum in data) == [0.0, 1.0]
    metrics = rollout_metrics(groups[0].trajectories)
    assert metrics["reward/error"] == 0.25
    assert metrics["reward/mean"] == 1.0


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
