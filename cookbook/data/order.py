"""Order in which a run goes through a dataset: a seeded shuffle of every epoch, addressed by position."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cookbook.core.errors import DataError


def order_index(position: int, length: int, seed: int) -> int:
    """The dataset index of the example at `position` (from 0) in the order of a run over `length` examples.

    Every epoch (`length` positions) is a permutation of its own, a function of (`seed`, epoch) alone, so a run that
    resumes at a position continues as if it had never stopped.

    Raises:
        DataError: the dataset is empty, or `position` or `seed` is negative.
    """
    if length < 1:
        raise DataError("the dataset is empty: it has no example")
    if position < 0 or seed < 0:
        raise DataError(f"order_index: position={position}, seed={seed}: neither may be negative")
    epoch, offset = divmod(position, length)
    return int(_permutation(length, seed, epoch)[offset])


@dataclass(frozen=True)
class Batches:
    """The batches of a run over the rows that it can use.

    Every epoch goes through all of them once, in the order of `order_index` without the rows that are left out. The
    last batch of an epoch has what is left, so no batch reaches from one epoch into the next.

    Args:
        length: the number of rows of the split, those that are left out included.
        left_out: the indices of the rows that cannot be used.
        batch_size: rows of a batch.
        seed: the run's.

    Raises:
        DataError: no row is left.
    """

    length: int
    left_out: Collection[int]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.rows_per_epoch < 1:
            raise DataError("the dataset has no row that can be used")

    @property
    def rows_per_epoch(self) -> int:
        return self.length - len(self.left_out)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows_per_epoch / self.batch_size)

    def at(self, step: int) -> list[int]:
        """The indices of the rows of step `step` (from 0)."""
        epoch, number = divmod(step, self.steps_per_epoch)
        order = _permutation(self.length, self.seed, epoch)
        if self.left_out:
            order = order[np.isin(order, list(self.left_out), invert=True)]
        return order[number * self.batch_size : (number + 1) * self.batch_size].tolist()


@lru_cache(maxsize=2)  # a step of policy training may reach from one epoch into the next
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)
