"""The environment steps in progress, and a line whenever one of them takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_NOTICE_S = 30.0
"""How long the oldest step runs before the first line; the next one comes when it has run twice as long."""

EXAMPLES_SHOWN = 3


class PendingSteps:
    """Which steps (in practice: their rewards) are being waited for."""

    def __init__(self) -> None:
        self._steps: dict[object, tuple[str, float]] = {}
        self._ended = threading.Event()

    @contextmanager
    def step(self, example_id: str) -> Iterator[None]:
        """Within the block a step of this example is in progress."""
        key = object()
        self._steps[key] = (example_id, time.monotonic())
        try:
            yield
        finally:
            del self._steps[key]

    @contextmanager
    def reported(self, say: Callable[[str], None]) -> Iterator[None]:
        """Within the block, report what takes long. From a thread, so that it works where the event loop is blocked."""
        threading.Thread(target=self._report, args=(say,), name="pending-steps", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def _report(self, say: Callable[[str], None]) -> None:
        due = FIRST_NOTICE_S
        while not self._ended.wait(FIRST_NOTICE_S / 10):
            pending = list(self._steps.copy().values())
            oldest = time.monotonic() - min((started for _, started in pending), default=time.monotonic())
            if oldest < FIRST_NOTICE_S:
                due = FIRST_NOTICE_S
            elif oldest >= due:
                due = 2 * oldest
                examples = list(dict.fromkeys(example for example, _ in pending))
                more = ", ..." if len(examples) > EXAMPLES_SHOWN else ""
                say(
                    f"waiting for the rewards of {len(pending)} completion{'s' * (len(pending) != 1)}, the oldest for "
                    f"{oldest:.0f} s: {', '.join(examples[:EXAMPLES_SHOWN])}{more} (loop.reward_timeout_s sets a limit)"
                )
