"""A run whose server dies ends with one line, keeps its checkpoint, and continues at another server."""

import json
from pathlib import Path

from tests.cli.endings import LITTLE, start, wait_for
from tests.serve.live_server import server_process


def test_a_server_that_is_killed_ends_the_run_with_one_line(tmp_path: Path):
    run_dir = tmp_path / "run"
    arguments = ["recipe=gsm8k_grpo", *LITTLE, "loop.steps=1000", "eval.every=0", f"run_dir={run_dir}"]
    with server_process(tmp_path / "state", "--device", "cpu") as (url, server):
        run = start(tmp_path, *arguments, "backend=tinker", f"backend.base_url={url}", "backend.patience_s=2")
        wait_for(run_dir / "checkpoints.jsonl", run)
        server.kill()
        _, errors = run.communicate()
    assert run.returncode == 1
    [line] = errors.splitlines()
    assert line.startswith("error: ") and url in line and "resume" in line and "CANCELLED" not in line, line
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    saved = json.loads((run_dir / "checkpoints.jsonl").read_text().splitlines()[-1])["next_step"]
    with server_process(tmp_path / "state", "--device", "cpu") as (url, _):
        again = start(tmp_path, f"resume={run_dir}", f"backend.base_url={url}", f"loop.steps={saved + 1}")
        _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == saved + 1
