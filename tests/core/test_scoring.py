import asyncio
import functools
import json
import threading

import numpy as np
import pytest

from cookbook.core import scoring
from cookbook.core.callables import callable_name
from cookbook.core.errors import ConfigError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.core.scoring import RewardTimeout, TimeLimited, as_result
from rewards.math import GSM8K

COMPLETION = Completion("#### 5", "eos", 3)
EXAMPLE = Example("x/7", (), "5")


def score(*args, **kwargs) -> RewardResult:
    return asyncio.run(scoring.score(*args, **kwargs))


class Scripted:
    """Returns or raises one thing after the other."""

    def __init__(self, *outcomes) -> None:
        self.outcomes = list(outcomes)

    def __call__(self, completion: Completion, example: Example):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.mark.parametrize(
    ("raw", "result"),
    [
        (1.0, RewardResult(1.0, "correct")),
        (True, RewardResult(1.0, "correct")),
        (0, RewardResult(0.0, "wrong")),
        (0.25, RewardResult(0.25, "partial")),
        (-1, RewardResult(-1.0, "partial")),
        (np.float32(0.5), RewardResult(0.5, "partial")),
        (np.bool_(True), RewardResult(1.0, "correct")),
        (RewardResult(0.3, "malformed", {"a": 1.0}), RewardResult(0.3, "malformed", {"a": 1.0})),
    ],
)
def test_what_a_reward_may_return(raw, result: RewardResult):
    assert as_result(raw, "r") == result


def test_the_value_is_a_plain_float():
    for raw in (np.float32(0.5), RewardResult(np.float32(0.5), "partial")):  # pyright: ignore[reportArgumentType]
        assert json.dumps(as_result(raw, "r").value) == "0.5"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, r"reward mine returned None \(NoneType\)"),
        ("1.0", "reward mine returned '1.0'"),
        ([1.0], "reward mine returned"),
        (float("nan"), "reward mine returned the value nan"),
        (float("inf"), "reward mine returned the value inf"),
        (RewardResult(float("nan"), "wrong"), "reward mine returned the value nan"),
        (RewardResult(0.0, "fine"), "the status 'fine'; it must be one of correct, partial"),  # pyright: ignore[reportArgumentType]
        (RewardResult(0.0, "wrong", {"words": "two"}), "the metric words='two'; it must be a number"),  # pyright: ignore[reportArgumentType]
        (RewardResult(0.0, "wrong", [1.0]), "metrics of type list; they must be a dict"),  # pyright: ignore[reportArgumentType]
        (RewardResult(0.0, "wrong", {}, "why"), "details of type str; they must be a dict"),  # pyright: ignore[reportArgumentType]
        (RewardResult(0.0, "wrong", {}, {"a": float("nan")}), "details that are not JSON values"),
        (RewardResult(0.0, "wrong", {}, {"a": {1, 2}}), "details that are not JSON values: Object of type set"),
    ],
)
def test_what_it_may_not_is_the_error_of_this_sample(raw, message: str):
    with pytest.raises(RewardError, match=message):
        as_result(raw, "mine")
    assert score(Scripted(raw, 1.0), COMPLETION, EXAMPLE, retries=1, backoff_s=0) == RewardResult(1.0, "correct")
    result = score(Scripted(raw, raw), COMPLETION, EXAMPLE, retries=1, backoff_s=0)
    assert (result.value, result.status) == (0.0, "error")
    assert "Scripted returned" in result.details["error"]


@pytest.mark.parametrize("fault", [RewardError("sandbox down"), RewardResult(0.0, "error", {"tries": 1.0})])
def test_a_grader_that_recovers_leaves_no_trace(fault):
    assert score(Scripted(fault, fault, 1.0), COMPLETION, EXAMPLE, retries=2, backoff_s=0) == RewardResult(
        1.0, "correct"
    )


