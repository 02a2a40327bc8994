"""Samples episodes. All concurrency of a reinforcement-learning step is in this file.

Groups run concurrently against one sampler. A group's first turn is one request for all of its samples, so that the
backend reads the shared prompt once; later turns are separate requests. Rewards are computed off the event loop as
soon as their completion is there, while others are still being sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cookbook.core.clients import SamplingClient
from cookbook.core.examples import Example
from cookbook.core.rollouts import Trajectory, TrajectoryGroup, Transition
from cookbook.core.seeds import derive_seed
from cookbook.core.types import ModelInput, SampledSequence, SamplingParams
from cookbook.envs.base import Env, EnvFactory, Observation


@dataclass(frozen=True)
class Rollouts:
    """The groups of one step, in the order of their examples, and the time spent (seconds)."""

    groups: list[TrajectoryGroup]
    sample_s: float
    reward_wait_s: float
    """Time spent waiting for rewards after the last sample."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens read: a group's shared first prompt counts once, later turns once per trajectory."""
        shared = sum(len(group.trajectories[0].transitions[0].prompt_tokens) for group in self.groups)
        later = sum(len(turn.prompt_tokens) for trajectory in self.trajectories for turn in trajectory.transitions[1:])
        return shared + later

    @property
    def num_sampled_tokens(self) -> int:
        return sum(trajectory.num_sampled_tokens for trajectory in self.trajectories)


def merge_rounds(rounds: Sequence[Rollouts]) -> Rollouts:
    """Several rounds of sampling, one after the other, as one."""
    groups = [group for rollouts in rounds for group in rollouts.groups]
    sample_s = sum(rollouts.sample_s for rollouts in rounds)
    return Rollouts(groups, sample_s, sum(rollouts.reward_wait_s for rollouts in rounds))


def collect(
    sampler: SamplingClient,
    examples: Sequence[Example],
    make_env: EnvFactory,
    group_size: int,
    sampling_params: SamplingParams,
    seed_path: tuple[int | str, ...],
) -> Rollouts:
    """Sample `group_size` episodes of every example.

    `sampling_params.stop` is replaced by each observation's own stops, and `sampling_params.seed` by a function of
    `seed_path`, the example's place, the sample and the turn.

    Raises:
        CookbookError: raised by the sampler, an environment or a reward; the other episodes are cancelled.
    """
    try:
        return asyncio.run(_Collection(sampler, group_size, sampling_params, seed_path).run(examples, make_env))
    except BaseExceptionGroup as failures:
        raise _first_failure(failures) from failures


def _first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first_failure(first) if isinstance(first, BaseExceptionGroup) else first


class _Collection:
    """The state of one `collect` that its concurrent episodes share."""

    def __init__(
        self,
        sampler: SamplingClient,
        group_size: int,
        sampling_params: SamplingParams,
        seed_path: tuple[int | str, ...],
    ) -> None:
        self._sampler = sampler
        self._group_size = group_size
        self._sampling_params = sampling_params
        self._seed_path = seed_path
        self._last_sample_at = time.perf_counter()

    async def run(self, examples: Sequence[Example], make_env: EnvFactory) -> Rollouts:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            groups = [
                tasks.create_task(self._run_group(place, example, make_env)) for place, example in enumerate(examples)
            ]
        ended = time.perf_counter()
        return Rollouts(
            [group.result() for group in groups], self._last_sample_at - started, ended - self._last_sample_at
        )

    async def _run_group(self, place: int, example: Example, make_env: EnvFactory) -> TrajectoryGroup:
        envs = [make_env(example) for _ in range(self._group_size)]
        first = envs[0].initial_observation()
        sequences = await self._sample(first, len(envs), (place,))
        async with asyncio.TaskGroup() as tasks:
            episodes = [
                tasks.create_task(self._run_episode(env, first, sequence, (place, index)))
                for index, (env, sequence) in enumerate(zip(envs, sequences, strict=True))
            ]
        return TrajectoryGroup(example, tuple(episode.result() for episode in episodes))

    async def _run_episode(
        self, env: Env, first: Observation, first_action: SampledSequence, place: tuple[int, int]
    ) -> Trajectory:
        transitions: list[Transition] = []
        observation: Observation | None = first
        action = first_action
        while observation is not None:
            if transitions:
                (action,) = await self._sample(observation, 1, (*place, len(transitions)))
            outcome = await env.step(action)
            transitions.append(
                Transition(
                    prompt_tokens=observation.prompt_tokens,
                    completion_tokens=tuple(action.tokens),
                    sampling_logprobs=tuple(action.logprobs),
                    stop_reason=action.stop_reason,
                    text=outcome.text,
                    reward=outcome.reward,
                )
            )
            observation = outcome.next_observation
        return Trajectory(tuple(transitions))

    async def _sample(
        self, observation: Observation, num_samples: int, place: tuple[int, ...]
    ) -> list[SampledSequence]:
        params = replace(self._sampling_params, stop=observation.stop, seed=derive_seed(*self._seed_path, *place))
        response = await self._sampler.sample(ModelInput(observation.prompt_tokens), num_samples, params)
        self._last_sample_at = time.perf_counter()
        return response.sequences
