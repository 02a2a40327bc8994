"""The checkpoints of a run: `checkpoints.jsonl` in its run directory, one line per checkpoint.

A line is written only after the backend has saved the states that it names, and the file is replaced as a whole. A line
stores the index of the NEXT step, not of the last one: resuming repeats no step. Saves in the run directory are named
relative to it, so a run can be moved or copied, and each has a digest, so that a damaged one is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cookbook.core.errors import CheckpointError
from cookbook.tracking.records import write_atomically

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Checkpoint:
    """One line of `checkpoints.jsonl`.

    `states` maps each training client ("policy", "critic") to the path that the backend's `save_state` returned.
    `loop_state` is what the loop needs besides the weights (token counts, evaluations, seconds), as plain JSON.
    `digests` has one of each state that is a folder on this machine.
    """

    next_step: int
    states: dict[str, str]
    loop_state: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict, compare=False)


class CheckpointLog:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.absolute()
        self._root = _root(self._run_dir)
        self._file = self._run_dir / "checkpoints.jsonl"

    def read(self) -> list[Checkpoint]:
        """The checkpoints, oldest first. Lines that are not checkpoints are left out.

        Raises:
            CheckpointError: there are lines, and none of them is a checkpoint.
        """
        checkpoints, problems = self._lines()
        if problems and not checkpoints:
            raise self._nothing_left(problems)
        return checkpoints

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint; its saves are not verified."""
        records = self.read()
        return records[-1] if records else None

    def latest_intact(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose saves have their digests, and a warning for each newer one.

        Raises:
            CheckpointError: there are checkpoints, and none of them is intact.
        """
        checkpoints, problems = self._lines()
        for checkpoint in reversed(checkpoints):
            if problem := _problem(checkpoint):
                problems.append(f"the checkpoint of step {checkpoint.next_step} cannot be used: {problem}")
            else:
                return checkpoint, [f"warning: {each}; continuing from an older one" for each in problems]
        if problems:
            raise self._nothing_left(problems)
        return None, []

    def append(self, checkpoint: Checkpoint, keep: int) -> None:
        """Add a checkpoint and drop all but the newest `keep`, and those of its own step and later ones.

        The saves of dropped checkpoints are deleted where they lie in the run directory.
        """
        folders = {role: Path(path) for role, path in checkpoint.states.items() if _is_folder(path)}
        checkpoint = replace(checkpoint, digests={role: digest(folder) for role, folder in folders.items()})
        records = self._lines()[0]
        kept = [record for record in records if record.next_step < checkpoint.next_step]
        kept = [*kept, checkpoint][-keep:]
        lines = [json.dumps(asdict(self._stored(record)), sort_keys=True) + "\n" for record in kept]
        write_atomically(self._file, "".join(lines).encode())
        needed = set(_paths(kept))
        for path in set(_paths(records)) - needed:
            self._delete(Path(path), needed)

    def _lines(self) -> tuple[list[Checkpoint], list[str]]:
        """The checkpoints, with the paths of their states, and what is wrong with the other lines."""
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return [], []
        checkpoints, problems = [], []
        for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
            try:
                checkpoints.append(self._loaded(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                problems.append(f"{self._file}:{number}: is not a checkpoint ({error})")
        return checkpoints, problems

    def _loaded(self, record: dict[str, Any]) -> Checkpoint:
        checkpoint = Checkpoint(int(record["next_step"]), record["states"], record["loop_state"], record["digests"])
        here = {role: os.path.normpath(self._run_dir / path) for role, path in checkpoint.states.items()}
        return replace(
            checkpoint,
            states={
                role: here[role] if role in checkpoint.digests else path for role, path in record["states"].items()
            },
        )

    def _stored(self, checkpoint: Checkpoint) -> Checkpoint:
        """With saves in the run directory named relative to it."""
        return replace(
            checkpoint,
            states={
                role: self._portable(Path(path)) if role in checkpoint.digests else path
                for role, path in checkpoint.states.items()
            },
        )

    def _portable(self, path: Path) -> str:
        for place, root in ((path.absolute(), self._root), (path.resolve(), self._root.resolve())):
            if place.is_relative_to(root):
                return os.path.relpath(self._root / place.relative_to(root), self._run_dir)
        return str(path.absolute())

    def _delete(self, folder: Path, needed: set[str]) -> None:
        """Delete a save if it lies in the run directory, also after links are followed, and holds no needed one."""
        place, root = folder.resolve(), self._root.resolve()
        own = folder.is_dir() and place != root and place.is_relative_to(root)
        if own and not any(Path(path).resolve().is_relative_to(place) for path in needed):
            with suppress(OSError):  # what cannot be deleted only takes up space
                shutil.rmtree(folder)

    def _nothing_left(self, problems: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{self._run_dir}: no checkpoint of this run can be used ({'; '.join(problems)}); restore one, or choose "
            "another run_dir"
        )


def digest(folder: Path) -> str:
    """A digest of the names and contents of all files in a folder."""
    total = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode("utf-8", "surrogateescape"))
    return f"sha256:{total.hexdigest()}"


def _problem(checkpoint: Checkpoint) -> str | None:
    """What is wrong with the saves of a checkpoint. Of a service's own saves, only the service can tell."""
    for role, expected in checkpoint.digests.items():
        folder = Path(checkpoint.states[role])
        if not folder.is_dir():
            return f"{folder} is missing"
        try:
            found = digest(folder)
        except OSError as error:
            return f"{error.filename or folder} cannot be read ({error.strerror})"
        if found != expected:
            return f"{folder} is damaged (its files are not those that were saved)"
    return None


def _root(run_dir: Path) -> Path:
    """The folder whose saves a run may delete. A stage of a pipeline has its saves in the pipeline's run directory."""
    is_stage = not (run_dir / CONFIG_FILE).exists() and (run_dir.parent / CONFIG_FILE).exists()
    return run_dir.parent if is_stage else run_dir


def _is_folder(path: str) -> bool:
    """Whether a state is a folder on this machine. The saves of a hosted service have paths like tinker://..."""
    return "://" not in path and Path(path).is_dir()


def _paths(records: Iterable[Checkpoint]) -> Iterator[str]:
    """The folders on this machine that hold the saves."""
    for record in records:
        yield from (record.states[role] for role in record.digests)
