"""Signals that end a program, and the shield that makes the first one wait."""

import os
import signal

import pytest

from cookbook.core import interrupts
from cookbook.core.interrupts import Interrupted


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_raises_with_its_exit_status(number: signal.Signals, status: int):
    before = signal.getsignal(number)
    with interrupts.handled(), pytest.raises(Interrupted) as raised:
        os.kill(os.getpid(), number)
    assert (raised.value.status, str(raised.value)) == (status, number.name)
    assert signal.getsignal(number) is before


def test_a_first_signal_waits_behind_the_shield_and_a_second_one_does_not():
    with interrupts.handled():
        interrupts.shield()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGINT"):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGTERM"):
            interrupts.unshield()
        interrupts.unshield()


def test_an_error_behind_the_shield_takes_precedence():
    with interrupts.handled():
        with pytest.raises(ValueError, match="broken"), interrupts.shielded():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("broken")
        interrupts.unshield()


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.handled():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
