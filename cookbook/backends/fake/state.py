"""Saved states of the fake backend: a folder of `weights.safetensors`, `session.json`, `optimizer.safetensors`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from cookbook.backends.fake.model import TrainedWeights
from cookbook.core.errors import CheckpointError
from cookbook.core.types import Role


@dataclass(frozen=True)
class SessionSettings:
    """What a training session was made with; saved with its state."""

    base_model: str
    rank: int | None
    alpha: float
    seed: int | None
    role: Role

    @property
    def identity(self) -> str:
        """What a save and the session that loads it must have in common."""
        return f"base model {self.base_model!r}, rank {self.rank}, alpha {self.alpha:g}, role {self.role}"


def write_state(path: Path, settings: SessionSettings, weights: TrainedWeights, with_optimizer: bool) -> None:
    """Write a folder under another name, then rename it; an earlier save of the name is removed last."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as scratch:
            fresh, outdated = Path(scratch, "new"), Path(scratch, "old")
            fresh.mkdir()
            save_file({"table": weights.table}, fresh / "weights.safetensors")
            if with_optimizer:
                moments = {"first_moment": weights.first_moment, "second_moment": weights.second_moment}
                save_file(moments, fresh / "optimizer.safetensors")
            (fresh / "session.json").write_text(
                json.dumps({"settings": asdict(settings), "steps": weights.steps}, indent=1)
            )
            if path.exists():
                os.replace(path, outdated)
            os.replace(fresh, path)
            shutil.rmtree(outdated, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be saved ({error}); an earlier save of this name stays") from error


def read_state(path: str, with_optimizer: bool) -> tuple[SessionSettings, TrainedWeights]:
    folder = Path(path)
    if not (folder / "session.json").is_file():
        raise CheckpointError(
            f"{path}: no saved state here; pass the path that save_state or save_weights_for_sampler returned"
        )
    if with_optimizer and not (folder / "optimizer.safetensors").is_file():
        raise CheckpointError(
            f"{path}: holds weights without an optimizer; load it without one, or save with save_state"
        )
    try:
        session: dict[str, Any] = json.loads((folder / "session.json").read_text())
        weights = TrainedWeights(load_file(folder / "weights.safetensors")["table"])
        if with_optimizer:
            moments = load_file(folder / "optimizer.safetensors")
            weights.first_moment, weights.second_moment = moments["first_moment"], moments["second_moment"]
            weights.steps = int(session["steps"])
        return SessionSettings(**session["settings"]), weights
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the saved state is damaged ({type(error).__name__}: {error}); delete it and use another"
        ) from error
