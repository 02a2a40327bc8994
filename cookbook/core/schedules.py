"""Learning-rate schedules: a factor in [0, 1] for each step."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate_factor(schedule: str, step: int, total_steps: int, warmup_steps: int) -> float:
    """The factor of step `step` (from 0).

    It rises linearly to 1 over the first `warmup_steps` steps (1 / warmup_steps at the first one), and then
    stays (constant) or falls to 0 at `total_steps`, linearly or along half a cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983, eq. 5, without restarts).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"schedule={schedule}")
