"""Samples episodes. All concurrency of a reinforcement-learning step is in this file.

Groups run concurrently against one sampler. Where all episodes of a group begin with the same observation, their first
turn is one request, so that the backend reads the shared prompt once; all other turns are separate requests. Rewards
are computed off the event loop as soon as their completion is there, while others are still being sampled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cookbook.core.clients import SamplingClient
from cookbook.core.examples import Example
from cookbook.core.rollouts import Trajectory, TrajectoryGroup, Transition
from cookbook.core.seeds import derive_seed
from cookbook.core.types import ModelInput, SampledSequence, SamplingParams
from cookbook.envs.base import Env, EnvFactory, Observation
from cookbook.rl.pending import PendingSteps

logger = logging.getLogger(__name__)


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
        """Prompt tokens read: a first prompt that a whole group shares counts once, any other prompt by itself."""
        total = 0
        for group in self.groups:
            first = [trajectory.transitions[0].prompt_tokens for trajectory in group.trajectories]
            shared = all(prompt == first[0] for prompt in first)
            total += sum(len(prompt) for prompt in (first[:1] if shared else first))
            total += sum(len(turn.prompt_tokens) for each in group.trajectories for turn in each.transitions[1:])
        return total

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
    say: Callable[[str], None] = logger.warning,
) -> Rollouts:
    """Sample `group_size` episodes of every example.

    `sampling_params.stop` is replaced by each observation's own stops, and `sampling_params.seed` by a function of
    `seed_path`, the example's place, the sample and the turn. `say` gets a line, from another thread, whenever rewards
    take long.

    Raises:
        CookbookError: raised by the sampler, an environment or a reward; the other episodes are cancelled.
    """
    try:
        collection = _Collection(sampler, group_size, sampling_params, seed_path)
        with collection.pending.reported(say):
            return asyncio.run(collection.run(examples, make_env))
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
        self.pending = PendingSteps()

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
        observations = [env.initial_observation() for env in envs]
        actions: list[SampledSequence | None] = [None] * len(envs)
        if all(observation == observations[0] for observation in observations):
            actions = [*await self._sample(observations[0], len(envs), (place,))]
        async with asyncio.TaskGroup() as tasks:
            episodes = [
                tasks.create_task(self._run_episode(example, env, observation, action, (place, index)))
                for index, (env, observation, action) in enumerate(zip(envs, observations, actions, strict=True))
            ]
        return TrajectoryGroup(example, tuple(episode.result() for episode in episodes))

    async def _run_episode(
        self,
        example: Example,
        env: Env,
        observation: Observation | None,
        action: SampledSequence | None,
        place: tuple[int, int],
    ) -> Trajectory:
        """One episode from its first observation on. `action` is the first turn, where it has been sampled already.

        A later turn may use what is left of the context. Where nothing is left, the episode ends there as "length".
        """
        transitions: list[Transition] = []
        while observation is not None:
            if transitions and self._room(observation) < 1:
                transitions[-1] = replace(transitions[-1], stop_reason="length")
                break
            if action is None:
                limit = self._room(observation) if transitions else None
                (action,) = await self._sample(observation, 1, (*place, len(transitions)), limit)
            with self.pending.step(example.id):
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
            observation, action = outcome.next_observation, None
        return Trajectory(tuple(transitions))

    def _room(self, observation: Observation) -> int:
        """How many tokens may follow an observation."""
        most, context_length = self._sampling_params.max_tokens, self._sampler.context_length
        return most if context_length is None else min(most, context_length - len(observation.prompt_tokens))

    async def _sample(
        self, observation: Observation, num_samples: int, place: tuple[int, ...], max_tokens: int | None = None
    ) -> list[SampledSequence]:
        params = replace(self._sampling_params, stop=observation.stop, seed=derive_seed(*self._seed_path, *place))
        params = params if max_tokens is None else replace(params, max_tokens=max_tokens)
        response = await self._sampler.sample(ModelInput(observation.prompt_tokens), num_samples, params)
        self._last_sample_at = time.perf_counter()
        return response.sequences
