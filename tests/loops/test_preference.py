"""The preference loop on the fake backend."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cookbook.backends.fake import FakeService
from cookbook.backends.fake.clients import FAKE_CAPABILITIES
from cookbook.core.errors import ConfigError
from cookbook.core.types import AdamParams
from cookbook.data.generated.courtesy import Courtesy
from cookbook.data.preference.labelled import Unpaired
from cookbook.loops import preference
from cookbook.loops.config import CheckpointConfig, EvalConfig, ModelConfig, RunConfig
from cookbook.loops.preference import PreferenceConfig
from cookbook.losses.preference import DPO, IPO, KTO, ORPO, SimPO
from cookbook.tracking import NoLogger
from tests.loops.harness import Killed, assert_same_run, metric_lines, summary


def configured(run_dir: Path, **loop) -> RunConfig:
    settings = {"steps": 6, "batch_size": 8, "max_length": 512} | loop
    return RunConfig(
        recipe="test",
        run_dir=str(run_dir),
        model=ModelConfig(name="fake"),
        optim=AdamParams(learning_rate=0.05),
        loop=PreferenceConfig(**settings),
        eval=EvalConfig(every=3, examples=16),
        checkpoint=CheckpointConfig(every=2, keep=2),
        backend={"_target_": "cookbook.backends.fake.FakeService"},
        dataset={"_target_": "cookbook.data.generated.courtesy.Courtesy"},
        logger={},
    )


class CountingService(FakeService):
    """Counts samplers of the base model: the references."""

    references = 0

    def create_sampling_client(self, base_model=None, model_path=None):
        self.references += 1
        return super().create_sampling_client(base_model, model_path)


def run(config: RunConfig, loss, dataset=None, logger=None, service=None) -> Path:
    service = service or FakeService(state_dir=f"{config.run_dir}/checkpoints")
    preference.run(
        config,
        preference.Components(service, logger or NoLogger(), dataset or Courtesy(train_size=64, test_size=32), loss),
    )
    return Path(config.run_dir)


@pytest.mark.parametrize("loss", [DPO(), IPO(), SimPO(), ORPO()], ids=lambda loss: type(loss).__name__)
def test_held_out_pairs_come_apart(tmp_path, loss):
    service = CountingService()
    evaluations = summary(run(configured(tmp_path / "run", steps=12), loss, service=service))["eval"]
    assert evaluations["after"]["accuracy"] >= (
        0.9 if loss.needs_reference else evaluations["before"]["accuracy"] + 0.1
    )
    assert evaluations["after"]["margin"] > evaluations["before"]["margin"]
    assert service.references == (1 if loss.needs_reference else 0)
    if loss.needs_reference:
        assert evaluations["before"]["accuracy"] == 0.5 and evaluations["before"]["margin"] == 0


def margin_loss(data, logprobs, beta=0.1):
    """A plain function: the logistic loss of the margin between the two sides, relative to the reference."""
    arrays = [datum.loss_fn_inputs for datum in data]
    gains = [
        (lp - torch.as_tensor(array["ref_logprobs"])) * torch.as_tensor(array["weights"])
        for array, lp in zip(arrays, logprobs, strict=True)
    ]
    margins = torch.stack([c.sum() - r.sum() for c, r in zip(gains[::2], gains[1::2], strict=True)])
    return -torch.nn.functional.logsigmoid(margins / beta).mean(), {"accuracy": float((margins > 0).float().mean())}


def test_a_plain_function_is_a_loss_too(tmp_path):
    run_dir = run(configured(tmp_path / "run", steps=12), margin_loss)
    assert summary(run_dir)["eval"]["after"]["accuracy"] >= 0.9
    assert {"loss", "accuracy/train"} <= {key for line in metric_lines(run_dir) for key in line}


@pytest.mark.parametrize("baseline", ["mismatched", "zero"])
def test_kto_tells_desirable_from_undesirable(tmp_path, baseline):
    data = Unpaired(Courtesy(train_size=64, test_size=32))
    evaluations = summary(run(configured(tmp_path / "run", steps=16, batch_size=16), KTO(baseline=baseline), data))[
        "eval"
    ]
    assert evaluations["after"]["reward_desirable"] > evaluations["after"]["reward_undesirable"]
    assert evaluations["after"]["accuracy"] > evaluations["before"]["accuracy"]


@pytest.mark.parametrize("killed_at", [1, 3])
def test_killed_and_resumed_equals_uninterrupted_over_several_epochs(tmp_path, killed_at):
    class Lethal(NoLogger):
        def log(self, step, metrics):
            if step == killed_at:
                raise Killed

    def data():
        return Courtesy(train_size=16, test_size=8)

    whole = run(configured(tmp_path / "whole"), DPO(), data())
    with pytest.raises(Killed):
        run(configured(tmp_path / "killed"), DPO(), data(), logger=Lethal())
    assert_same_run(run(configured(tmp_path / "killed"), DPO(), data()), whole)


def test_reference_logprobs_are_computed_once_per_sequence(tmp_path):
    run_dir = run(configured(tmp_path / "run", steps=8), DPO(), Courtesy(train_size=16, test_size=8))
    lines = (run_dir / "reference_logprobs.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (16 + 8)  # four epochs over 16 pairs, and 8 held-out ones


def test_a_run_that_starts_from_weights_takes_them_as_its_reference(tmp_path):
    from cookbook.tracking.checkpoints import CheckpointLog

    first = run(configured(tmp_path / "first"), DPO())
    checkpoint = CheckpointLog(first).latest()
    assert checkpoint is not None
    config = configured(tmp_path / "second")
    config.start_from = checkpoint.states["policy"]
    second = run(config, DPO())
    assert summary(second)["eval"]["before"]["margin"] == pytest.approx(0, abs=1e-4)
    assert summary(second)["eval"]["before"]["loss"] == pytest.approx(0.6931472, abs=1e-4)


def test_a_backend_without_custom_losses_takes_two_passes_to_the_same_numbers(tmp_path):
    config = configured(tmp_path / "two", steps=3)
    lesser = FakeService(f"{config.run_dir}/checkpoints", replace(FAKE_CAPABILITIES, custom_loss=False))
    config.check(lesser.capabilities)
    two, one = (
        metric_lines(run(config, DPO(), service=lesser)),
        metric_lines(run(configured(tmp_path / "one", steps=3), DPO())),
    )
    for line, other in zip(two, one, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_rows_and_loss_of_different_kinds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds labelled completions"):
        run(configured(tmp_path / "a"), DPO(), Unpaired(Courtesy(train_size=16, test_size=8)))
    with pytest.raises(ConfigError, match="holds pairs"):
        run(configured(tmp_path / "b"), KTO())


def test_pairs_that_do_not_fit_are_left_out_whole(tmp_path):
    lines = metric_lines(run(configured(tmp_path / "run", max_length=330, steps=3), SimPO()))
    assert all(line["tokens/trained"] <= 16 * 330 for line in lines if "tokens/trained" in line)
