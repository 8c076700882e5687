"""What the resend window keeps, and until when: steps driven by hand, so that servers change in the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from streamadv.errors import Busy
from streamadv.producer.requests import Pause, ServerIds, Steps
from streamadv.producer.resend import ResendWindow
from streamadv.producer.tickets import PushResult
from streamadv.store.keys import RunKeys

SHARDS = RunKeys("r", (0,)).shards
WINDOW_S = 5.0


class Sender:
    """Has pushed to one shard, and notes what is sent again."""

    def __init__(self, window: ResendWindow) -> None:
        self._window = window
        self.sent_again: list[str] = []

    def push(self, name: str) -> None:
        def send() -> Steps[PushResult]:
            yield Pause(0)
            self.sent_again.append(name)
            return PushResult(["pushed"])

        self._window.remember(0, self._window.servers.get(0), 1, send)


def finish(steps: Steps[Any], reply: Any = None) -> None:
    """Carry out the rest of the steps, of which the first one gets this reply."""
    with suppress(StopIteration):
        while True:
            steps.send(reply)
            reply = None


def nothing() -> Steps[None]:
    yield from ()


def check(window: ResendWindow, server: str) -> None:
    steps = window.check(SHARDS, nothing)
    assert isinstance(next(steps), ServerIds)
    finish(steps, [server])


def test_what_was_lost_and_what_waits_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> Steps[PushResult]:
        yield Pause(0)
        raise Busy("no room")

    window = ResendWindow(WINDOW_S)
    check(window, "a")
    Sender(window).push("first")
    window.remember(0, "a", 1, refused)
    check(window, "b")
    (message,) = caplog.messages
    assert message.endswith(
        "calls sent again: 2; trajectories that it had lost, now back: 1; calls that wait for admission: 1"
    )


def test_a_second_loss_while_the_first_one_is_repaired(forward: Callable[[float], None]) -> None:
    """What was sent again to a server is kept when that one is replaced before the rest is sent again."""
    window = ResendWindow(WINDOW_S)
    sender = Sender(window)
    check(window, "a")
    sender.push("first")
    sender.push("second")
    steps = window.check(SHARDS, nothing)
    next(steps)
    steps.send(["b"])
    steps.send(None)  # the first one is sent to b
    forward(WINDOW_S + 1)  # c has taken over when the second one can be sent
    finish(steps)
    assert sender.sent_again == ["first", "second"]
    check(window, "c")
    assert sender.sent_again == ["first", "second"] * 2


def test_a_pause_after_the_answer_forgets_nothing(forward: Callable[[float], None]) -> None:
    """A suspended process cannot know that the server is still the one that answered before."""
    window = ResendWindow(WINDOW_S)
    sender = Sender(window)
    check(window, "a")
    sender.push("first")
    steps = window.check(SHARDS, nothing)
    next(steps)
    forward(WINDOW_S + 1)
    finish(steps, ["a"])
    check(window, "b")
    assert sender.sent_again == ["first"]


def test_what_one_server_has_had_for_long_enough_is_forgotten(forward: Callable[[float], None]) -> None:
    window = ResendWindow(WINDOW_S)
    sender = Sender(window)
    check(window, "a")
    sender.push("first")
    forward(WINDOW_S + 1)
    sender.push("second")
    check(window, "a")
    check(window, "b")
    assert sender.sent_again == ["second"]
