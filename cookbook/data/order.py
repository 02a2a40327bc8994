"""Order in which a run goes through a dataset: a seeded shuffle of every epoch, addressed by position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from cookbook.core.errors import DataError

T = TypeVar("T")


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


def batch_at(examples: Sequence[T], step: int, count: int, seed: int) -> list[T]:
    """The `count` examples of step `step` (from 0), in the order of `order_index`.

    Raises:
        DataError: as `order_index`.
    """
    return [
        examples[order_index(position, len(examples), seed)] for position in range(step * count, (step + 1) * count)
    ]


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)
