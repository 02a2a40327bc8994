"""One run: its folder, its first lines, the loop. What Hydra calls for each configuration, and what programs call."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cookbook.cli import folders, run_dir, sweep
from cookbook.cli.build import build
from cookbook.cli.compose import to_run_config
from cookbook.cli.options import chosen, size_name, sizes
from cookbook.cli.report import one_line
from cookbook.cli.sweep import Outcome
from cookbook.core import interrupts, notices
from cookbook.core.errors import CookbookError
from cookbook.loops.config import RunConfig
from cookbook.tracking.console import OutputClosed, discard_stdout
from cookbook.tracking.records import writing


class JobFailed(CookbookError):
    """A job failed. The message is all there is, so that it passes from any process to any other."""


@dataclass(frozen=True)
class Job:
    """What Hydra calls for each configuration, perhaps in another process: `run_job` where the command was given.

    Attributes:
        working_directory: that of the command. A process that is used again may be in another one.
        config_dirs: the user's own folders.
    """

    working_directory: Path
    config_dirs: tuple[Path, ...]

    def __call__(self, config: DictConfig) -> float | None:
        os.chdir(self.working_directory)
        folders.use(self.config_dirs)
        return run_job(config)


def run_job(config: DictConfig) -> float | None:
    """Run a configuration that Hydra has composed. Returns the headline metric, which a sweeper may optimize.

    Raises:
        JobFailed: whatever went wrong. In a sweep the other jobs still run, and the outcome is in the job's folder.
    """
    info = HydraConfig.get()
    overrides: list[str] = OmegaConf.to_container(info.overrides.task, resolve=False)  # pyright: ignore[reportAssignmentType]
    in_sweep = info.mode == RunMode.MULTIRUN
    settings = sweep.job_settings(overrides)
    folder = None
    try:
        if in_sweep:
            print(f"job {info.job.num + 1}: {' '.join(settings)}", flush=True)
        with interrupts.handled(), _folder(config, overrides, in_sweep) as folder:
            config.run_dir = str(folder)
            run = to_run_config(config, info.runtime.choices)
            skipped = run_dir.is_finished(run)
            metric = execute(run)
            if in_sweep:
                before = sweep.read_outcome(folder) if skipped else None
                outcome = before or Outcome(settings, str(folder), "completed", metric)
                outcome.write(folder)
                replace(outcome, status="skipped" if skipped else "completed").write(Path(info.runtime.output_dir))
                return outcome.metric
            return metric
    except KeyboardInterrupt as error:
        alone = folder is not None and not in_sweep
        again = f"repeat the command with run_dir={folder} resume=auto" if alone else "repeat the command"
        raise interrupts.as_interrupted(error, f"; to continue, {again}") from None
    except Exception as error:
        if config.get("debug") is True or info.verbose is True:
            traceback.print_exception(error)
        message = one_line(error)
        if in_sweep:
            print(f"job {info.job.num + 1} failed: {message}", flush=True)
            outcome = Outcome(settings, str(folder) if folder else None, "failed", error=message)
            for place in (folder, Path(info.runtime.output_dir)):
                if place is not None:
                    outcome.write(place)
        raise JobFailed(message) from error


def execute(config: RunConfig) -> float | None:
    """Train, unless the run in `config.run_dir` has completed: then nothing is left to do. Returns the headline metric.

    Raises:
        CookbookError: what `build` or the loop raises.
    """
    if run_dir.is_finished(config):
        print(f"{config.run_dir}: this run has completed; nothing to do")
        return None
    with interrupts.handled(), notices.collected() as said:
        loop, components = build(config)
        try:
            run_dir.claim(config)
            _announce(config, said)
            return loop(config, components)
        finally:
            components.service.stop()


@contextmanager
def _folder(config: DictConfig, overrides: Sequence[str], in_sweep: bool) -> Iterator[Path]:
    """The folder of a job, held while it runs."""
    given = chosen(overrides, "run_dir") is not None
    place, resume = Path(config.run_dir), config.resume
    if in_sweep:
        # Where run_dir is not given, the folder of the recipe tells recipes apart.
        settings = [entry for entry in sweep.job_settings(overrides) if given or not entry.startswith("recipe=")]
        place = (place if given else place.parent / "sweep") / sweep.job_name(settings)
        given, resume = True, chosen(overrides, "resume") or "auto"
    chosen_place = run_dir.choose(place, given, resume)
    with run_dir.held(chosen_place.absolute(), new=not given and chosen_place == place) as folder:
        yield folder


def _announce(config: RunConfig, said: Sequence[str]) -> None:
    """The first lines of a run, on the console and in its log."""
    choices = config.choices
    others = [recipe for recipe in sizes(config.recipe) if recipe != config.recipe]
    size = f"recipe {config.recipe} at {size_name(config.recipe)} size"
    lines = [
        f"{size} (others: {', '.join(others)})" if others else size,
        f"backend {choices['backend']}, model {config.model.base_model}, "
        f"dataset {choices.get('dataset', 'of each stage')}, seed {config.seed}",
        *said,
        f"writing in {config.run_dir}",
    ]
    file = Path(config.run_dir, "console.log")
    with writing(file), file.open("a", encoding="utf-8") as log:
        log.writelines(f"{line}\n" for line in lines)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        discard_stdout()
        raise OutputClosed from None
