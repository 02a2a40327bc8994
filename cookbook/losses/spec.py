"""A loss as a loop names it: no torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from cookbook.core.types import Datum

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BuiltinLoss:
    """A loss that the backend has built in, and its settings: what `forward_backward` takes as `loss_fn` and `loss_fn_config`."""

    kind: ClassVar[str] = "builtin"

    name: str
    config: Mapping[str, float] = field(default_factory=dict)


class PreferenceLoss(Protocol):
    """A custom loss over whole completions, and what a loop has to know to make its datums: `cookbook.losses.preference`."""

    kind: ClassVar[str]
    """"pairs": datums are chosen and rejected in turn. "labelled": single examples with the array `desirable`."""

    @property
    def needs_reference(self) -> bool:
        """Datums carry `ref_logprobs`."""
        ...

    @property
    def needs_mismatched(self) -> bool:
        """Batches hold further datums marked `mismatched`, of one example's prompt and another's completion."""
        ...

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]: ...

    def measure(self, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics, `loss:sum` among them, at given logprobs and without a gradient."""
        ...
