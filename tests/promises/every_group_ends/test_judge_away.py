"""A judge that is away: its trajectories wait, whatever their tries and their deadlines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamadv import UnscoredTrajectory
from streamadv.errors import JudgeAwayError
from streamadv.grouping import away as away_module
from streamadv.grouping.away import Away
from streamadv.grouping.scorer import Scorer
from streamadv.grouping.scores import AWAY, ScoreError
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
    events = [getattr(each, "event", "") for each in caplog.records]
    assert events.count("judge_away") == 1  # a line now and then
    assert problems(joined) == []


def test_groups_that_wait_for_a_judge_keep_their_time(redis_url: str, run: str, forward: Forward) -> None:
    with producing(redis_url, run, {"scorers": ("s",), "group_deadline_s": 80.0}) as producer:
        joined = join(redis_url, run)
        for name in ("waiting", "also"):
            producer.push([unscored(name, 0, 2)])
        for name in ("waiting", "also"):
            make_overdue(joined, name, now_ms(joined) + 5000)
        away = Away(joined, "s")
        away.keep_groups_open()  # nobody is away
        away.pause_s(ScoreError(AWAY, "503"), 0)
        away.keep_groups_open()  # not for long
        left = [deadline - now_ms(joined) for _, deadline in deadlines(joined)]
        assert all(each <= 5000 for each in left)
        forward(11.0)
        away.keep_groups_open()
        assert all(deadline - now_ms(joined) > 70_000 for _, deadline in deadlines(joined))
        away.over()
    assert problems(joined) == []


def deadlines(joined: Any) -> list[tuple[bytes, float]]:
    found: list[tuple[bytes, float]] = joined.connection.scripts.zrange(
        joined.keys.shard(0).open, 0, -1, withscores=True
    )
    return found
