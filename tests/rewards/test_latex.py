import asyncio
import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cookbook.core.errors import ConfigError, DataError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.core.scoring import score
from rewards.latex import MathVerify
from rewards.latex_worker import last_box
from tests.watchdog import processor_time

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra `math`")

HANGS = r"\boxed{9^{9^{9^{9^9}}}}"


def judge(reward: MathVerify, text: str, gold: str) -> RewardResult:
    return reward(Completion(text, "eos", 1), Example("x/1", (), gold))


@pytest.fixture(scope="module")
def reward():
    reward = MathVerify(timeout_s=20, workers=1)
    yield reward
    reward.close()


@needs_math_verify
@pytest.mark.parametrize(
    ("text", "gold", "status"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "1/2", "correct"),
        (r"\boxed{0.5}", r"\frac12", "correct"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", "correct"),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", "correct"),
        (r"\boxed{\frac{1}{3}}", r"$\frac12$", "wrong"),
        (r"\boxed{1} or rather \boxed{2}", r"\boxed{2}", "correct"),
        (r"\boxed{2} or rather \boxed{1}", "2", "wrong"),
        (r"\boxed{1}\boxed{2}", "2", "correct"),
        (r"\boxed{5} and then 7", "5", "correct"),
        ("the answer is $5$", "5", "correct"),
        (r"\boxed{5", "5", "malformed"),
        (r"\boxed{}", "5", "malformed"),
        ("I do not know", "5", "malformed"),
        ("", "5", "malformed"),
        ("word " * 20_000 + r"\boxed{5}" + " word" * 20_000, "5", "correct"),
        ("a lone surrogate \ud800, a null \x00 and a line\u2028\nbreak: 5", "5", "correct"),
    ],
    ids=lambda value: ascii(value[:30]),
)
def test_judges_by_mathematical_equality(reward: MathVerify, text: str, gold: str, status: str):
    result = judge(reward, text, gold)
    assert (result.value, result.status) == (float(status == "correct"), status)


@needs_math_verify
def test_accepts_gold_and_rejects_perturbed(reward: MathVerify):
    answers = ["5", r"\frac{3}{4}", r"\sqrt{2}", "x^2", r"\pi", "(1, 2)"]
    reward.validate([Example(f"x/{i}", (), answer) for i, answer in enumerate(answers)])


@needs_math_verify
def test_a_gold_answer_that_is_no_expression_is_a_dataset_fault(reward: MathVerify):
    with pytest.raises(DataError, match="of x/1 cannot be judged"):
        judge(reward, r"\boxed{5}", "")
    assert judge(reward, r"\boxed{5}", "5").status == "correct"


@needs_math_verify
def test_a_hang_is_killed_from_any_thread_and_is_malformed_not_an_error():
    reward = MathVerify(timeout_s=5.0, workers=1)
    with ThreadPoolExecutor(2) as threads:
        hang = threads.submit(judge, reward, HANGS, "5")
        while not reward._idle.empty():
            time.sleep(0.01)
        # Waits for the only worker longer than timeout_s, which counts only its own time.
        waits = threads.submit(judge, reward, r"\boxed{5}", "5")
        assert hang.result() == RewardResult(0.0, "malformed", {"timeout": 1.0})
        assert waits.result().status == "correct"
    reward.close()


@needs_math_verify
def test_a_hanging_gold_answer_is_an_error():
    reward = MathVerify(timeout_s=1.0, workers=1)
    with pytest.raises(RewardError, match="the gold answer of x/1 took over 1 s"):
        judge(reward, "5", "+".join(["x"] * 60_000))
    reward.close()


@needs_math_verify
def test_a_worker_killed_in_the_middle_is_an_error_and_the_next_call_starts_another(monkeypatch: pytest.MonkeyPatch):
    reward = MathVerify(timeout_s=30, workers=1)
    judge(reward, "5", "5")
    (worker,) = reward._workers
    assert worker._process is not None
    receive, kill = worker.receive, worker._process.kill
    messages: list[dict] = []

    def receive_and_kill(timeout_s: float) -> dict:
        messages.append(receive(timeout_s))
        kill()  # the gold answer is read, the completion hangs
        return messages[-1]

    with monkeypatch.context() as patch:
        patch.setattr(worker, "receive", receive_and_kill)
        with pytest.raises(RewardError, match="the worker process died on a completion"):
            judge(reward, HANGS, "5")
    assert messages == [{"parsed": True}]
    assert judge(reward, "5", "5").status == "correct"

    # A worker that died between two calls is replaced without an error.
    process = reward._workers[0]._process
    assert process is not None
    process.kill()
    process.wait()
    assert judge(reward, "5", "5").status == "correct"
    process = reward._workers[0]._process
    reward.close()
    assert process is not None and process.poll() is not None


@needs_math_verify
def test_a_worker_that_cannot_start_is_an_error_without_a_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rewards.latex.sys.executable", "/bin/false")
    result = asyncio.run(
        score(MathVerify(), Completion("5", "eos", 1), Example("x/1", (), "5"), retries=1, backoff_s=0)
    )
    assert (result.value, result.status) == (0.0, "error")


def test_a_missing_package_is_found_at_construction(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rewards.latex.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the math-verify package: pip install -e '.\[math\]'"):
        MathVerify()


def test_last_box_takes_linear_time():
    assert last_box(r"\boxed{\frac{1}{2}} and \boxed{\{1\}}") == r"\{1\}"
    assert last_box("none") is None
    assert last_box(r"\boxed{1") == ""
    with processor_time():
        for text in (r"\boxed{" * 300_000, r"\boxed{" + "{" * 1_000_000, "\\" * 1_000_000):
            assert not last_box(text)
