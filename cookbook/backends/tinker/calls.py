"""Pending operations: converts the SDK's futures and errors, and fails what waits for a silent server."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from cookbook.core.clients import APIFuture
from cookbook.core.errors import BackendError, CookbookError

T = TypeVar("T")

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 5.0
"""Seconds between checks of a server while something is pending. The SDK itself retries for ever without a message."""

_MESSAGE_CHARS = 600
_RESULT_ERROR = re.compile(
    r"^(?:Request failed|Error retrieving result): (.*?)(?: with status \d+)? for self\.request_id=", re.DOTALL
)
"""What the SDK puts around the server's own message."""


class Calls:
    """Waits for the SDK on its own thread, so that an operation does not block its caller until the result is needed.

    Args:
        answers: whether the server can be reached; None if that cannot be checked.
        patience_s: how long it may be silent before what is pending fails.
        where: the server's name in messages.
    """

    def __init__(self, answers: Callable[[], Awaitable[bool]] | None, patience_s: float, where: str) -> None:
        self._answers, self._patience_s, self._where = answers, patience_s, where
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinker-calls", daemon=True)
        self._thread.start()
        if answers is not None:
            asyncio.run_coroutine_threadsafe(self._watch(answers), self._loop)

    def check_open(self) -> None:
        """Raises BackendError after `stop`."""
        if self._stopped is not None:
            raise BackendError(self._stopped)

    def call(self, submit: Callable[[], object], convert: Callable[[Any], T]) -> APIFuture[T]:
        """Submit now; the future gets the converted answer. It also gets what `submit` raises.

        Raises:
            BackendError: the service was stopped.
        """

        async def answer() -> T:
            return convert(await settled(submitted))

        self.check_open()
        try:
            submitted = submit()
        except Exception as error:  # any error of the SDK is for those who wait
            failed: Future[T] = Future()
            failed.set_exception(failure(error))
            return APIFuture(failed)
        return APIFuture(self.start(answer()))

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on this thread; its error becomes one line."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # whoever awaits it cannot cancel it: setting it would raise then
        with self._lock:
            self._pending.add(future)

        async def run() -> None:
            try:
                result = await work
            except BaseException as error:  # cancellation too, so that no caller waits for ever
                self._settle(future, error=failure(error))
            else:
                self._settle(future, result)

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future

    def stop(self, reason: str) -> None:
        """Fail what is pending; `reason` is the error of that and of all later calls. Idempotent."""
        if self._stopped is not None:
            return
        self._stopped = reason
        self._fail_pending(reason)
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _settle(self, future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if future not in self._pending:
                return
            self._pending.remove(future)
        # Outside the lock: what waits for this future may submit more.
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _fail_pending(self, reason: str) -> None:
        with self._lock:
            pending = [*self._pending]
        for future in pending:
            self._settle(future, error=BackendError(reason))

    async def _watch(self, answers: Callable[[], Awaitable[bool]]) -> None:
        heard, warned = time.monotonic(), False
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if not self._pending or await answers():
                heard, warned = time.monotonic(), False
                continue
            silent_s = time.monotonic() - heard
            if silent_s >= self._patience_s:
                self._fail_pending(
                    f"{self._where} has not answered for {silent_s:.0f} s; "
                    "start it again, then repeat the command with resume=auto"
                )
            elif not warned:
                logger.warning("%s does not answer; what is pending fails after %g s", self._where, self._patience_s)
                warned = True


async def settled(value: Any) -> Any:
    """The result of an SDK's call, which returns a future of some kind or the result itself."""
    if inspect.isawaitable(value):
        return await value
    return await asyncio.wrap_future(value) if isinstance(value, Future) else value


def failure(error: BaseException) -> CookbookError:
    """An SDK's error as one line: the server's own message, if there is one."""
    if isinstance(error, CookbookError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return BackendError("the operation was cancelled: its service was stopped")
    said = _said(error)
    text = (
        " ".join(said.split())[:_MESSAGE_CHARS]
        if said
        else f"{type(error).__name__}: {' '.join(str(error).split())[:_MESSAGE_CHARS]}"
    )
    converted = BackendError(text)
    converted.__cause__ = error
    return converted


def _said(error: BaseException | None) -> str | None:
    """The server's own message: the `detail` of a status error's body, or what is in a failed operation's text."""
    while error is not None:
        body = vars(error).get("body")
        if isinstance(body, dict) and isinstance(body.get("detail"), str):
            return body["detail"]
        if (found := _RESULT_ERROR.match(str(error))) and error.__cause__ is None:
            return found[1]
        error = error.__cause__
    return None


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
