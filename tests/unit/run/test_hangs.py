"""Calls that are bounded in time."""

from __future__ import annotations

import signal

import pytest

from streamadv.run import hangs


def test_an_interrupt_as_a_call_begins_leaves_no_limit_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later signal would raise in the middle of something else."""
    interrupts = [KeyboardInterrupt()]

    def set_timer(*_: float) -> None:
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(signal, "setitimer", set_timer)
    with pytest.raises(KeyboardInterrupt):
        hangs.call_within(lambda: None, 0.0, "a call")
    signal.raise_signal(hangs.SIGNAL)
