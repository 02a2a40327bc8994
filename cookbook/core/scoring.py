"""Calls a reward and turns what it returns or raises into a `RewardResult`, or into the error of a broken reward."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import math
from numbers import Real
from typing import get_args

from cookbook.core.callables import callable_name, describe_exception, one_line
from cookbook.core.errors import CookbookError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, Reward, RewardResult, RewardStatus

logger = logging.getLogger(__name__)


class BrokenReward(RewardError):
    """A reward function has a bug: it raised, or did not return a score. It is not retried; the run stops."""


def as_result(raw: object, reward_name: str) -> RewardResult:
    """What a reward returned, as a RewardResult. A plain number means: 1 is correct, 0 is wrong, anything else partial.

    Raises:
        BrokenReward: `raw` is not a number, not finite, or a RewardResult with such a value or an unknown status.
    """
    result = raw
    if isinstance(raw, Real):
        value = float(raw)
        result = RewardResult(value, "correct" if value == 1 else "wrong" if value == 0 else "partial")
    if not isinstance(result, RewardResult):
        raise BrokenReward(
            f"reward {reward_name} returned {one_line(repr(raw))} ({type(raw).__name__}); "
            "return a float or a RewardResult"
        )
    if not isinstance(result.value, Real) or not math.isfinite(result.value):
        raise BrokenReward(
            f"reward {reward_name} returned the value {one_line(repr(result.value))}; it must be a finite number"
        )
    if result.status not in get_args(RewardStatus):
        statuses = ", ".join(get_args(RewardStatus))
        raise BrokenReward(f"reward {reward_name} returned the status {result.status!r}; it must be one of {statuses}")
    # A numpy scalar cannot be written to rollouts.jsonl.
    return result if type(result.value) is float else dataclasses.replace(result, value=float(result.value))


def is_async(reward: Reward) -> bool:
    """Whether calling the reward gives something to await."""
    function = reward.func if isinstance(reward, functools.partial) else reward
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(reward: Reward, completion: Completion, example: Example) -> object:
    """Call a reward: an async one is awaited, any other runs in a thread so that it does not block the event loop."""
    if is_async(reward):
        return await reward(completion, example)  # pyright: ignore[reportGeneralTypeIssues]
    return await asyncio.to_thread(reward, completion, example)


async def score(
    reward: Reward, completion: Completion, example: Example, retries: int = 2, backoff_s: float = 0.5
) -> RewardResult:
    """Score one completion.

    A grader that fails (RewardError, or a result of status "error") is called again up to `retries` times, after
    `backoff_s` seconds doubled each time. If it still fails, the result has status "error" and value 0.

    Raises:
        BrokenReward: the reward raised anything else than a CookbookError, or did not return a score. Names the reward,
            the example, the exception and the line that raised it.
    """
    name = callable_name(reward)
    result, reason = RewardResult(0.0, "error"), "no attempt was allowed"
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(backoff_s * 2 ** (attempt - 1))
        try:
            result = as_result(await call(reward, completion, example), name)
        except BrokenReward:
            raise
        except RewardError as error:
            result, reason = RewardResult(0.0, "error"), one_line(str(error))
        except CookbookError:
            raise
        except Exception as error:
            raise BrokenReward(
                f"reward {name} raised {describe_exception(error, during=f' on {example.id}')}"
            ) from error
        else:
            if result.status != "error":
                return result
            reason = 'it returned status "error"'
    logger.warning("reward %s failed on %s, tried %d times: %s", name, example.id, retries + 1, reason)
    return RewardResult(0.0, "error", result.metrics, result.details)
