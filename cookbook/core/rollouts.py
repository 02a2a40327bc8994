"""Data types of rollouts. A group is several trajectories of one example; a trajectory is a list of transitions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cookbook.core.examples import Example
from cookbook.core.types import StopReason

Metrics = dict[str, float]


@dataclass(frozen=True)
class Completion:
    """What a reward sees of a sampled completion.

    `text` is without the ending token; `stop_reason` "length" means truncated.
    """

    text: str
    stop_reason: StopReason
    num_tokens: int


RewardStatus = Literal["correct", "partial", "wrong", "malformed", "error"]


@dataclass(frozen=True)
class RewardResult:
    """A score and what it means. Status "error" means that the grader failed: the value enters no baseline.

    `metrics` are summed over the turns of a trajectory and averaged over those of a step. `details` (JSON values) are
    only recorded with the rollout; those of an error have the reason under "error".
    """

    value: float
    status: RewardStatus
    metrics: Metrics = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


Reward = Callable[[Completion, Example], "RewardResult | float | Awaitable[RewardResult | float]"]
"""A reward function, plain or async. A plain float means: 1 is correct, 0 is wrong, anything else partial."""


@dataclass(frozen=True)
class Transition:
    """One turn: the exact prompt tokens, the sampled tokens with their sampling logprobs, and the reward for it."""

    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    stop_reason: StopReason
    text: str
    reward: RewardResult


@dataclass(frozen=True)
class Trajectory:
    """One episode. Its reward is the sum over turns.

    Its status is that of the last turn, or "error" if the grader of any turn failed.
    """

    transitions: tuple[Transition, ...]

    @property
    def reward(self) -> float:
        return sum(transition.reward.value for transition in self.transitions)

    @property
    def status(self) -> RewardStatus:
        failed = any(transition.reward.status == "error" for transition in self.transitions)
        return "error" if failed else self.transitions[-1].reward.status

    @property
    def metrics(self) -> Metrics:
        """The metrics of its rewards, each summed over the turns, as the reward is."""
        totals: Metrics = {}
        for transition in self.transitions:
            for name, value in transition.reward.metrics.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(transition.completion_tokens) for transition in self.transitions)

    @property
    def truncated(self) -> bool:
        return any(transition.stop_reason == "length" for transition in self.transitions)


@dataclass(frozen=True)
class TrajectoryGroup:
    """All trajectories sampled for one example in one step."""

    example: Example
    trajectories: tuple[Trajectory, ...]

    @property
    def graded(self) -> tuple[Trajectory, ...]:
        """The trajectories whose grader did not fail."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.status != "error")

    @property
    def graded_rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.graded]
