"""A scorer that is asked for whole groups, whichever processes hold their packets."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from streamadv import UnscoredTrajectory
from streamadv.grouping import scorer as scorer_module
from streamadv.grouping.groups_log import read_log
from streamadv.grouping.scorer import Scorer
from streamadv.run import Run
from streamadv.run.consumer import Consumer, Entry
from tests.clusters import until
from tests.support import (
    ended,
    group_all,
    join,
    ledger,
    make_overdue,
    problems,
    producing,
    references,
    threads,
    trajectory,
    unscored,
)

from .test_scorer import wait_for_rollouts

Trajectories = Sequence[UnscoredTrajectory]
JUDGE = {"scorers": ("judge",), "partial_min_usable": 1}


class Ranking:
    """A function that gives each trajectory its place in its group, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, trajectories: Trajectories) -> list[Any]:
        self.asked.append([each.name for each in trajectories])
        return [float(place) for place in range(len(trajectories))]


def consumer(run: Run) -> Consumer:
    for shard in run.shards:
        shard.call("ensure_group", ["judge"], stream=shard.keys.scoring("judge"))
    stream = operator.methodcaller("scoring", "judge")
    return Consumer(run, "judge", stream, lease_s=0.5, stop=threading.Event())


def rewards(run: Run) -> list[float | None]:
    (group,) = read_log(run, 0, "0-0", 10)
    return [member.reward for member in references(group)]


def test_a_function_is_asked_for_a_group_when_all_its_rollouts_have_ended(redis_url: str, run: str) -> None:
    ranking = Ranking()
    with producing(redis_url, run, JUDGE) as producer:
        joined = join(redis_url, run)
        scorer = Scorer(redis_url, run, "judge", whole_groups=True, batch_size=2)
        with threads(lambda stop: scorer.run(ranking, stop)):
            for index in (2, 0):
                producer.push([unscored("g", index, 5)])
            producer.push([trajectory("g", 3, 5, reward=7.0)])
            producer.push([unscored("alone", 0, 1)])
            wait_for_rollouts(joined, 2)
            assert ranking.asked == [["alone/0"]]
            producer.push([unscored("g", 1, 5), ended("g", 4, 5, "failed")])
            until(lambda: "partial" in group_all(joined) or len(ranking.asked) == 2, "the group is scored")
            wait_for_rollouts(joined, 1, lambda: len(ranking.asked) == 2)
        group_all(joined)
    assert ranking.asked[1] == ["g/0", "g/1", "g/2"]
    logged = {group.group_id: group for group in read_log(joined, 0, "0-0", 10)}
    assert [member.reward for member in references(logged["g"])] == [0.0, 1.0, 2.0, 7.0]
    assert problems(joined) == []


def test_one_of_several_processes_scores_a_group_that_all_of_them_hold(redis_url: str, run: str) -> None:
    with producing(redis_url, run, JUDGE) as producer:
        joined = join(redis_url, run)
        for index in range(3):
            producer.push([unscored("g", index, 3)])
        sides = [
            (Scorer(redis_url, run, "judge", whole_groups=True), Ranking(), consumer(joined))
            for _ in range(3)
        ]
        for scorer, ranking, reader in reversed(sides):  # the last one has the oldest entry
            assert scorer.work(reader, reader.read(1, wait=False), ranking) == []
        assert [len(ranking.asked) for _, ranking, _ in sides] == [0, 0, 0]
        scorer, ranking, reader = sides[2]
        scorer.work(reader, [], ranking)
        assert ranking.asked == [["g/0", "g/1", "g/2"]]
        for scorer, ranking, reader in sides:
            scorer.work(reader, [], ranking)
            assert reader.in_hand == "no entries"
        assert [len(ranking.asked) for _, ranking, _ in sides] == [0, 0, 1]
        assert group_all(joined) == ["complete"]
    assert rewards(joined) == [0.0, 1.0, 2.0]
    assert problems(joined) == []


def test_what_a_dead_process_held_is_scored_by_another_each_try_counted(redis_url: str, run: str) -> None:
    ranking = Ranking()
    with producing(redis_url, run, JUDGE) as producer:
        joined = join(redis_url, run)
        for index in range(2):
            producer.push([unscored("g", index, 2)])
        dead, reader = consumer(joined), consumer(joined)
        dead.read(1, wait=False)
        scorer = Scorer(redis_url, run, "judge", whole_groups=True)
        scorer.work(reader, reader.read(1, wait=False), ranking)
        assert ranking.asked == []
        dead.give_back()
        entries: list[Entry] = []
        until(lambda: entries.extend(reader.read(1, wait=False)) or entries, "the entry is taken over")
        assert entries[0].reclaimed
        scorer.work(reader, entries, ranking)
        assert ranking.asked == [["g/0", "g/1"]]
        assert not joined.connection.scripts.exists(joined.keys.home.attempts)
        assert group_all(joined) == ["complete"]
    assert problems(joined) == []


def test_a_group_is_tried_again_whole_and_costs_only_what_has_no_score(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_module, "FIRST_DELAY_S", 0.0)
    asked: list[int] = []

    async def judge(trajectories: Trajectories) -> list[Any]:
        asked.append(len(trajectories))
        return [ValueError("no parse") if each.rollout_index == 1 else 1.0 for each in trajectories]

    with producing(redis_url, run, JUDGE) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("g", index, 3) for index in range(3)])
        with threads(
            lambda stop: Scorer(redis_url, run, "judge", whole_groups=True, tries=2).run(judge, stop)
        ):
            wait_for_rollouts(joined, 3)
        assert group_all(joined) == ["partial"]
    assert asked == [3, 3]
    assert ledger(joined)["dropped"] == {"unscorable": 1}
    assert problems(joined) == []


def test_a_group_that_ends_before_it_is_whole_is_scored_by_nobody(redis_url: str, run: str) -> None:
    ranking = Ranking()
    with producing(redis_url, run, JUDGE) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("g", 0, 2)])
        scorer = Scorer(redis_url, run, "judge", whole_groups=True)
        with threads(lambda stop: scorer.run(ranking, stop)):
            make_overdue(joined, "g")
            group_all(joined)
            wait_for_rollouts(joined, 0, lambda: ledger(joined)["in_flight"] == 0)
        group_all(joined)
    assert ranking.asked == []
    assert problems(joined) == []
