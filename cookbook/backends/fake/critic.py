"""The critic of the fake backend: the value of a position is one number per input token, trained like the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cookbook.backends.fake.model import TrainedWeights
from cookbook.core.errors import CapabilityError, ConfigError, DataError
from cookbook.core.types import Datum, ForwardBackwardOutput, check_soft_targets

VALUE_INPUTS = ("old_values", "returns")


def value_loss(
    weights: TrainedWeights, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None, backward: bool
) -> ForwardBackwardOutput:
    """w * max((v - R)^2, (clip(v, v_old +- c) - R)^2) / 2 per token, c = `clip_range` (0: no clipping).

    Outputs hold `values`.
    """
    if loss_fn != "value":
        raise CapabilityError(f"loss_fn {loss_fn!r}: a critic has the loss 'value' only")
    settings = {"clip_range": 0.2, **(config or {})}
    if len(settings) > 1:
        raise ConfigError(f"loss_fn_config of 'value' has the key clip_range only, not {', '.join(sorted(settings))}")
    clip_range = settings["clip_range"]
    check_soft_targets(data, loss_fn, accepted=False)
    outputs, total = [], 0.0
    for index, datum in enumerate(data):
        inputs = datum.loss_fn_inputs
        for key in VALUE_INPUTS:
            if key not in inputs:
                raise DataError(
                    f"datum {index}: loss_fn 'value' needs loss_fn_inputs[{key!r}]; "
                    f"it has {', '.join(sorted(inputs)) or 'none'}"
                )
        tokens = np.asarray(datum.model_input.tokens)
        w = inputs.get("weights", np.ones(len(tokens), np.float32))
        values = weights.table[tokens, 0]
        error = values - inputs["returns"]
        slope = error
        if clip_range:
            moved = values - inputs["old_values"]
            clipped = inputs["old_values"] + np.clip(moved, -clip_range, clip_range) - inputs["returns"]
            slope = np.where(error**2 >= clipped**2, error, np.where(np.abs(moved) <= clip_range, clipped, 0.0))
            error = np.where(error**2 >= clipped**2, error, clipped)
        total += float(np.sum(w * error**2 / 2))
        if backward:
            np.add.at(weights.gradient[:, 0], tokens, w * slope)
        outputs.append({"values": values.astype(np.float32)})
    return ForwardBackwardOutput(outputs, {"loss:sum": total})
