"""Types of built-in losses, and the checks and reductions of their settings, inputs and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.suggest import did_you_mean
from cookbook.core.types import Datum, check_soft_targets


@dataclass(frozen=True)
class TokenBatch:
    """The positions that a loss is computed at, of whole datums one after the other: N positions of S datums.

    A position with K soft targets is here K times, once with each of them.

    Attributes:
        logprobs: log-probability of each target token under the weights being trained, float32 `[N]`, with gradient.
        inputs: the datum's other per-token arrays at the same positions, each `[N]`; `weights` is always there.
        segments: which datum a position belongs to, int64 `[N]`, ascending from 0. Losses over whole sequences
            (a length-normalised ratio, say) reduce by it; per-token losses ignore it.
    """

    logprobs: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    segments: torch.Tensor


@dataclass(frozen=True)
class TokenLosses:
    """The result of a loss: its value per position `[N]` (the loss is their sum), and metrics per position.

    A metric's key is `name:reduction`; the values of all positions of an operation, however it was split, are
    reduced together by `sum`, `mean`, `max` or `min`.
    """

    values: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LossFunction:
    """A built-in loss.

    Attributes:
        compute: from the positions and the complete settings to the values per position.
        required: per-token arrays a datum must have. `weights` is always optional and defaults to 1.
        gates: inputs of which a zero makes a position's loss and gradient zero, so that it need not be computed.
        defaults: the settings and their default values.
        soft_targets: `target_tokens` and `weights` may have shape `[T, K]`; the loss is a sum over both.
    """

    compute: Callable[[TokenBatch, Mapping[str, float]], TokenLosses]
    required: tuple[str, ...]
    gates: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    soft_targets: bool = False


def complete_config(loss_name: str, loss: LossFunction, config: Mapping[str, float] | None) -> dict[str, float]:
    """The settings of a loss with defaults filled in; `temperature` (default 1) belongs to every loss.

    Raises:
        ConfigError: an unknown setting, a value that is not a finite number, a temperature of 0 or less, crossed
            thresholds.
    """
    complete = {"temperature": 1.0, **loss.defaults}
    for key, value in (config or {}).items():
        if key not in complete:
            raise ConfigError(
                f"loss_fn_config of {loss_name!r}: unknown setting {key!r}{did_you_mean(key, complete)}; "
                f"it takes {', '.join(sorted(complete))}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"loss_fn_config of {loss_name!r}: {key} is {value!r}; it must be a finite number")
        complete[key] = float(value)
    if complete["temperature"] <= 0:
        raise ConfigError(
            f"loss_fn_config of {loss_name!r}: temperature is {complete['temperature']}; "
            "it must be above 0: the temperature that was sampled with"
        )
    if complete.get("clip_low_threshold", 0.0) > complete.get("clip_high_threshold", math.inf):
        raise ConfigError(
            f"loss_fn_config of {loss_name!r}: clip_low_threshold {complete['clip_low_threshold']} is above "
            f"clip_high_threshold {complete['clip_high_threshold']}; both bound the ratio itself, such as 0.8 and 1.2"
        )
    return complete


def check_inputs(loss_name: str, loss: LossFunction, known_inputs: Iterable[str], data: Sequence[Datum]) -> None:
    """Refuse datums that lack an input of the loss, have soft targets where it takes none, or have an unknown input.

    A misspelt `weights` would otherwise be ignored.

    Raises:
        DataError: naming the datum, the input and what the loss takes.
    """
    known = sorted(known_inputs)
    for index, datum in enumerate(data):
        for key in loss.required:
            if key not in datum.loss_fn_inputs:
                raise DataError(
                    f"datum {index}: loss {loss_name!r} needs loss_fn_inputs {', '.join(loss.required)}; "
                    f"{key!r} is missing (present: {', '.join(sorted(datum.loss_fn_inputs)) or 'none'})"
                )
        for key in datum.loss_fn_inputs:
            if key not in known:
                raise DataError(
                    f"datum {index}: loss_fn_inputs holds {key!r}{did_you_mean(key, known)}, which no built-in loss "
                    f"reads; they read {', '.join(known)}"
                )
    check_soft_targets(data, loss_name, loss.soft_targets)


class MetricSums:
    """Metrics of an operation, collected over its micro-batches, so that they do not depend on the split."""

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {}

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        for key, values in metrics.items():
            self._parts.setdefault(key, []).append(values.detach())

    def reduce(self) -> dict[str, float]:
        """One number per key; the part after `:` says how."""
        reductions = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}
        return {
            key: float(reductions[key.partition(":")[2]](torch.cat(parts).cpu().double()))
            for key, parts in self._parts.items()
        }
