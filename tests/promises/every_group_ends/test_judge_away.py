"""A judge that is away: its trajectories wait, whatever their tries and their deadlines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamadv import UnscoredTrajectory
from streamadv.errors import JudgeAwayError
from streamadv.grouping import away as away_module
from streamadv.grouping.away import Away
from streamadv.grouping.scorer import Scorer
from streamadv.grouping.scores import AWAY, ScoreError
from tests.clusters import until
from tests.support import (
    Forward,
    group_all,
    join,
    ledger,
    make_overdue,
    now_ms,
    problems,
    producing,
    threads,
    unscored,
)

from .test_scorer import wait_for_rollouts

Trajectories = Sequence[UnscoredTrajectory]
MANY = 12


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away_module, "FIRST_PAUSE_S", 0.0)


def raised(trajectories: Trajectories) -> list[Any]:
    raise JudgeAwayError("503 Service Unavailable")


def returned(trajectories: Trajectories) -> list[Any]:
    return [JudgeAwayError("503") if each.rollout_index == 1 else 1.0 for each in trajectories]


@pytest.mark.parametrize("away", [raised, returned])
@pytest.mark.parametrize("whole_groups", [False, True])
def test_an_outage_costs_no_try(
    redis_url: str,
    run: str,
    caplog: pytest.LogCaptureFixture,
    away: Callable[[Trajectories], Any],
    whole_groups: bool,
) -> None:
    calls = []

    async def judge(trajectories: Trajectories) -> list[Any]:
        calls.append(len(trajectories))
        return away(trajectories) if len(calls) <= MANY else [1.0] * len(trajectories)

    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("g", 0, 2), unscored("g", 1, 2)])
        scorer = Scorer(redis_url, run, "s", tries=1, whole_groups=whole_groups)
        with threads(lambda stop: scorer.run(judge, stop)):
            wait_for_rollouts(joined, 2)
        assert group_all(joined) == ["complete"]
    assert ledger(joined)["dropped"] == {}
    assert not joined.connection.scripts.exists(joined.keys.home.attempts)
    assert events(caplog).count("judge_away") == 1  # a line now and then
    assert problems(joined) == []


def test_a_judge_is_away_while_something_waits_for_it(
    redis_url: str, run: str, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if others are scored meanwhile, from a cache or by another judge."""
    caplog.set_level(logging.INFO)
    back = threading.Event()

    async def judge(trajectories: Trajectories) -> list[Any]:
        absent = JudgeAwayError("503")
        return [absent if each.group_id == "waits" and not back.is_set() else 1.0 for each in trajectories]

    with producing(redis_url, run, {"scorers": ("s",), "group_deadline_s": 80.0}) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("waits", 0, 1)])
        scorer = Scorer(redis_url, run, "s")
        with threads(lambda stop: scorer.run(judge, stop)):
            until(lambda: "judge_away" in events(caplog), "the judge is asked")
            make_overdue(joined, "waits", now_ms(joined) + 5000)
            for number in range(6):
                forward(3.0)
                producer.push([unscored(f"g{number}", 0, 1)])
                wait_for_rollouts(joined, number + 1)
            until(lambda: deadlines(joined)["waits"] - now_ms(joined) > 60_000, "it gets its time again")
            assert "judge_back" not in events(caplog)
            back.set()
            wait_for_rollouts(joined, 7)
            until(lambda: "judge_back" in events(caplog), "nothing waits")
        assert group_all(joined) == ["complete"] * 7
    assert problems(joined) == []


def test_groups_that_wait_for_a_judge_keep_their_time(redis_url: str, run: str, forward: Forward) -> None:
    with producing(redis_url, run, {"scorers": ("s",), "group_deadline_s": 80.0}) as producer:
        joined = join(redis_url, run)
        for name in ("waiting", "also"):
            producer.push([unscored(name, 0, 2)])
        away = Away(joined, "s")

        def kept() -> bool:
            for name in ("waiting", "also"):
                make_overdue(joined, name, now_ms(joined) + 5000)
            away.keep_groups_open()
            left = [deadline - now_ms(joined) for deadline in deadlines(joined).values()]
            assert len({each > 5000 for each in left}) == 1
            return left[0] > 70_000

        assert not kept()  # nobody is away
        away.pause_s(ScoreError(AWAY, "503"), 0)
        assert kept()
        assert not kept()  # they were just now
        away.over()
        away.pause_s(ScoreError(AWAY, "503"), 0)
        assert not kept()
        forward(11.0)
        assert kept()
        away.over()
    assert problems(joined) == []


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(each, "event", "") for each in caplog.records]


def deadlines(joined: Any) -> dict[str, float]:
    found = joined.connection.scripts.zrange(joined.keys.shards[0].open, 0, -1, withscores=True)
    return {name.decode(): float(at) for name, at in found}
