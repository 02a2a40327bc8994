"""Ctrl-C and SIGTERM as an exception, which waits for the end of a step that has begun to change the weights."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

PATIENCE = 2
"""After more signals the process ends at once. Files are replaced as a whole, so none is left half written."""

WAITING = b"stopping as soon as a checkpoint can be made; repeat the signal to stop at once\n"


class Interrupted(KeyboardInterrupt):
    """The program was asked to stop by a signal. `advice` says how to continue."""

    def __init__(self, number: int = signal.SIGINT, advice: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.advice = number, advice

    @property
    def status(self) -> int:
        """The exit status by convention: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


def as_interrupted(error: KeyboardInterrupt, advice: str = "") -> Interrupted:
    """A KeyboardInterrupt of any kind, with advice unless it has some."""
    if isinstance(error, Interrupted):
        return Interrupted(error.number, error.advice or advice)
    return Interrupted(signal.SIGINT, advice)


class _State:
    shielded = False
    pending: int | None = None
    count = 0


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Within the block a signal raises Interrupted in the main thread: the first one perhaps after the end of a step,
    the second one at once; a third ends the process. Changes nothing in other threads, or within such a block.

    A signal that is ignored, as Ctrl-C is for a background job of a shell script, stays ignored.
    """
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None, _on_signal):
                replaced[number] = signal.signal(number, _on_signal)
                _State.count = 0
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def shield() -> None:
    """From now on the first signal waits for `unshield`; a second one raises at once."""
    _State.shielded = True


def unshield() -> None:
    """End what `shield` began.

    Raises:
        Interrupted: a signal has come since.
    """
    number = clear()
    if number is not None:
        raise Interrupted(number)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """The block between `shield` and `unshield`. An error of the block takes precedence over a signal."""
    shield()
    try:
        yield
    except BaseException:
        clear()
        raise
    unshield()


def clear() -> int | None:
    """End what `shield` began and forget the signal that came since, which is returned."""
    number, _State.shielded, _State.pending = _State.pending, False, None
    return number


def _on_signal(number: int, frame: FrameType | None) -> None:
    _State.count += 1
    if _State.count > PATIENCE:
        os._exit(128 + number)
    if _State.shielded and _State.pending is None:
        _State.pending = number
        with contextlib.suppress(OSError):  # the reader of the output may be gone
            os.write(1, WAITING)
        return
    raise Interrupted(number)
