"""Environments: what a policy's turns are answered with, and what they are worth.

An `Env` is one episode and is used once. Token-in, token-out: an observation is the exact prompt of the next turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cookbook.backends.types import SampledSequence
from cookbook.rendering import Renderer
from cookbook.scoring import score
from cookbook.types import Completion, Example, Reward, RewardResult


@dataclass(frozen=True)
class Observation:
    """The prompt of a turn and the token ids or strings that end it."""

    prompt_tokens: tuple[int, ...]
    stop: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """What a turn led to: its reward, its text, and the next observation, or None at the end of the episode."""

    text: str
    reward: RewardResult
    next_observation: Observation | None = None


class Env(Protocol):
    """One episode. All envs made from one example must begin with the same observation."""

    def initial_observation(self) -> Observation: ...

    async def step(self, action: SampledSequence) -> StepResult: ...


EnvFactory = Callable[[Example], Env]


class EnvMaker(Protocol):
    """What `conf/env` names: makes one episode of an example."""

    def __call__(self, example: Example, renderer: Renderer, reward: Reward, reward_retries: int) -> Env: ...


@dataclass(frozen=True)
class SingleTurn:
    """Makes single-turn episodes: one prompt, one completion, one reward. Chosen by `conf/env/single_turn.yaml`."""

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
