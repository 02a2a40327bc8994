import asyncio
import functools
import json
import threading

import numpy as np
import pytest

from cookbook.core import scoring
from cookbook.core.callables import callable_name
from cookbook.core.errors import DataError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.core.scoring import BrokenReward, as_result
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
    ],
)
def test_what_it_may_not(raw, message: str):
    with pytest.raises(BrokenReward, match=message):
        as_result(raw, "mine")
    with pytest.raises(BrokenReward):
        score(Scripted(raw, 1.0), COMPLETION, EXAMPLE, retries=1, backoff_s=0)


@pytest.mark.parametrize("fault", [RewardError("sandbox down"), RewardResult(0.0, "error", {"tries": 1.0})])
def test_a_grader_that_recovers_leaves_no_trace(fault):
    assert score(Scripted(fault, fault, 1.0), COMPLETION, EXAMPLE, retries=2, backoff_s=0) == RewardResult(
        1.0, "correct"
    )


def test_a_grader_that_stays_down_gives_an_error_without_a_value(caplog: pytest.LogCaptureFixture):
    reward = Scripted(RewardError("one"), RewardError("sandbox\ndown"), 1.0)
    assert score(reward, COMPLETION, EXAMPLE, retries=1, backoff_s=0) == RewardResult(0.0, "error")
    assert reward.outcomes == [1.0]
    assert "failed on x/7, tried 2 times: sandbox down" in caplog.text

    result = RewardResult(0.9, "error", {"tries": 1.0})
    assert score(Scripted(result), COMPLETION, EXAMPLE, retries=0) == RewardResult(0.0, "error", {"tries": 1.0})


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


def test_a_reward_that_raises_is_one_line_with_the_place_and_is_not_retried():
    def broken(completion: Completion, example: Example) -> float:
        return {}["missing\nkey"]

    with pytest.raises(BrokenReward) as caught:
        score(broken, COMPLETION, EXAMPLE, retries=3, backoff_s=0)
    line = broken.__code__.co_firstlineno + 1
    message = str(caught.value)
    assert "broken raised KeyError" in message and "on x/7" in message and message.endswith(f"test_scoring.py:{line}")
    assert "\n" not in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_fault_of_the_dataset_passes_as_it_is():
    with pytest.raises(DataError, match="'many' of x/7 is not a number"):
        score(GSM8K(), COMPLETION, Example("x/7", (), "many"), retries=3, backoff_s=0)


def test_names():
    assert callable_name(GSM8K()) == "rewards.math.GSM8K"
    assert callable_name(functools.partial(GSM8K())) == "rewards.math.GSM8K"
    assert callable_name(test_names).endswith("test_scoring.test_names")  # pyright: ignore[reportArgumentType]
