"""Environments: they give prompts to a policy and reward its turns.

An `Env` is one episode and is used once. Token-in, token-out: an observation is the exact prompt of the next turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cookbook.core.examples import Example
from cookbook.core.rollouts import Reward, RewardResult
from cookbook.core.types import SampledSequence
from cookbook.data.rendering import Renderer


@dataclass(frozen=True)
class Observation:
    """The prompt of a turn and the token ids or strings that end it."""

    prompt_tokens: tuple[int, ...]
    stop: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """The result of a turn: its text, its reward, and the next observation, or None at the end of the episode."""

    text: str
    reward: RewardResult
    next_observation: Observation | None = None


class Env(Protocol):
    """One episode. Where all envs of a group begin with the same observation, it is sampled from in one request."""

    def initial_observation(self) -> Observation: ...

    async def step(self, action: SampledSequence) -> StepResult: ...


EnvFactory = Callable[[Example], Env]


class EnvMaker(Protocol):
    """A component of `conf/env`: makes one episode of an example."""

    def __call__(self, example: Example, renderer: Renderer, reward: Reward, reward_retries: int) -> Env: ...
