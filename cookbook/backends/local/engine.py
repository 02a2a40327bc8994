"""The engine of the local backend: one thread that does all work in call order."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from cookbook.core.errors import BackendError

T = TypeVar("T")


class Request(Protocol):
    """Anything with a future, which can be held and answered together with others."""

    @property
    def future(self) -> Future: ...


R = TypeVar("R", bound=Request)


class Engine(Generic[R]):
    """Runs operations in call order, and requests (samples, prompt logprobs) in batches.

    Requests are held until a result is asked for, or an operation is submitted; then all that are held go to `answer`
    as one batch. So the caller's order of calls decides what is in a batch, and with it every bit of the result; timing
    never does: requests made in one turn of the event loop, or before the first `result()`, run together.

    An error goes to the future of what failed; the engine continues.
    """

    def __init__(self, answer: Callable[[list[R]], None]) -> None:
        self._answer = answer
        self._queue: SimpleQueue[tuple[Callable[[], None], list[Future]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._held: list[R] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="local-engine", daemon=True)
        self._thread.start()
        # A daemon thread that is inside torch while the interpreter exits aborts the process.
        atexit.register(self.stop)

    def submit(self, operation: Callable[[], T]) -> Future[T]:
        """Enqueue one operation, after the requests held so far.

        Raises:
            BackendError: the engine was stopped.
        """
        future: Future[T] = Future()
        with self._lock:
            self._check_running()
            self._release_held()
            self._queue.put((lambda: future.set_result(operation()), [future]))
        return future

    def hold(self, request: R) -> None:
        """Add a request to the batch that the next `flush` or operation starts.

        Raises:
            BackendError: the engine was stopped.
        """
        with self._lock:
            self._check_running()
            self._held.append(request)

    def flush(self) -> None:
        """Enqueue the requests held so far as one batch."""
        with self._lock:
            if not self._stopped:
                self._release_held()

    def stop(self) -> None:
        """Let the running operation end and fail those that are queued. Idempotent."""
        with self._lock:
            if not self._stopped:
                self._release_held()
                self._stopped = True
                self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.stop)

    def _check_running(self) -> None:
        if self._stopped:
            raise BackendError("the local backend was stopped; make a new LocalService")

    def _release_held(self) -> None:
        if self._held:
            requests, self._held = self._held, []
            self._queue.put((lambda: self._answer(requests), [request.future for request in requests]))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            operation, futures = item
            wanted = [future for future in futures if future.set_running_or_notify_cancel()]
            if not wanted:
                continue
            try:
                if self._stopped:
                    raise BackendError("the local backend was stopped before this operation ran")
                operation()
            except Exception as error:  # any error is for those who wait for the result
                for future in wanted:
                    if not future.done():
                        future.set_exception(error)
