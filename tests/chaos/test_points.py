"""A death at every named point: whoever it was starts again, and the run ends with nothing lost or twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from streamadv.run import open_run
from streamadv.status.evaluations import read_evaluations
from tests.support import some_of

from .checks import problems, total
from .scenario import World
from .victim import FETCH_PUBLISH, SAVE_COMMIT, script_names

#: Scripts that a thread calls, or that need a death, garbage, a second rank, several shards, a run without scorers, a
#: chain that fails on every group, a server that lost recent writes, a gateway, an archive, or prompts, which have
#: tests of deaths of their own.
ELSEWHERE = {
    "abandon", "ahead", "apply_scores", "attempt", "attend", "discard", "forget_producers", "leave_out",
    "note_failure", "reclaim", "reject", "unapply_batch", "unname_batch", "withdraw",
    "turn", "share", "archived",
    "describe_prompts", "end_prompts", "lease_prompt", "leave_prompts", "read_prompt_ends", "set_back_prompts",
    "select_prompts", "skip_prompts",
}  # fmt: skip


def play(url: str, run: str, dies: Callable[[str, int], bool]) -> World:
    world = World(url, run, dies)
    world.play()
    joined = open_run(world.connection, run)
    weights = [] if world.checkpoint is None else world.checkpoint[0]
    assert problems(joined, world.planned, weights, usable=world.usable) == []
    assert total(joined)["pushed"] == len(world.planned)
    shown = [(each.groups, each.trajectories, each.mean) for each in read_evaluations(joined)]
    assert shown == [(1, 2, 0.5)], "each evaluation group counts once"
    world.connection.close()
    return world


def test_scenario_without_deaths_reaches_every_script(redis_url: str, run: str) -> None:
    world = play(redis_url, run, lambda point, number: False)
    reached = {name.partition(":")[2] for name in world.reached if name.startswith("after:")}
    assert set(script_names()) - reached <= ELSEWHERE
    assert world.deaths == []


@pytest.mark.parametrize("name", some_of([name for name in script_names() if name not in ELSEWHERE], 6))
def test_death_before_and_after(name: str, redis_url: str, run: str) -> None:
    """Who has died before a script is started again, and dies after it."""
    deaths = [f"before:{name}", f"after:{name}"]
    world = play(redis_url, run, lambda here, number: here in deaths and number == 1)
    assert world.deaths == deaths


@pytest.mark.parametrize("point", [FETCH_PUBLISH, SAVE_COMMIT])
def test_death_between(point: str, redis_url: str, run: str) -> None:
    world = play(redis_url, run, lambda here, number: here == point and number == 1)
    assert world.deaths == [point]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_death_while_the_new_member_of_a_refused_packet_is_sent(
    when: str, number: int, redis_url: str, run: str
) -> None:
    point = f"mixed {when}:push"  # the first one refuses the packet, the second one has the new member alone
    world = play(redis_url, run, lambda here, count: here == point and count == number)
    assert world.deaths == [point]


def test_scripts_that_the_server_forgets_before_every_call(redis_url: str, run: str) -> None:
    with redis.Redis.from_url(redis_url) as other:

        def forget(point: str, number: int) -> bool:
            if point.partition(":")[0] in ("before", "mixed before"):
                other.script_flush()
            return False

        play(redis_url, run, forget)


def test_payloads_that_end_before_their_script_is_known(redis_url: str, run: str) -> None:
    """A producer that stops for a minute between the two tries at a script: its packets are sent again."""
    ended = []
    with redis.Redis.from_url(redis_url) as other:

        def hinder(point: str, number: int) -> bool:
            if point == "before:push" and number % 4 == 1:
                other.script_flush()  # the payloads are written, their script is not known
            elif point == "before:push" and number % 4 == 2:
                waiting = [key for key in other.scan_iter("*:payload:*") if other.pttl(key) > 0]
                ended.extend(waiting)
                for key in waiting:
                    other.pexpire(key, 1)
                while other.exists(*waiting) if waiting else False:
                    pass
            return False

        play(redis_url, run, hinder)
    assert len(ended) > 5
