"""Small things that every loop uses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cookbook.core.clients import APIFuture, CustomLoss, ServiceClient, TrainingClient
from cookbook.core.types import Datum, ForwardBackwardOutput
from cookbook.tracking import Logger


@dataclass(frozen=True)
class CommonComponents:
    """What every loop is built from. A loop's own `Components` adds those it needs, named as in the configuration."""

    service: ServiceClient
    logger: Logger


def forward_backward_custom(
    client: TrainingClient, service: ServiceClient, data: Sequence[Datum], loss_fn: CustomLoss
) -> APIFuture[ForwardBackwardOutput]:
    """A custom loss in one operation where the backend has it, else in two passes over its cross_entropy."""
    if service.capabilities.custom_loss:
        return client.forward_backward_custom(data, loss_fn)
    from cookbook.losses.two_pass import forward_backward_two_pass  # imported here because it needs torch

    return forward_backward_two_pass(client, data, loss_fn)


class Stopwatch:
    """Seconds since it was made or last read, for `time/*` metrics."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed
