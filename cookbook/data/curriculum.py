"""Curricula: the order in which training problems are chosen - fixed, the easiest first, or adapted to the rewards.

A curriculum is a function of its settings, the run's seed, and the rewards recorded for the problems that it chose. Its
state is plain JSON and part of every checkpoint, so a resumed run chooses what an uninterrupted one would have chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Metrics
from cookbook.core.seeds import derive_seed
from cookbook.data.order import order_index


class Curriculum(Protocol):
    """Chooses the examples of one run. An example is identified by its index in the training split."""

    def choose(self, count: int) -> list[int]:
        """The indices of the next `count` examples. Every call advances."""
        ...

    def record(self, indices: Sequence[int], rewards_PG: Sequence[Sequence[float]]) -> None:
        """Learn the outcome of chosen examples: for each, the rewards of its group; empty if none could be graded."""
        ...

    def metrics(self) -> Metrics:
        """The curriculum's progress, under `curriculum/`."""
        ...

    def state(self) -> dict[str, Any]:
        """All that changes over a run, as plain JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state()` was taken."""
        ...


CurriculumMaker = Callable[[Sequence[Example], int], Curriculum]
"""Makes the curriculum of a run from its training examples and seed. Raises CookbookError if they are unsuitable."""


class InOrder:
    """The dataset's own order, over and over."""

    def __call__(self, examples: Sequence[Example], seed: int) -> Curriculum:
        length = _length(examples)
        return _FixedOrder(lambda position: position % length)


class Shuffled:
    """A new permutation for every epoch, a function of (seed, epoch): `cookbook.data.order.order_index`."""

    def __call__(self, examples: Sequence[Example], seed: int) -> Curriculum:
        return _FixedOrder(partial(order_index, length=_length(examples), seed=seed))


class _FixedOrder:
    def __init__(self, index_at: Callable[[int], int]) -> None:
        self._index_at = index_at
        self._position = 0

    def choose(self, count: int) -> list[int]:
        positions = range(self._position, self._position + count)
        self._position = positions.stop
        return [self._index_at(position) for position in positions]

    def record(self, indices: Sequence[int], rewards_PG: Sequence[Sequence[float]]) -> None:
        """Rewards do not change a fixed order."""

    def metrics(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._position = state["position"]


@dataclass(frozen=True)
class Difficulty:
    """Curriculum learning (Bengio et al. 2009): a shuffle of the easiest bucket, then of ever more buckets.

    Args:
        key: the entry of `example.extra` to sort by: a number, or a text, whose length in characters counts.
        buckets: how many buckets, of nearly equal sizes; None: one for every value.
        open_after: open the next bucket after this many groups; None: never for that reason.
        open_at: open it when the mean reward of the last `window` groups reaches this; None: never for that reason.
        window: see `open_at`; counted from the last opening.

    Raises:
        ConfigError: a setting is out of range, or no bucket would ever open.
    """

    key: str = "steps"
    buckets: int | None = None
    open_after: int | None = 200
    open_at: float | None = None
    window: int = 40

    def __post_init__(self) -> None:
        for name in ("buckets", "open_after"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"curriculum.{name}={value}: must be null or at least 1")
        _require(self.window >= 1, f"curriculum.window={self.window}: must be at least 1")
        _require(
            self.open_after is not None or self.open_at is not None,
            "curriculum.open_after=null with curriculum.open_at=null: only the first bucket would ever open; set one",
        )

    def __call__(self, examples: Sequence[Example], seed: int) -> Curriculum:
        difficulties = [self._difficulty(examples[index]) for index in range(_length(examples))]
        if self.buckets is None:
            buckets: dict[float, list[int]] = {difficulty: [] for difficulty in sorted(set(difficulties))}
            for index, difficulty in enumerate(difficulties):
                buckets[difficulty].append(index)
            return _EasiestFirst(self, list(buckets.values()), seed)
        if self.buckets > len(examples):
            raise ConfigError(
                f"curriculum.buckets={self.buckets}: there are only {len(examples)} training examples; choose fewer"
            )
        order = np.argsort(difficulties, kind="stable")
        return _EasiestFirst(self, [part.tolist() for part in np.array_split(order, self.buckets)], seed)

    def _difficulty(self, example: Example) -> float:
        value = example.extra.get(self.key)
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int | float) and not math.isnan(value):
            return value
        known = ", ".join(key for key, other in example.extra.items() if isinstance(other, int | float | str)) or "none"
        raise DataError(
            f"curriculum.key={self.key}: {example.id} has {value!r:.60} there, not a number or a text; "
            f"choose one of its keys: {known}"
        )


