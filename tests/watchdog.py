"""A limit of processor time for tests, which stops work that would take hours, however busy the machine is."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def processor_time(seconds: float = 60.0) -> Iterator[None]:
    """Raise TimeoutError in the main thread once this process has used `seconds` of processor time inside the block.

    The limit is far above what linear work needs and far below what quadratic work on a million characters needs.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s of processor time")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
