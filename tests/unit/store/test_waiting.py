"""Who waits says why: after a while, again at a bounded rate, and in one gauge for each reason."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import redis.exceptions
from prometheus_client import generate_latest

from streamadv import metrics
from streamadv.store import waiting
from streamadv.store.retry import Backoff, NotNowError, retried, server_reason
from streamadv.store.waiting import REASONS, SAY_S, Reason, Waiting
from tests.support import Forward


def blocked() -> set[str]:
    lines = generate_latest(metrics.REGISTRY).decode().splitlines()
    return {
        line.split('"')[1]
        for line in lines
        if line.startswith("streamadv_blocked{") and line.endswith(" 1.0")
    }


def test_a_wait_is_told_after_a_while_and_then_at_a_bounded_rate(
    forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    wait = Waiting("producer p", "not admitted")
    said = []
    for second in range(int(4 * SAY_S)):
        wait.because(Reason("max_bytes", "5 of 6 bytes"))
        if len(caplog.records) > len(said):
            said.append(second)
        forward(1.0)
    assert said == [SAY_S, 2 * SAY_S, 3 * SAY_S]
    assert SAY_S + 5 <= 30
    assert caplog.messages[0] == (
        f"producer p: not admitted for {SAY_S:g} s: 5 of 6 bytes: {REASONS['max_bytes'].remedy} [max_bytes]"
    )


def test_the_gauge_shows_the_reasons_of_waits_that_last(forward: Forward) -> None:
    assert blocked() == set()
    one, other = Waiting("a", "x"), Waiting("b", "y")
    one.because(Reason("pacing", ""), Reason("no_trainer", ""))
    other.because(Reason("pacing", ""))
    assert blocked() == set()
    forward(waiting.BLOCKED_S)
    assert blocked() == {"pacing", "no_trainer"}
    one.over()
    assert blocked() == {"pacing"}
    forward(waiting.TURN_S)
    assert blocked() == set()
    other.because(Reason("pacing", ""))
    forward(waiting.BLOCKED_S)
    assert blocked() == {"pacing"}
    del other
    assert blocked() == set()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (redis.exceptions.ConnectionError("refused"), "server_away"),
        (redis.exceptions.TimeoutError("no reply"), "server_hangs"),
        (redis.exceptions.BusyLoadingError("LOADING"), "server_loading"),
        (redis.exceptions.ReadOnlyError("READONLY"), "failover"),
        (redis.exceptions.ClusterDownError("CLUSTERDOWN"), "failover"),
        (NotNowError("NOREPLICAS Not enough good replicas to write."), "noreplicas"),
        (NotNowError("MISCONF Errors writing to the AOF file: No space left on device"), "misconf"),
    ],
)
def test_an_outage_is_told_at_once_with_its_reason(
    error: Exception, name: str, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    assert server_reason(error).name == name
    backoff = Backoff()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            retried("grouper", error, backoff)
            forward(2.0)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith(f"grouper: waiting for the server: {error}: ")
    assert caplog.messages[1].startswith(f"grouper: waiting for the server for 26 s: {error}: ")
    assert f"[{name}]" in caplog.messages[0]
    assert blocked() == {name}
    backoff.reset()
    assert blocked() == set()


def test_the_list_of_reasons_is_the_one_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", text[text.index("## Why somebody waits") :], re.MULTILINE
    )
    assert {name: (meaning, remedy) for name, meaning, remedy in rows} == REASONS


def test_many_that_wait_for_the_same_say_it_once(forward: Forward, caplog: pytest.LogCaptureFixture) -> None:
    waits = [Waiting("producer p", "not admitted") for _ in range(64)]
    for _ in range(int(3 * SAY_S)):
        for wait in waits:
            wait.because(Reason("pacing", "4 of 4 groups"))
        forward(1.0)
    assert 2 <= len(caplog.messages) <= 3


def test_a_wait_that_was_given_up_begins_anew(forward: Forward, caplog: pytest.LogCaptureFixture) -> None:
    wait = Waiting("producer p", "not admitted")
    wait.because(Reason("pacing", ""))
    forward(3600)
    wait.because(Reason("pacing", ""))
    assert not caplog.messages
    wait.over()
    forward(SAY_S)
    wait.because(Reason("pacing", ""))
    assert not caplog.messages
