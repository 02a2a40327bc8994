"""Calls a reward and turns what it returns or raises into a `RewardResult`. A fault is the error of one sample."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import json
import logging
import math
import os
import threading
import weakref
from collections.abc import Mapping
from numbers import Real
from typing import Any, get_args

import numpy as np

from cookbook.core.callables import callable_name, describe_exception, one_line
from cookbook.core.errors import CookbookError, DataError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, Reward, RewardResult, RewardStatus

logger = logging.getLogger(__name__)

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Plain rewards that run at the same time."""

_free_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class RewardTimeout(RewardError):
    """A reward took longer than its time limit. It is not tried again: what hangs once hangs again."""


@dataclasses.dataclass(frozen=True)
class TimeLimited:
    """A reward with a time limit in seconds, which `score` enforces: `loop.reward_timeout_s`."""

    reward: Reward
    timeout_s: float

    def __call__(self, completion: Completion, example: Example) -> Any:
        return self.reward(completion, example)


def as_result(raw: object, reward_name: str) -> RewardResult:
    """What a reward returned, as a RewardResult. A plain number means: 1 is correct, 0 is wrong, anything else partial.

    Raises:
        RewardError: `raw` is not a number, not finite, or a RewardResult with such a value, an unknown status, metrics
            that are not numbers, or details that are not JSON values.
    """
    owner = f"reward {reward_name} returned"
    result = raw
    if isinstance(raw, Real | np.bool_):
        value = float(raw)
        result = RewardResult(value, "correct" if value == 1 else "wrong" if value == 0 else "partial")
    if not isinstance(result, RewardResult):
        raise RewardError(f"{owner} {one_line(repr(raw))} ({type(raw).__name__}); return a float or a RewardResult")
    if not isinstance(result.value, Real | np.bool_) or not math.isfinite(result.value):
        raise RewardError(f"{owner} the value {one_line(repr(result.value))}; it must be a finite number")
    if result.status not in get_args(RewardStatus):
        statuses = ", ".join(get_args(RewardStatus))
        raise RewardError(f"{owner} the status {result.status!r}; it must be one of {statuses}")
    if not isinstance(result.metrics, Mapping):
        raise RewardError(f"{owner} metrics of type {type(result.metrics).__name__}; they must be a dict")
    for name, number in result.metrics.items():
        if not isinstance(number, Real | np.bool_):
            raise RewardError(f"{owner} the metric {name}={one_line(repr(number))}; it must be a number")
    if not isinstance(result.details, Mapping):
        raise RewardError(f"{owner} details of type {type(result.details).__name__}; they must be a dict")
    if result.details:
        try:
            json.dumps(dict(result.details), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(f"{owner} details that are not JSON values: {one_line(str(error))}") from error
    # A numpy scalar cannot be written to rollouts.jsonl.
    return result if type(result.value) is float else dataclasses.replace(result, value=float(result.value))


def is_async(reward: Reward) -> bool:
    """Whether calling the reward gives something to await."""
    function = reward.func if isinstance(reward, functools.partial) else reward
    if isinstance(function, TimeLimited):
        return is_async(function.reward)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(reward: Reward, completion: Completion, example: Example) -> object:
    """Call a reward: an async one is awaited, any other runs in a thread so that it does not block the event loop.

    Raises:
        RewardTimeout: the reward is `TimeLimited` and took longer. A thread cannot be stopped, so that of a plain
            reward is left behind; it keeps neither later rewards nor the end of the process waiting.
    """
    reward, timeout_s = (reward.reward, reward.timeout_s) if isinstance(reward, TimeLimited) else (reward, None)
    limit: asyncio.Timeout | None = None
    try:
        if is_async(reward):
            async with asyncio.timeout(timeout_s) as limit:
                return await reward(completion, example)  # pyright: ignore[reportGeneralTypeIssues]
        slots = _free_threads.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
        async with slots, asyncio.timeout(timeout_s) as limit:
            result = await _in_thread(reward, completion, example)
            return await result if inspect.isawaitable(result) else result
    except TimeoutError as error:
        if limit is None or not limit.expired():
            raise  # the reward's own
        raise RewardTimeout(
            f"reward {callable_name(reward)} took longer than loop.reward_timeout_s={timeout_s:g} on {example.id}"
        ) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("something that the reward waited for was cancelled") from error


async def _in_thread(reward: Reward, completion: Completion, example: Example) -> object:
    """Call a plain reward in a daemon thread of its own: those of the default executor keep a process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def settle(outcome: tuple[object, BaseException | None]) -> None:
        if not done.done():  # nobody waits any more: cancelled, or past the time limit
            done.set_result(outcome)

    def run() -> None:
        try:
            outcome = reward(completion, example), None
        except BaseException as error:  # raised below, where the reward was called
            outcome = None, error
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:  # the loop was closed in the meantime
            logger.debug("reward %s ended after its step", callable_name(reward))

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="reward", daemon=True).start()
    result, error = await done
    if isinstance(error, StopIteration | asyncio.CancelledError):  # have a meaning of their own in a coroutine
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if error is not None:
        raise error
    return result


async def score(
    reward: Reward, completion: Completion, example: Example, retries: int = 2, backoff_s: float = 0.5
) -> RewardResult:
    """Score one completion.

    What fails is called again up to `retries` times, after `backoff_s` seconds doubled each time: an exception, a
    result that `as_result` refuses, or one of status "error". If it still fails, the result has status "error", value 0
    and the reason in `details["error"]`. A reward past its time limit, and one that raises DataError (its example
    cannot be judged), fails at once.

    Raises:
        CookbookError: the reward raised one that is neither a RewardError nor a DataError, such as a ConfigError.
    """
    name = callable_name(reward.reward if isinstance(reward, TimeLimited) else reward)
    result, reason, attempts = RewardResult(0.0, "error"), "no attempt was allowed", 0
    for attempts in range(1, retries + 2):
        if attempts > 1:
            await asyncio.sleep(backoff_s * 2 ** (attempts - 2))
        try:
            result = as_result(await call(reward, completion, example), name)
        except RewardError as error:
            result, reason = RewardResult(0.0, "error"), one_line(str(error))
            if isinstance(error, RewardTimeout):
                break
        except DataError as error:
            result, reason = RewardResult(0.0, "error", details={"unjudgeable": True}), one_line(str(error))
            break
        except CookbookError:
            raise
        except (Exception, SystemExit) as error:
            result = RewardResult(0.0, "error")
            reason = f"reward {name} raised {describe_exception(error, during=f' on {example.id}')}"
        else:
            if result.status != "error":
                return result
            reason = str(result.details.get("error") or f'reward {name} returned status "error" on {example.id}')
    # Who gets the result says so, once for all samples: a reward that is broken fails on hundreds of them.
    logger.info("reward %s failed on %s, tried %d times: %s", name, example.id, attempts, reason)
    return RewardResult(0.0, "error", result.metrics, {**result.details, "error": reason})
