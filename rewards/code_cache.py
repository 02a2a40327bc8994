"""A cache of the results of coroutines, for callers in any thread and any event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _AbandonedError(Exception):
    """The caller that was computing the value failed or was cancelled."""


class SharedResults(Generic[K, V]):
    """The newest `size` values by key. Among simultaneous callers of the same key, one computes and the others wait."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._futures: OrderedDict[K, Future[V]] = OrderedDict()
        self._lock = threading.Lock()

    async def get(self, key: K, compute: Callable[[], Awaitable[V]], keep: Callable[[V], bool] = lambda _: True) -> V:
        """The value of `key`. A value that `keep` rejects is returned to waiting callers, but not stored.

        Raises:
            Exception: what `compute` raises. Waiting callers do not get it: one of them computes instead.
        """
        while True:
            with self._lock:
                future = self._futures.get(key)
                if future is None:
                    mine = self._futures[key] = Future()
                    # A cancelled waiter must not cancel the future for the others.
                    mine.set_running_or_notify_cancel()
                    if len(self._futures) > self._size:
                        self._futures.popitem(last=False)
                    break
                self._futures.move_to_end(key)
            try:
                return await asyncio.wrap_future(future)
            except _AbandonedError:
                continue
        try:
            value = await compute()
        except BaseException:
            self._forget(key, mine)
            mine.set_exception(_AbandonedError())
            raise
        if not keep(value):
            self._forget(key, mine)
        mine.set_result(value)
        return value

    def _forget(self, key: K, future: Future[V]) -> None:
        with self._lock:
            if self._futures.get(key) is future:
                del self._futures[key]
