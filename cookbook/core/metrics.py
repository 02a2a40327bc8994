"""Names of metrics: `name:reduction`, where the reduction says how the parts of a split operation are combined."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

from cookbook.core.errors import LossError

REDUCTIONS = ("sum", "mean", "max", "min")


def with_reduction(metrics: Mapping[str, float], owner: str) -> dict[str, float]:
    """The metrics of a custom loss as floats under `name:reduction`. A name without ":" means ":mean".

    Args:
        owner: who returned the metrics, such as "loss my.module.function": the beginning of an error.

    Raises:
        LossError: a name has more than one ":" or an unknown reduction, a metric is given twice, or a value is not a
            number.
    """
    complete: dict[str, float] = {}
    for key, value in metrics.items():
        name, colon, reduction = str(key).partition(":")
        if not name or (colon and reduction not in REDUCTIONS):
            raise LossError(
                f"{owner}: metric {key!r} has no valid name; use 'name' (its mean) or 'name:' and one of "
                f"{', '.join(REDUCTIONS)}"
            )
        if not isinstance(value, Real):
            raise LossError(
                f"{owner}: metric {key!r} is a {type(value).__name__}; give a float, of a tensor its item()"
            )
        full = f"{name}:{reduction or 'mean'}"
        if full in complete:
            raise LossError(f"{owner}: metric {full!r} is given twice; remove one")
        complete[full] = float(value)
    return complete
