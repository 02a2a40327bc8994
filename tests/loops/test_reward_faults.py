"""What a run does when a reward fails: on one sample, on all of them, or by never coming back."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cookbook.core.errors import ConfigError, DataError, RewardError
from cookbook.loops.algorithms import grpo
from tests.loops.harness import metric_lines
from tests.loops.test_grpo import components, configured, run, share_of_vowels

FAST = {"steps": 2, "reward_retries": 0}


def faulty(fault):
    """A reward that is all right but for every ninth completion, where `fault` says what happens."""
    calls = 0

    def reward(completion, example):
        nonlocal calls
        calls += 1
        return fault() if calls % 9 == 0 else share_of_vowels(completion, example)

    return reward


def rollouts(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda: float("nan"), "returned the value nan; it must be a finite number"),
        (lambda: None, "returned None (NoneType)"),
        (lambda: {}["answer"], "raised KeyError: 'answer' on "),
        (lambda: sys.exit("no license"), "raised SystemExit: no license on "),
    ],
    ids=["nan", "none", "exception", "exit"],
)
def test_a_fault_on_one_sample_is_its_error_and_the_run_goes_on(tmp_path, fault, reason):
    run_dir = run(configured(tmp_path / "run", **FAST), reward=faulty(fault))
    errors = [line["reward/error"] for line in metric_lines(run_dir) if "reward/error" in line]
    assert errors and all(0 < share < 0.2 for share in errors)
    failed = [record for record in rollouts(run_dir) if record["status"] == "error"]
    assert failed and all(reason in record["details"]["error"] and record["reward"] == 0 for record in failed)
    console = (run_dir / "console.log").read_text()
    lines = [line for line in console.splitlines() if "completions could not be graded; the first: " in line]
    assert lines and reason in lines[0] and len(lines) <= 4  # one a step and evaluation, however many failed


@pytest.mark.parametrize("fault", ["exception", "exit"])
def test_a_reward_that_always_fails_ends_the_run_with_one_line_that_names_the_place(tmp_path, fault):
    def broken(completion, example):
        if fault == "exit":
            sys.exit(2)
        return completion.txt

    config = configured(tmp_path / "run", **FAST)
    with pytest.raises(RewardError) as caught:
        run(config, reward=broken)
    message, line = str(caught.value), broken.__code__.co_firstlineno + (2 if fault == "exit" else 3)
    assert "\n" not in message and "step 0: 100% of the completions could not be graded" in message
    assert "broken raised " + ("SystemExit: 2" if fault == "exit" else "AttributeError: ") in message
    assert f"test_reward_faults.py:{line}" in message
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 0


def test_an_example_that_cannot_be_judged_is_left_out_and_does_not_end_the_run(tmp_path):
    bad: set[str] = set()

    def judge(completion, example):
        bad.update([example.id] if not bad else [])
        if example.id in bad:
            raise DataError(f"the gold answer {example.answer!r} of {example.id} is not a number")
        return share_of_vowels(completion, example)

    config = configured(tmp_path / "run", max_reward_error_rate=0.0, **FAST)
    config.eval.examples = 0
    run_dir = run(config, reward=judge)
    assert metric_lines(run_dir)[0]["reward/error"] == 0.25
    failed = [record for record in rollouts(run_dir) if record["status"] == "error"]
    assert {record["example"] for record in failed} == bad and "is not a number" in failed[0]["details"]["error"]


def test_a_step_without_any_graded_completion_can_be_allowed(tmp_path):
    def broken(completion, example):
        raise ValueError("never")

    run_dir = run(configured(tmp_path / "run", max_reward_error_rate=1.0, **FAST), reward=broken)
    lines = [line for line in metric_lines(run_dir) if "groups/total" in line]
    assert [line["reward/error"] for line in lines] == [1.0, 1.0]
    assert all("reward/mean" not in line and line["groups/without_signal"] == 4 for line in lines)


def test_a_reward_that_hangs_is_an_error_after_the_limit_and_the_run_goes_on(tmp_path):
    never = threading.Event()
    config = configured(tmp_path / "run", reward_timeout_s=0.1, **(FAST | {"reward_retries": 3}))
    config.eval.examples = 0
    run_dir = run(config, reward=faulty(lambda: never.wait() and 1.0))
    failed = [record for record in rollouts(run_dir) if record["status"] == "error"]
    assert failed and all("longer than loop.reward_timeout_s=0.1" in each["details"]["error"] for each in failed)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "completed"
    never.set()


def test_the_limit_is_checked(tmp_path):
    config = configured(tmp_path / "run", reward_timeout_s=-1)
    with pytest.raises(ConfigError, match=r"loop\.reward_timeout_s=-1: must be at least 0"):
        config.check(components(config).service.capabilities)


class Problem:
    """The shortest dataset: two splits and nothing else."""

    def __init__(self, items):
        self.train = self.test = items


def test_a_dataset_of_two_attributes_and_a_reward_function_are_enough(tmp_path):
    config = configured(tmp_path / "run", **FAST)
    built = components(config)
    items = [built.dataset.train[index] for index in range(6)]
    grpo.run(config, replace(built, dataset=Problem(items)))
    assert len(metric_lines(tmp_path / "run")) > 2
