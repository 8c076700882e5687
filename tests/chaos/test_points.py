"""A death at every named point: whoever it was starts again, and the run ends with nothing lost or twice."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from streamadv.run import open_run

from .checks import problems, total
from .scenario import World
from .victim import points, script_names

#: Scripts that need a death, garbage, a second rank, several shards, a run without scorers, or a server that lost
#: recent writes.
ELSEWHERE = {
    *("abandon", "ahead", "apply_scores", "attempt", "discard", "forget_producers", "leave_out", "reclaim"),
    *("reject", "unapply_batch", "unname_batch", "withdraw"),
}


def play(url: str, run: str, dies: Callable[[str, int], bool]) -> World:
    world = World(url, run, dies)
    world.play()
    joined = open_run(world.connection, run)
    weights = [] if world.checkpoint is None else world.checkpoint[0]
    assert problems(joined, world.planned, weights, usable=world.usable) == []
    assert total(joined)["pushed"] == len(world.planned)
    world.connection.close()
    return world


def test_scenario_without_deaths_reaches_every_script(redis_url: str, run: str) -> None:
    world = play(redis_url, run, lambda point, number: False)
    reached = {name.partition(":")[2] for name in world.reached if name.startswith("after:")}
    assert set(script_names()) - reached <= ELSEWHERE
    assert world.deaths == []


@pytest.mark.parametrize("point", [name for name in points() if name.partition(":")[2] not in ELSEWHERE])
def test_death_at(point: str, redis_url: str, run: str) -> None:
    world = play(redis_url, run, lambda here, number: here == point and number == 1)
    assert world.deaths == [point]


@pytest.mark.parametrize("number", range(4))
def test_deaths_everywhere(number: int, redis_url: str, run: str) -> None:
    chance = random.Random(f"{os.environ.get('STREAMADV_CHAOS_SEED', '0')}/{number}")
    play(redis_url, run, lambda point, count: chance.random() < 0.03)
