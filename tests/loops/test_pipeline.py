"""Pipelines: every stage starts from the weights of the one before, and finished stages are not repeated."""

import shutil
from pathlib import Path

import pytest

from cookbook.backends.fake import FakeService
from cookbook.cli import pipeline
from cookbook.cli.pipeline import PipelineConfig, StageConfig
from cookbook.core.errors import ConfigError
from cookbook.loops.config import ModelConfig, RunConfig
from cookbook.tracking import NoLogger
from tests.loops.harness import Killed, assert_same_run, metric_lines, summary

SMALL = {"eval": {"examples": 4}, "checkpoint": {"every": 1}}
STAGES = {
    "sft": StageConfig("chat_sft", {"dataset": "worked_problems"}, {"loop": {"steps": 3, "batch_size": 4}, **SMALL}),
    "dpo": StageConfig("preference_dpo", {}, {"loop": {"steps": 2, "batch_size": 4}, **SMALL}),
    "grpo": StageConfig(
        "gsm8k_grpo", {}, {"loop": {"steps": 2, "groups_per_batch": 2, "group_size": 2, "max_tokens": 8}, **SMALL}
    ),
}


class RecordingService(FakeService):
    """Remembers from which saves sessions were made, and dies at a chosen optimizer step."""

    def __init__(self, state_dir, steps_to_live=10**6):
        super().__init__(state_dir)
        self.started_from: list[str] = []
        self.steps_to_live = steps_to_live

    def create_training_client_from_state(self, path, with_optimizer=False):
        self.started_from.append(Path(path).name)
        return self._mortal(super().create_training_client_from_state(path, with_optimizer))

    def create_lora_training_client(self, *args, **kwargs):
        return self._mortal(super().create_lora_training_client(*args, **kwargs))

    def _mortal(self, client):
        optim_step, load_state = client.optim_step, client.load_state

        def loaded(path):
            self.started_from.append(Path(path).name)
            return load_state(path)

        def counted(params):
            self.steps_to_live -= 1
            if self.steps_to_live < 0:
                raise Killed
            return optim_step(params)

        client.optim_step, client.load_state = counted, loaded
        return client


def configured(run_dir: Path, stages=STAGES) -> RunConfig:
    return RunConfig(
        recipe="test",
        run_dir=str(run_dir),
        model=ModelConfig(name="fake"),
        loop=PipelineConfig(stages=stages),
        backend={"_target_": "cookbook.backends.fake.FakeService"},
        logger={"_target_": "cookbook.tracking.NoLogger"},
    )


def run(run_dir: Path, steps_to_live=10**6, stages=STAGES) -> RecordingService:
    run_dir.mkdir(exist_ok=True)
    service = RecordingService(f"{run_dir}/checkpoints", steps_to_live)
    pipeline.run(configured(run_dir, stages), pipeline.Components(service, NoLogger()))
    return service


def test_each_stage_starts_from_the_last_one_and_one_report_covers_all(tmp_path):
    service = run(tmp_path / "run")
    # DPO reads its start twice: to train it and as its reference.
    assert service.started_from == ["1-sft-step-000003-policy", "1-sft-step-000003-policy", "2-dpo-step-000002-policy"]
    whole = summary(tmp_path / "run")
    assert whole["status"] == "completed" and whole["steps"] == 7
    assert list(whole["stages"]) == ["sft", "dpo", "grpo"]
    assert whole["eval"]["after"] == summary(tmp_path / "run" / "3-grpo")["eval"]["after"]
    assert whole["tokens"]["trained"] == sum(
        summary(tmp_path / "run" / name)["tokens"]["trained"] for name in ("1-sft", "2-dpo", "3-grpo")
    )
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert {line["stage"] for line in lines} == {"1-sft", "2-dpo", "3-grpo"}
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("steps_to_live", [1, 4])
def test_killed_in_any_stage_and_resumed_equals_uninterrupted(tmp_path, steps_to_live):
    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", steps_to_live)
    resumed = run(tmp_path / "killed")
    for stage in ("1-sft", "2-dpo", "3-grpo"):
        assert_same_run(tmp_path / "killed" / stage, tmp_path / "whole" / stage)
    if steps_to_live == 4:  # the first stage had finished: nothing of it is made again
        assert "1-sft-step-000003-policy" in resumed.started_from


def test_a_finished_pipeline_trains_nothing_again(tmp_path):
    run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    service = run(tmp_path / "run", steps_to_live=0)
    assert service.steps_to_live == 0
    assert summary(tmp_path / "run")["status"] == "completed"
    shutil.rmtree(tmp_path / "run")


def test_a_wrong_setting_of_a_stage_is_one_clear_line(tmp_path):
    stages = {"sft": StageConfig("chat_sft", {}, {"loop": {"stepz": 3}})}
    with pytest.raises(ConfigError, match=r"did you mean loop\.steps"):
        run(tmp_path / "run", stages=stages)
