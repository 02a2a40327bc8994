"""The single-turn environment: one prompt, one completion, one reward."""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, Reward
from cookbook.core.scoring import score
from cookbook.core.types import SampledSequence
from cookbook.data.rendering import Renderer
from cookbook.envs.base import Env, Observation, StepResult


@dataclass(frozen=True)
class SingleTurn:
    """Makes single-turn episodes."""

    def __call__(self, example: Example, renderer: Renderer, reward: Reward, reward_retries: int) -> Env:
        return _SingleTurnEnv(example, renderer, reward, reward_retries)


class _SingleTurnEnv:
    def __init__(self, example: Example, renderer: Renderer, reward: Reward, reward_retries: int) -> None:
        self._example = example
        self._renderer = renderer
        self._reward = reward
        self._reward_retries = reward_retries

    def initial_observation(self) -> Observation:
        return Observation(tuple(self._renderer.prompt(self._example.messages)), self._renderer.stop_tokens)

    async def step(self, action: SampledSequence) -> StepResult:
        text = self._renderer.text(action.tokens)
        completion = Completion(text, action.stop_reason, len(action.tokens))
        result = await score(self._reward, completion, self._example, retries=self._reward_retries)
        return StepResult(text, result)
