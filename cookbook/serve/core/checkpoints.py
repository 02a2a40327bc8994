"""The key that names a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckpointKind = Literal["weights", "sampler_weights"]
"""`weights` include the optimizer and can be trained further; `sampler_weights` can only be sampled from."""


@dataclass(frozen=True)
class CheckpointKey:
    """The model that was saved, the kind, and the name the client chose. Each adapter has its own notation for it."""

    model: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{self.model}/{self.kind}/{self.name}"
