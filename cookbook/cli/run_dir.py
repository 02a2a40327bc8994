"""The folder of a run, and whether the run starts or continues there: `run_dir` and `resume`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from cookbook.core.errors import CheckpointError, ConfigError
from cookbook.core.suggest import did_you_mean
from cookbook.loops.config import RunConfig
from cookbook.tracking import redact, write_atomically
from cookbook.tracking.checkpoints import CheckpointLog

CONFIG_FILE = "config.yaml"

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
            unfinished run, else `run_dir`. Anything else: the folder of a run.

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
    if not holds_run(folder):
        siblings = (
            [sibling.name for sibling in folder.absolute().parent.glob("*") if holds_run(sibling)]
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


def holds_run(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (CONFIG_FILE, "checkpoints.jsonl"))


def newest_unfinished(folder: Path) -> Path | None:
    """The run in `folder` that was started last and has not completed."""
    runs = [
        path.parent
        for path in folder.glob(f"*/{CONFIG_FILE}")
        if read_summary(path.parent).get("status") != "completed"
    ]
    return max(runs, key=lambda run: ((run / CONFIG_FILE).stat().st_mtime_ns, run.name), default=None)


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's `summary.json`, or nothing where it has not ended."""
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def is_finished(config: RunConfig) -> bool:
    """Whether the run in `config.run_dir` has completed all that `config` asks for. With more steps it has not.

    Raises:
        CheckpointError: the run there was made with other settings.
    """
    folder = Path(config.run_dir)
    if not holds_run(folder) or read_summary(folder).get("status") != "completed":
        return False
    check_unchanged(config)
    before, now = (_flatten(values) for values in (_read_config(folder), asdict(config)))
    return all(before.get(key) == now.get(key) for key in ("loop.steps", "loop.epochs"))


def claim(config: RunConfig) -> int:
    """Make `config.run_dir` this run's and write its `config.yaml`. Returns the step at which it continues.

    That is 0 for a new run, and for one without a checkpoint.

    Raises:
        CheckpointError: the run there was made with other settings, or the folder cannot be written.
    """
    folder = Path(config.run_dir)
    checkpoint = CheckpointLog(folder).latest()
    stages = [CheckpointLog(file.parent).latest() for file in folder.glob("*/checkpoints.jsonl")]  # of a pipeline
    if any((checkpoint, *stages)):
        check_unchanged(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(redact(asdict(config)), sort_keys=False, allow_unicode=True)
        write_atomically(folder / CONFIG_FILE, text.encode())
    except OSError as error:
        raise CheckpointError(
            f"run_dir={folder}: cannot be written ({error.strerror}); choose another run_dir"
        ) from error
    return checkpoint.next_step if checkpoint is not None else 0


def check_unchanged(config: RunConfig) -> None:
    """Compare `config` with the one that the run in `config.run_dir` was started with.

    Raises:
        CheckpointError: they differ in a key outside MAY_CHANGE; all such keys are named.
    """
    folder = Path(config.run_dir)
    before, now = _flatten(_read_config(folder)), _flatten(redact(asdict(config)))
    # What lies in the run's folder moves with it.
    before, now = _relative(before), _relative(now)
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


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file}: is missing from a run with checkpoints; restore it or choose another run_dir"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file}: is not YAML ({' '.join(str(error).split())}); restore it or choose another run_dir"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: is not the configuration of a run; restore it or choose another run_dir")
    return values


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _relative(flat: dict[str, Any]) -> dict[str, Any]:
    run_dir = str(flat.get("run_dir"))
    return {
        key: value.replace(run_dir, "${run_dir}") if isinstance(value, str) else value for key, value in flat.items()
    }


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"
