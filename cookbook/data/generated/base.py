"""Base of generated datasets: reproducible draws, a held-out class by content, sequences that make items on demand."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar, overload

T = TypeVar("T")

HELD_OUT = 5
"""One in this many combinations of template and numbers is held out."""


def is_held_out(template: str, numbers: Sequence[int]) -> bool:
    """Whether items of this template with these numbers belong to the test split, whatever the seed."""
    key = f"{template}:{','.join(map(str, numbers))}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % HELD_OUT == 0


class Draws:
    """Draws by `Random.random` alone: the one method that Python promises to keep stable for a given seed."""

    def __init__(self, key: str) -> None:
        self._random = random.Random(key)

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]


class GeneratedSequence(Sequence[T]):
    """Makes item i when asked for it, keeps nothing."""

    def __init__(self, make: Callable[[int], T], size: int) -> None:
        self._make, self._indices = make, range(size)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Raises IndexError beyond the sequence's size."""
        if isinstance(index, slice):
            return [self[i] for i in self._indices[index]]
        return self._make(self._indices[index])