class _EasiestFirst:
    def __init__(self, settings: Difficulty, buckets: list[list[int]], seed: int) -> None:
        self._settings, self._buckets, self._seed = settings, buckets, seed
        self._num_open = 1
        self._position = 0  # groups chosen since the last opening
        self._recent: list[float] = []  # mean rewards of the last `window` groups since the last opening

    def choose(self, count: int) -> list[int]:
        pool = [index for bucket in self._buckets[: self._num_open] for index in bucket]
        seed = derive_seed(self._seed, "curriculum", self._num_open)
        positions = range(self._position, self._position + count)
        self._position = positions.stop
        return [pool[order_index(position, len(pool), seed)] for position in positions]

    def record(self, indices: Sequence[int], rewards_PG: Sequence[Sequence[float]]) -> None:
        self._recent += [fmean(rewards_G) for rewards_G in rewards_PG if rewards_G]
        self._recent = self._recent[-self._settings.window :]
        if self._num_open < len(self._buckets) and self._is_time():
            self._num_open += 1
            self._position = 0
            self._recent = []

    def _is_time(self) -> bool:
        settings = self._settings
        if settings.open_after is not None and self._position >= settings.open_after:
            return True
        return (
            settings.open_at is not None
            and len(self._recent) == settings.window
            and fmean(self._recent) >= settings.open_at
        )

    def metrics(self) -> Metrics:
        return {"curriculum/buckets_open": float(self._num_open), "curriculum/buckets": float(len(self._buckets))}

    def state(self) -> dict[str, Any]:
        return {"num_open": self._num_open, "position": self._position, "recent": list(self._recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_open, self._position, self._recent = state["num_open"], state["position"], list(state["recent"])


@dataclass(frozen=True)
class RewardDriven:
    """`Shuffled` without problems whose rewards give no signal: solved ones are dropped, too hard ones postponed.

    A problem is judged by the mean reward of its last `visits` groups, once it has had that many. A step has no problem
    twice while the dataset has others. If fewer are left than a step needs, the postponed ones return at once; if that
    is not enough, the solved ones do, and `curriculum/restarts` counts it.

    Args:
        solved: drop a problem whose mean reward is at least this.
        hopeless: postpone one whose mean reward is at most this.
        visits: how many groups the mean is over.
        postpone: for how many chosen groups, of any problem.

    Raises:
        ConfigError: a setting is out of range, or `hopeless` is not below `solved`.
    """

    solved: float = 1.0
    hopeless: float = 0.0
    visits: int = 2
    postpone: int = 400

    def __post_init__(self) -> None:
        for name in ("visits", "postpone"):
            _require(getattr(self, name) >= 1, f"curriculum.{name}={getattr(self, name)}: must be at least 1")
        _require(
            self.hopeless < self.solved,
            f"curriculum.hopeless={self.hopeless} with curriculum.solved={self.solved}: hopeless must be below solved",
        )

    def __call__(self, examples: Sequence[Example], seed: int) -> Curriculum:
        return _UnsolvedFirst(self, _length(examples), seed)


class _UnsolvedFirst:
    def __init__(self, settings: RewardDriven, length: int, seed: int) -> None:
        self._settings, self._length, self._seed = settings, length, seed
        self._position = 0  # in the shuffled order, skipped problems included
        self._draws = 0
        self._restarts = 0
        self._means: dict[int, list[float]] = {}  # of the last `visits` groups of each unsolved problem
        self._solved: set[int] = set()
        self._postponed: dict[int, int] = {}  # the value of `_draws` at which each returns

    def choose(self, count: int) -> list[int]:
        self._postponed = {index: until for index, until in self._postponed.items() if until > self._draws}
        chosen: list[int] = []
        excluded = self._solved | self._postponed.keys()
        while len(chosen) < count:
            while len(excluded) == self._length:
                excluded = self._make_room(chosen)
            index = order_index(self._position, self._length, self._seed)
            self._position += 1
            if index not in excluded:
                chosen.append(index)
                excluded.add(index)
        self._draws += count
        return chosen

    def _make_room(self, chosen: Sequence[int]) -> set[int]:
        """Readmit problems, the postponed before the solved. Returns those that stay excluded."""
        if self._postponed:
            self._postponed = {}
            return self._solved | {*chosen}
        if self._solved:
            self._solved = set()
            self._restarts += 1
            return {*chosen}
        return set()  # all are chosen already: the step is larger than the dataset

    def record(self, indices: Sequence[int], rewards_PG: Sequence[Sequence[float]]) -> None:
        settings = self._settings
        for index, rewards_G in zip(indices, rewards_PG, strict=True):
            if not rewards_G:
                continue
            means = [*self._means.get(index, []), fmean(rewards_G)][-settings.visits :]
            self._means[index] = means
            if len(means) == settings.visits and fmean(means) >= settings.solved:
                self._solved.add(index)
                del self._means[index]  # if it returns, it is judged anew
            elif len(means) == settings.visits and fmean(means) <= settings.hopeless:
                self._postponed[index] = self._draws + settings.postpone

    def metrics(self) -> Metrics:
        return {
            "curriculum/solved": float(len(self._solved)),
            "curriculum/postponed": float(len(self._postponed)),
            "curriculum/restarts": float(self._restarts),
        }

    def state(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "draws": self._draws,
            "restarts": self._restarts,
            "means": {str(index): means for index, means in self._means.items()},
            "solved": sorted(self._solved),
            "postponed": {str(index): until for index, until in self._postponed.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._position, self._draws, self._restarts = state["position"], state["draws"], state["restarts"]
        self._means = {int(index): list(means) for index, means in state["means"].items()}
        self._solved = set(state["solved"])
        self._postponed = {int(index): until for index, until in state["postponed"].items()}


def _length(examples: Sequence[Example]) -> int:
    if not examples:
        raise DataError(
            "the dataset has no training examples for a curriculum to choose from; choose a dataset that has some"
        )
    return len(examples)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
