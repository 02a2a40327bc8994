"""The code recipe end to end: real model, real programs; and a sandbox server that fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from cookbook.sandbox.fusion import PROBE_RUNS
from tests.conftest import CommandLine
from tests.sandbox.fusion_stand_in import StandIn

SMALL = ("loop.steps=2", "loop.groups_per_batch=4", "loop.group_size=4", "eval.examples=4", "eval.every=0")


def rollouts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


def test_two_steps_with_programs_run_for_real(cli: CommandLine, tmp_path: Path):
    ran = cli("recipe=code_grpo", *SMALL, f"run_dir={tmp_path / 'run'}")
    assert ran.status == 0, ran.err
    assert "sandbox: " in ran.out
    records = rollouts(tmp_path / "run")
    assert {record["status"] for record in records} <= {"correct", "wrong", "malformed"}
    assert any(record["status"] == "correct" and record["details"]["tests"] == ["passed"] * 5 for record in records)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["time/reward_wait"] >= 0 for step in metrics if "reward/mean" in step)


@pytest.mark.parametrize("fault", ["500", "silent", "dropped", "sandbox_error"])
def test_a_sandbox_that_fails_stops_the_run_with_a_checkpoint_and_one_line(
    fault: Any, cli: CommandLine, tmp_path: Path
):
    with StandIn() as server:
        server.fail(*[None] * (PROBE_RUNS // 2), then=fault)  # half of the probe's programs are not told from others
        ran = cli(
            "recipe=code_grpo",
            *SMALL,
            "eval.examples=0",
            "loop.reward_retries=0",
            "reward.time_limit_s=0.1",
            "sandbox=sandbox_fusion",
            f"sandbox.base_url={server.url}",
            "sandbox.retries=1",
            "sandbox.backoff_s=0.01",
            "sandbox.request_timeout_margin_s=0.2",
            f"run_dir={tmp_path / 'run'}",
        )
        asked = len(server.requests)
    # The warnings of single rewards come before it.
    last = ran.err.splitlines()[-1]
    assert ran.status == 1 and "Traceback" not in ran.err
    assert "could not be graded" in last and "max_reward_error_rate" in last
    errors = [record for record in rollouts(tmp_path / "run") if record["status"] == "error"]
    assert errors and all(record["reward"] == 0 for record in errors)
    assert asked >= 2
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
