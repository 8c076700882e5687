"""Who waits says why: after a while, again at a bounded rate, and in one gauge for each reason. And gives up."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path

import pytest
import redis.exceptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streamadv import clock, metrics
from streamadv.cli import make_parser
from streamadv.store import waiting
from streamadv.store.reasons import REASONS, Reason
from streamadv.store.retry import NotNowError, Outage, server_reason
from streamadv.store.waiting import REPORT_S, Blocked, Wait
from tests.support import Forward

pytestmark = pytest.mark.usefixtures("standing")


def blocked() -> set[str]:
    families = text_string_to_metric_families(generate_latest(metrics.REGISTRY).decode())
    return {
        sample.labels["reason"]
        for family in families
        for sample in family.samples
        if sample.name == "streamadv_blocked"
    }


def test_a_wait_is_told_after_a_while_and_then_at_a_bounded_rate(
    forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    wait = Blocked("producer p", "not admitted", "exp1")
    said = []
    for second in range(int(4 * REPORT_S)):
        wait.because(Reason("max_bytes", "5 of 6 bytes"))
        if len(caplog.records) > len(said):
            said.append(second)
        forward(1.0)
    assert said == [REPORT_S, 2 * REPORT_S, 3 * REPORT_S]
    assert REPORT_S + 5 <= 30
    assert caplog.messages[0] == (
        f"run exp1: producer p: not admitted for {REPORT_S:g} s: 5 of 6 bytes: "
        f"{REASONS['max_bytes'].remedy} [max_bytes]"
    )


def test_the_end_of_a_wait_is_told_if_the_wait_was(
    forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wait = Blocked("producer p", "not admitted", "exp1")
    wait.over()
    wait.because(Reason("max_bytes", ""))
    forward(REPORT_S - 1)
    wait.because(Reason("max_bytes", ""))
    wait.over()
    assert caplog.messages == []
    wait.because(Reason("max_bytes", ""))
    forward(REPORT_S)
    wait.because(Reason("max_bytes", ""))
    forward(1.0)
    wait.over()
    wait.over()
    assert caplog.messages[1:] == [f"run exp1: producer p: not admitted: goes on after {REPORT_S + 1:g} s"]


def test_the_gauge_shows_the_reasons_of_waits_that_last(forward: Forward) -> None:
    assert blocked() == set()
    one, other = Blocked("a", "x", None), Blocked("b", "y", None)
    one.because(Reason("pacing", ""), Reason("no_trainer", ""))
    other.because(Reason("pacing", ""))
    assert blocked() == set()
    forward(waiting.BLOCKED_S)
    assert blocked() == {"pacing", "no_trainer"}
    one.over()
    assert blocked() == {"pacing"}
    forward(waiting.ATTEMPT_S)
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
    outage = Outage("grouper", "exp1")
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            outage.delay_after(error)
            forward(2.0)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith(f"run exp1: grouper: waiting for the server: {error}: ")
    assert caplog.messages[1].startswith(f"run exp1: grouper: waiting for the server for 26 s: {error}: ")
    assert f"[{name}]" in caplog.messages[0]
    assert blocked() == {name}
    outage.over()
    assert blocked() == set()


def test_outages_one_after_another_are_told_as_seldom_as_a_long_one(
    forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    outage = Outage("advantage", "exp1")  # of one of several servers: the others answer in between
    caplog.set_level(logging.INFO)
    for _ in range(int(REPORT_S)):
        outage.delay_after(redis.exceptions.ConnectionError("refused"))
        outage.over()
        forward(1.0)
    assert caplog.messages[1:] == ["run exp1: advantage: waiting for the server: goes on after 0 s"]
    outage.delay_after(redis.exceptions.ConnectionError("refused"))
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("name", REASONS)
def test_every_command_of_a_remedy_names_the_run_and_can_be_pasted(name: str) -> None:
    line = Reason(name, "for a reason").line("exp1")
    commands = re.findall(r"`streamadv ([^`]*)`", line)
    assert len(commands) == REASONS[name].remedy.count("`streamadv ")
    for command in commands:
        words = command.split()
        assert make_parser(words).parse_args(words).run_name == "exp1"
    assert Reason(name, "for a reason").line(None) == f"for a reason: {REASONS[name].remedy} [{name}]"


def test_the_list_of_reasons_is_the_one_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "reasons.md").read_text()
    waits = text.partition("\n## Errors\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", waits, re.MULTILINE)
    assert {name: (meaning, remedy) for name, meaning, remedy in rows} == REASONS


def test_many_that_wait_for_the_same_say_it_once(forward: Forward, caplog: pytest.LogCaptureFixture) -> None:
    waits = [Blocked("producer p", "not admitted", "exp1") for _ in range(64)]
    for _ in range(int(3 * REPORT_S)):
        for wait in waits:
            wait.because(Reason("pacing", "4 of 4 groups"))
        forward(1.0)
    assert 2 <= len(caplog.messages) <= 3


def test_a_wait_that_was_given_up_begins_anew(forward: Forward, caplog: pytest.LogCaptureFixture) -> None:
    wait = Blocked("producer p", "not admitted", "exp1")
    wait.because(Reason("pacing", ""))
    forward(3600)
    wait.because(Reason("pacing", ""))
    assert not caplog.messages
    wait.over()
    forward(REPORT_S)
    wait.because(Reason("pacing", ""))
    assert not caplog.messages


def wait_of(timeout: float | None = None, base: float = 0.05, cap: float = 2.0) -> tuple[Wait, list[float]]:
    slept: list[float] = []
    return Wait(Blocked("a", "x", None), timeout=timeout, base=base, cap=cap, sleep=slept.append), slept


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.floats(1e-3, 10),
    cap=st.floats(1e-3, 60),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=100),
)
def test_pauses_are_fully_jittered_and_capped(
    monkeypatch: pytest.MonkeyPatch, base: float, cap: float, draws: list[float]
) -> None:
    monkeypatch.setattr(random, "random", iter(draws).__next__)
    wait, slept = wait_of(base=base, cap=cap)
    for _ in draws:
        wait.pause()
    assert slept == [min(cap, base * 2**n) * draw for n, draw in enumerate(draws)]


def test_a_success_shortens_the_pauses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.5)
    wait, _ = wait_of(base=1.0, cap=100.0)
    assert [wait.delay() for _ in range(3)] == [0.5, 1.0, 2.0]
    wait.over()
    assert wait.delay() == 0.5


def test_pauses_stay_capped_in_a_long_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 1.0)
    wait, _ = wait_of()
    assert all(wait.delay() <= 2.0 for _ in range(5000))


def test_a_wait_gives_up_after_its_timeout_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 1.0)
    moment = [1e6]
    monkeypatch.setattr(clock, "now", lambda: moment[0])
    wait, slept = wait_of(timeout=10.0, base=4.0, cap=4.0)
    while not wait.expired:
        wait.pause()
        moment[0] += slept[-1]
    assert slept == [4.0, 4.0, 2.0], "the last attempt is made when the time is over"
    wait.progress()
    assert not wait.expired
    assert wait_of(timeout=0.0)[0].expired
    endless, _ = wait_of()
    moment[0] += 1e9
    assert not endless.expired


def test_loops_that_share_a_subject_are_one_wait(forward: Forward, caplog: pytest.LogCaptureFixture) -> None:
    """A caller with a short timeout who asks again and again waits all the time."""
    subject = Blocked("producer p", "not admitted", "exp1")
    for _ in range(int(REPORT_S)):
        Wait(subject, timeout=1.0).because(Reason("pacing", "4 of 4 groups"))
        assert not caplog.messages
        forward(1.0)
    wait = Wait(subject)
    wait.because(Reason("pacing", "4 of 4 groups"))
    assert len(caplog.messages) == 1
    assert blocked() == {"pacing"}
    wait.over()
    assert blocked() == set()
