"""Types of the losses that a loop is given, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import numpy as np

from cookbook.core.types import Datum

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BuiltinLoss:
    """A loss that the backend has built in, and its settings: `loss_fn` and `loss_fn_config` of `forward_backward`."""

    kind: ClassVar[str] = "builtin"

    name: str
    config: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class PreferenceLoss(Protocol):
    """A custom loss over whole completions, and what a loop needs to know to build its datums."""

    kind: ClassVar[str]
    """"pairs": datums are chosen and rejected in turn. "labelled": single examples with the array `desirable`."""

    @property
    def needs_reference(self) -> bool:
        """Datums have `ref_logprobs`."""
        ...

    @property
    def needs_mismatched(self) -> bool:
        """Batches also hold datums marked `mismatched`: the prompt of one example with the completion of another."""
        ...

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]: ...

    def measure(self, data: Sequence[Datum], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics, `loss:sum` among them, at given logprobs and without a gradient."""
        ...
