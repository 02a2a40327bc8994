"""The folder of a run, and whether the run starts or continues there: `run_dir` and `resume`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cookbook.cli import saved
from cookbook.cli.environment import write_environment
from cookbook.core.errors import CheckpointError, ConfigError
from cookbook.core.suggest import did_you_mean
from cookbook.loops.config import RunConfig
from cookbook.loops.run import check_steps
from cookbook.tracking.checkpoints import CONFIG_FILE, CheckpointLog
from cookbook.tracking.lock import holder, locked
from cookbook.tracking.records import read_lines

MAY_CHANGE = (
    "run_dir",
    "resume",
    "debug",
    "choices",
    "backend.base_url",
    "backend.patience_s",
    "loop.steps",
    "loop.epochs",
    "eval.every",
    "checkpoint",
    "logger",
    "budget",
    "prices",
)
"""Keys, and sections, that may change when a run is resumed: none of them changes what a step computes. (The number of
steps does where the learning rate follows a schedule; there it may not change.)"""


def choose(run_dir: Path, given: bool, resume: str) -> Path:
    """The folder of this run.

    Args:
        run_dir: `run_dir` of the configuration; its parent holds the recipe's runs where it was not given.
        given: whether the user chose it.
        resume: "never": `run_dir`, which must not hold a run. "auto": `run_dir` where given, else the recipe's newest
            unfinished run that no process is working on, else `run_dir`. Anything else: the folder of a run.

    Raises:
        CheckpointError: there is a run where none may be, or none where one must be.
        ConfigError: `run_dir` and `resume` name different folders.
    """
    if resume == "never":
        if holds_run(run_dir):
            raise CheckpointError(
                f"run_dir={run_dir}: already holds a run; add resume=auto to continue it, or choose another run_dir"
            )
        return run_dir
    if resume == "auto":
        return run_dir if given else newest_unfinished(run_dir.parent) or run_dir
    folder = Path(resume)
    if not can_resume(folder):
        siblings = (
            [sibling.name for sibling in folder.absolute().parent.glob("*") if can_resume(sibling)]
            if "/" in resume
            else []
        )
        hint = did_you_mean(folder.name, ["never", "auto", *siblings])
        raise CheckpointError(
            f"resume={resume}: is not a run{hint}; give never, auto, or a folder with the {CONFIG_FILE} of a run"
        )
    if given and run_dir.absolute() != folder.absolute():
        raise ConfigError(
            f"resume={resume} with run_dir={run_dir}: are two folders; a run continues in its own: remove run_dir=..."
        )
    return folder


@contextmanager
def held(folder: Path, new: bool) -> Iterator[Path]:
    """The folder of a run, created where it is missing, with its lock. It is deleted again where nothing was written.

    Args:
        new: the name was not chosen by the user: where another run has just taken it, a number is added.

    Raises:
        CheckpointError: another process works there, or the folder cannot be written.
    """
    with ExitStack() as stack:
        with _writable(folder):
            made = [place for place in (folder, *folder.parents) if not place.exists()]
            if new:
                folder = _made_anew(folder)
                made = [folder, *(place for place in made if place in folder.parents)]
            else:
                folder.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_empty, made)  # after the lock, which is a file in the folder
            stack.enter_context(locked(folder))
        yield folder


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # it holds something
        for folder in folders:
            folder.rmdir()


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"run_dir={folder}: cannot be written ({error.strerror}); choose another run_dir"
        ) from error


def _made_anew(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        place = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            place.mkdir()
            return place
    raise AssertionError("numbers do not end")


def holds_run(folder: Path) -> bool:
    """Whether a run has taken a step there. One that failed before its first step does not claim its folder."""
    if (folder / "checkpoints.jsonl").is_file() or _has_step(folder / "metrics.jsonl"):
        return True
    stages = [file.parent for file in (*folder.glob("*/metrics.jsonl"), *folder.glob("*/checkpoints.jsonl"))]
    return any(holds_run(stage) for stage in stages)


def _has_step(metrics: Path) -> bool:
    """Whether a line is of a training step: one of an evaluation has names under `eval/` and `time/` only."""
    try:
        return any(
            not name.startswith(("eval/", "time/")) for line in read_lines(metrics) for name in line if name != "step"
        )
    except CheckpointError:  # a damaged file of a run
        return True


def _has_rows(folder: Path) -> bool:
    return any(
        (folder / name).is_file() and (folder / name).stat().st_size for name in ("metrics.jsonl", "rollouts.jsonl")
    )


def can_resume(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or holds_run(folder)


def newest_unfinished(folder: Path) -> Path | None:
    """The run in `folder` that was started last, has not completed, and is not running."""
    runs = [
        path.parent
        for path in folder.glob(f"*/{CONFIG_FILE}")
        if read_summary(path.parent).get("status") != "completed" and holder(path.parent) is None
    ]
    return max(runs, key=lambda run: ((run / CONFIG_FILE).stat().st_mtime_ns, run.name), default=None)


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's `summary.json`, or nothing where it has not ended.

    Raises:
        CheckpointError: it is damaged.
    """
    file = folder / "summary.json"
    try:
        summary = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"{file}: is not JSON ({error}); delete it, then resume") from error
    return summary if isinstance(summary, dict) else {}


def is_finished(config: RunConfig) -> bool:
    """Whether the run in `config.run_dir` has completed all that `config` asks for. With other steps it has not.

    Raises:
        CheckpointError: the run there was made with other settings.
    """
    folder = Path(config.run_dir)
    if not can_resume(folder) or read_summary(folder).get("status") != "completed":
        return False
    check_unchanged(config)
    before, now = _before(folder), saved.compared(asdict(config))
    return all(before.get(key) == now.get(key) for key in ("loop.steps", "loop.epochs"))


def claim(config: RunConfig) -> None:
    """Make `config.run_dir` this run's: write its `config.yaml` and `environment.json`.

    Raises:
        CheckpointError: the run there was made with other settings or has taken more steps, or the folder cannot be
            written.
    """
    folder = Path(config.run_dir)
    if holds_run(folder) or (config.resume != "never" and _has_rows(folder)):
        check_unchanged(config)
        checkpoint = CheckpointLog(folder).latest()
        steps = getattr(config.loop, "steps", None)
        if checkpoint is not None and steps is not None:
            check_steps(steps, checkpoint.next_step, config.run_dir)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # First: an older summary must not stand beside a configuration with more steps.
        (folder / "summary.json").unlink(missing_ok=True)
    saved.write_config(config)
    write_environment(config)


def check_unchanged(config: RunConfig) -> None:
    """Compare `config` with the one that the run in `config.run_dir` was started with.

    Raises:
        CheckpointError: they differ in a key outside MAY_CHANGE; all such keys are named.
    """
    folder = Path(config.run_dir)
    before, now = _before(folder), saved.compared(asdict(config))
    scheduled = now.get("loop.schedule", "constant") != "constant"
    free = [key for key in MAY_CHANGE if not (scheduled and key in ("loop.steps", "loop.epochs"))]
    changes = [
        f"{key} was {_shown(before, key)}, is now {_shown(now, key)}"
        for key in sorted({*before, *now})
        if _shown(before, key) != _shown(now, key)
        and not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
    if changes:
        raise CheckpointError(
            f"run_dir={folder}: holds a run with other settings ({'; '.join(changes)}); repeat those settings to "
            "continue it, or choose another run_dir"
        )


def _before(folder: Path) -> dict[str, Any]:
    """What the run in the folder was started with."""
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: is missing from a run with checkpoints; restore it or choose another run_dir"
        )
    return saved.compared(saved.read_config(folder / CONFIG_FILE))


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"
