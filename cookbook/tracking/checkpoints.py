"""The checkpoints of a run: `checkpoints.jsonl` in its run directory, one line per checkpoint.

A line is written only after the backend has saved the states that it names, so the last complete line can always be
loaded. It stores the index of the NEXT step, not of the last one: resuming repeats no step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cookbook.core.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """One line of `checkpoints.jsonl`.

    `states` maps each training client ("policy", "critic") to the path that the backend's `save_state` returned.
    `loop_state` is what the loop needs besides the weights (token counts, evaluations, seconds), as plain JSON.
    """

    next_step: int
    states: dict[str, str]
    loop_state: dict[str, Any] = field(default_factory=dict)


class CheckpointLog:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "checkpoints.jsonl"

    def read(self) -> list[Checkpoint]:
        """All checkpoints, oldest first. An incomplete last line, which a crash may leave, is ignored.

        Raises:
            CheckpointError: a complete line is not a checkpoint.
        """
        if not self._file.exists():
            return []
        *lines, unfinished = self._file.read_text().split("\n")
        del unfinished
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(Checkpoint(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{self._file}:{number}: not a checkpoint ({error}); delete the line to continue without it"
                ) from error
        return records

    def latest(self) -> Checkpoint | None:
        records = self.read()
        return records[-1] if records else None

    def append(self, checkpoint: Checkpoint, keep: int) -> None:
        """Add a checkpoint and drop all but the newest `keep`. Local saves of dropped checkpoints are deleted."""
        records = [*self.read(), checkpoint]
        kept, dropped = records[-keep:], records[:-keep]
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("w") as stream:
            for record in kept:
                stream.write(json.dumps(asdict(record), sort_keys=True) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self._file)
        for path in _paths(dropped) - _paths(kept):
            # The saves of a hosted service have paths like tinker://...; the service manages them.
            if Path(path).is_dir():
                shutil.rmtree(path)


def _paths(records: Sequence[Checkpoint]) -> set[str]:
    return {path for record in records for path in record.states.values()}
