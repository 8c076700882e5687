"""A producer leaves: the prompts whose groups nobody has begun to play are there for others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import streamadv as sa
from streamadv.grouping import housekeeping
from streamadv.producer.prompted import PromptedGroups
from streamadv.store.scripts import run_script
from streamadv.trajectory.schema import Trajectory
from tests.support import join, trajectory

from .test_once import SIZE, prompts, record, stored

Push = Callable[[sa.Producer, Sequence[Trajectory]], Any]


@pytest.mark.parametrize("push", [sa.Producer.push, lambda producer, group: producer.push_many([group])])
def test_a_prompt_whose_group_was_pushed_by_its_id_is_not_for_others(
    redis_url: str, run: str, push: Push
) -> None:
    with sa.Producer(redis_url, run) as producer:
        _, group = next(producer.prompts(prompts(epochs=1), SIZE))
        push(producer, [trajectory(group.group_id, index, SIZE) for index in range(SIZE)])
    assert not stored(join(redis_url, run)).of("-")


def test_all_groups_that_nobody_has_touched_are_given_back_in_one_call(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def ask(client: Any, call: Any) -> Any:
        calls[call.script.name] += 1
        return run_script(client, call)

    with sa.Producer(redis_url, run) as producer:
        groups = producer.prompts(sa.Prompts(range(20), epochs=1), SIZE)
        held = [next(groups) for _ in range(10)]
        monkeypatch.setattr("streamadv.producer.producer.run_script", ask)
    assert len(stored(join(redis_url, run)).of("-")) == len(held)
    assert calls["leave_prompts"] <= 2


def test_a_group_of_another_size_that_is_removed_meanwhile_can_be_pushed(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer before has left, and a grouper removes its group between two calls of the one that follows."""

    def ask(client: Any, call: Any) -> Any:
        reply = run_script(client, call)
        if call.script.name == "begin" and reply[0] == b"mismatch":
            housekeeping.expire(joined, joined.home)
        return reply

    with sa.Producer(redis_url, run) as producer:
        next(producer.prompts(prompts(epochs=1), 2 * SIZE))
    joined = join(redis_url, run)
    monkeypatch.setattr("streamadv.producer.producer.run_script", ask)
    with sa.Producer(redis_url, run) as producer:
        _, group = next(producer.prompts(prompts(epochs=1), SIZE))
        group.push([{"rollout_index": each.rollout_index, **record(each)} for each in group])


def test_a_group_that_a_thread_gets_while_another_closes_is_for_others(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, begun, left = PromptedGroups.given, threading.Event(), threading.Event()

    def late(groups: PromptedGroups, group: Any) -> Any:
        begun.set()
        left.wait()
        return given(groups, group)

    monkeypatch.setattr(PromptedGroups, "given", late)
    with sa.Producer(redis_url, run) as producer:
        thread = threading.Thread(target=next, args=(producer.prompts(prompts(epochs=1), SIZE),))
        thread.start()
        begun.wait()
    left.set()
    thread.join()
    assert len(stored(join(redis_url, run)).of("-")) == 1


def test_shares_are_not_counted_from_behind_the_next_prompt(redis_url: str, run: str) -> None:
    """The run has lost its prompts and begun 9 anew; the checkpoint had begun 2."""
    given = sa.Prompts(range(40), epochs=1, shuffle=None).set
    joined = join(redis_url, run)
    state = joined.keys.home.prompt_state(given.name)
    joined.connection.scripts.hset(state, mapping={"born": "anew", "next:1": 9, "from:1": 9, "selected": 1})
    checkpoint = [given.name, given.text, "before", 1, 0, 0, 0, 1, 0, 0, 2]
    kinds = {f"prompt_{kind}": given.name for kind in ("state", "entries", "again", "given_up")}
    assert joined.home.call("set_back_prompts", ["0", *checkpoint], **kinds) == 1
    found: Any = joined.connection.scripts.hgetall(state)
    assert int(found[b"next:1"]) == 2
    assert int(found.get(b"from:1", 0)) <= 2
