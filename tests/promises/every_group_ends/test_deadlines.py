"""Groups end at their deadlines, neither before nor much later, whatever becomes of the server's clock.

The server is a fake one, whose clock tests can set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from streamadv.grouping.housekeeping import Housekeeping
from streamadv.run import Run
from streamadv.store.connection import Connection
from tests.support import group_all, join, ledger, logged, problems, producing, some_of, trajectory

DEADLINE_S = 60
HOUR_S = 3600.0

Advance = Callable[[float], None]


@pytest.fixture
def server_clock(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """Sets the server's clock forward, or back; else it stands still."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def passing(run: Run, server_clock: Advance) -> Iterator[bool]:
    """Seconds pass, in which two groupers keep house. Says for each whether a group was open at its end."""
    groupers = [Housekeeping(run), Housekeeping(run)]
    while True:
        server_clock(1)
        for each in groupers:
            each.round()
        yield run.counters()["groups_open"] > 0


def live(run: Run, server_clock: Advance, seconds: int) -> list[bool]:
    return list(islice(passing(run, server_clock), seconds))


def ends_after(run: Run, server_clock: Advance) -> int:
    """Seconds at the end of which no group was open any more, less one."""
    is_open = islice(passing(run, server_clock), 80)
    return next(second for second, each in enumerate(is_open) if not each)


JUMPS_S = pytest.mark.parametrize("jump_s", some_of([-2 * HOUR_S, -30.0, 0.0, 30.0, 2 * HOUR_S], 2))


@JUMPS_S
@pytest.mark.parametrize("at_s", [0, 20])
def test_a_jump_of_the_servers_clock_neither_ends_nor_prolongs_a_group(
    fake: Connection, server_clock: Advance, jump_s: float, at_s: int
) -> None:
    """`at_s` = 0: the clock jumps before a grouper has looked at it since the group was begun."""
    with producing(fake, "r", {"group_deadline_s": DEADLINE_S}) as producer:
        run = join(fake, "r")
        live(run, server_clock, 1)
        group = producer.begin_group(2)
        next(iter(group)).push(input_ids=[1], response_mask=[1], reward=1.0)
        group_all(run)
        assert all(live(run, server_clock, at_s))
        server_clock(jump_s)
        ended = ends_after(run, server_clock)
    assert abs(ended - (DEADLINE_S - at_s)) <= 6
    assert ledger(run)["dropped"] == {"expired": 1}
    assert problems(run) == []


@JUMPS_S
@pytest.mark.parametrize("is_touched", [False, True])
def test_a_deadline_given_right_after_a_jump_counts_from_then_on(
    fake: Connection, server_clock: Advance, jump_s: float, is_touched: bool
) -> None:
    """Before a grouper has noticed anything."""
    with producing(fake, "r", {"group_deadline_s": DEADLINE_S}) as producer:
        run = join(fake, "r")
        live(run, server_clock, 1)
        if is_touched:
            producer.begin_group(2, group_id="g", deadline_s=10.0)
        server_clock(jump_s)
        if is_touched:
            assert producer.touch("g", DEADLINE_S)
        else:
            producer.begin_group(2, group_id="g")
        ended = ends_after(run, server_clock)
    assert abs(ended - DEADLINE_S) <= 6


@JUMPS_S
@pytest.mark.parametrize("before_s", [0, 1])
def test_deadlines_come_no_nearer_while_no_grouper_runs(
    fake: Connection, server_clock: Advance, jump_s: float, before_s: int
) -> None:
    """`before_s` = 0: none has ever run."""
    with producing(fake, "r", {"group_deadline_s": DEADLINE_S}) as producer:
        run = join(fake, "r")
        live(run, server_clock, before_s)
        for group_id in "gh":
            producer.push([trajectory(group_id, 0, 2)])
        if before_s:
            group_all(run)
        server_clock(3 * HOUR_S + jump_s)
        producer.push([trajectory("g", 1, 2)])
        live(run, server_clock, 1)
        assert group_all(run) == ["complete"]
        assert ends_after(run, server_clock) in range(DEADLINE_S - 6, DEADLINE_S + 1)
    assert list(logged(run)) == ["g"]
    assert problems(run) == []


@pytest.mark.parametrize("jump_s", [0.0, 30.0, 2 * HOUR_S])
def test_a_deadline_waits_for_what_was_pushed_before_it_also_over_a_jump_ahead(
    fake: Connection, server_clock: Advance, jump_s: float
) -> None:
    """Groupers keep house here, and are behind with grouping."""
    with producing(fake, "r", {"group_deadline_s": DEADLINE_S}) as producer:
        run = join(fake, "r")
        live(run, server_clock, 1)
        producer.push([trajectory("g", 0, 2)])
        live(run, server_clock, 10)
        producer.push([trajectory("g", 1, 2)])
        server_clock(jump_s)
        assert all(live(run, server_clock, 80))
        assert group_all(run) == ["complete"]
    assert problems(run) == []