def test_a_grader_that_stays_down_gives_an_error_without_a_value(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    reward = Scripted(RewardError("one"), RewardError("sandbox\ndown"), 1.0)
    result = score(reward, COMPLETION, EXAMPLE, retries=1, backoff_s=0)
    assert result == RewardResult(0.0, "error", {}, {"error": "sandbox down"})
    assert reward.outcomes == [1.0]
    assert "failed on x/7, tried 2 times: sandbox down" in caplog.text

    result = score(Scripted(RewardResult(0.9, "error", {"tries": 1.0}, {"host": "a"})), COMPLETION, EXAMPLE, retries=0)
    assert (result.value, result.status, result.metrics) == (0.0, "error", {"tries": 1.0})
    assert result.details["host"] == "a" and 'Scripted returned status "error" on x/7' in result.details["error"]


def test_an_async_reward_is_awaited_on_the_event_loop_and_a_plain_one_runs_beside_it():
    class Judge:
        async def __call__(self, completion: Completion, example: Example) -> float:
            await asyncio.sleep(0)
            return float(threading.current_thread() is threading.main_thread())

    async def judge(completion: Completion, example: Example, value: float) -> float:
        return value

    def plain(completion: Completion, example: Example) -> float:
        return float(threading.current_thread() is threading.main_thread())

    assert score(Judge(), COMPLETION, EXAMPLE) == RewardResult(1.0, "correct")
    assert score(functools.partial(judge, value=0.5), COMPLETION, EXAMPLE) == RewardResult(0.5, "partial")
    assert score(plain, COMPLETION, EXAMPLE) == RewardResult(0.0, "wrong")


def test_the_wait_between_tries_doubles(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("cookbook.core.scoring.asyncio.sleep", sleep)
    score(Scripted(*[RewardError("down")] * 4), COMPLETION, EXAMPLE, retries=3, backoff_s=0.5)
    assert waits == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [(KeyError("missing\nkey"), "KeyError: "), (SystemExit(3), "SystemExit: 3"), (StopIteration(), "StopIteration")],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_is_the_error_of_this_sample_with_the_place_in_one_line(fault, said: str, asynchronous: bool):
    calls = []

    def broken(completion: Completion, example: Example) -> float:
        calls.append(example)
        raise fault

    async def broken_judge(completion: Completion, example: Example) -> float:
        return broken(completion, example)

    reward = broken_judge if asynchronous else broken
    result = score(reward, COMPLETION, EXAMPLE, retries=3, backoff_s=0)
    reason = result.details["error"]
    assert (result.value, result.status, len(calls)) == (0.0, "error", 4)
    assert f"{reward.__name__} raised" in reason and said in reason and " on x/7, at " in reason and "\n" not in reason
    if not isinstance(fault, StopIteration):  # which a coroutine replaces by a RuntimeError
        assert reason.endswith(f"test_scoring.py:{broken.__code__.co_firstlineno + 2}")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_something_cancelled_within_a_reward_is_its_error_and_does_not_cancel_the_sample(asynchronous: bool):
    def plain(completion: Completion, example: Example) -> float:
        raise asyncio.CancelledError

    async def judge(completion: Completion, example: Example) -> float:
        raise asyncio.CancelledError

    result = score(judge if asynchronous else plain, COMPLETION, EXAMPLE, retries=0)
    assert result.status == "error" and "cancelled" in result.details["error"].lower()


def test_an_example_that_no_grader_can_judge_is_an_error_at_once_and_marked():
    result = score(GSM8K(), COMPLETION, Example("x/7", (), "many"), retries=3, backoff_s=0)
    assert (result.status, result.details["unjudgeable"]) == ("error", True)
    assert "'many' of x/7 is not a number" in result.details["error"]


def test_a_fault_of_the_configuration_passes_as_it_is():
    with pytest.raises(ConfigError, match="no such judge"):
        score(Scripted(ConfigError("no such judge")), COMPLETION, EXAMPLE, retries=3, backoff_s=0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_past_its_time_limit_is_an_error_and_holds_up_nothing(asynchronous: bool):
    """The reward of this test never ends by itself: what waited for its thread would wait forever."""
    never, calls = threading.Event(), []

    def hangs(completion: Completion, example: Example) -> float:
        calls.append(example)
        never.wait()
        return 1.0

    async def hangs_politely(completion: Completion, example: Example) -> float:
        calls.append(example)
        await asyncio.Event().wait()
        return 1.0

    reward = TimeLimited(hangs_politely if asynchronous else hangs, 0.05)
    result = score(reward, COMPLETION, EXAMPLE, retries=2, backoff_s=0)
    assert (result.status, len(calls)) == ("error", 1)
    assert "hangs" in result.details["error"] and "longer than loop.reward_timeout_s=0.05 on x/7" in str(result.details)

    async def many() -> list[RewardResult]:
        limited = [scoring.score(reward, COMPLETION, EXAMPLE, retries=0) for _ in range(2 * scoring.MAX_THREADS)]
        return await asyncio.gather(*limited, scoring.score(lambda *_: 1.0, COMPLETION, EXAMPLE))

    *hung, fine = asyncio.run(many())  # those that hang do not keep their places
    assert {each.status for each in hung} == {"error"} and fine == RewardResult(1.0, "correct")
    never.set()


def test_a_time_limit_is_not_a_timeout_of_the_rewards_own_and_gives_way_to_an_answer():
    def slow_judge(completion: Completion, example: Example) -> float:
        raise TimeoutError("the judge did not answer")

    result = score(TimeLimited(slow_judge, 60), COMPLETION, EXAMPLE, retries=0)
    assert "slow_judge raised TimeoutError: the judge did not answer" in result.details["error"]
    assert score(TimeLimited(GSM8K(), 60), COMPLETION, EXAMPLE) == RewardResult(1.0, "correct")
    assert TimeLimited(GSM8K(), 60)(COMPLETION, EXAMPLE).value == 1.0
    assert issubclass(RewardTimeout, RewardError)


def test_a_function_that_returns_a_coroutine_is_awaited():
    async def judge() -> float:
        return 0.5

    assert score(lambda completion, example: judge(), COMPLETION, EXAMPLE) == RewardResult(0.5, "partial")


def test_names():
    assert callable_name(GSM8K()) == "rewards.math.GSM8K"
    assert callable_name(functools.partial(GSM8K())) == "rewards.math.GSM8K"
    assert callable_name(test_names).endswith("test_scoring.test_names")  # pyright: ignore[reportArgumentType]
