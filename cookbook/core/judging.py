"""The check of a gold answer by the reward that will compare with it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from cookbook.core.examples import Example
from cookbook.core.rollouts import Reward
from cookbook.core.scoring import TimeLimited


@runtime_checkable
class ChecksGold(Protocol):
    """A reward that can tell, at little cost, an example that it could not judge any completion of."""

    def check_gold(self, example: Example) -> None:
        """Raises DataError if the reward cannot judge completions of the example, such as for a gold answer that it
        cannot read. Called for every row before a run."""
        ...


def check_gold(reward: Reward, example: Example) -> None:
    """Have a reward check an example, if it `ChecksGold`. Raises DataError."""
    if isinstance(reward, TimeLimited):
        reward = reward.reward
    if isinstance(reward, ChecksGold):
        reward.check_gold(example)
