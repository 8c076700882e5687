"""A scripted producer: what it pushes follows from the seed, its journal says how far it has come.

A killed producer starts again with the groups it had not finished and some of those before, so that much is pushed
twice; whatever it does must be harmless when repeated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamadv.errors import Busy, GroupEndedError, TrajectoryError
from streamadv.producer import Producer
from streamadv.producer import logic as producer_logic
from streamadv.store.waiting import Blocked, Wait
from streamadv.trajectory.schema import Trajectory
from tests.support import ended, trajectory, unscored

from .checks import Identity
from .setup import Setup

WINDOW: Final = 3  # groups worked on at a time
KINDS: Final = {
    "whole": 10,
    "one_by_one": 6,
    "tickets": 4,
    "failing": 2,
    "cancelled": 1,
    "short": 1,
    "scored_later": 2,
    "unscored": 2,
    "unscorable": 1,
}


@dataclass(frozen=True)
class GroupPlan:
    """What a producer does with one group."""

    group_id: str
    kind: str
    size: int
    twice: bool
    required: set[Identity] = field(default_factory=set)  # places that must be registered in the end
    optional: set[Identity] = field(default_factory=set)  # taken only while the group is open
    usable: set[Identity] = field(default_factory=set)


def plan_group(seed: int, producer: int, number: int, scale: int = 1) -> GroupPlan:
    """The plan of a producer's n-th group, `scale` times as many members as usual."""
    chance = random.Random(f"{seed}/{producer}/{number}")
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    size = chance.choice((2, 4)) if kind in ("failing", "cancelled", "short") else chance.choice((1, 2, 4))
    size *= scale
    plan = GroupPlan(f"p{producer}-{number:05d}", kind, size, chance.random() < 0.2)
    places = [(plan.group_id, index) for index in range(size)]
    if kind == "cancelled":
        plan.required.update(places[:1])
        plan.optional.update(places[1:])
    elif kind == "short":
        plan.required.update(places[:-1])
    else:
        plan.required.update(places)
    plan.usable.update(plan.required - ({places[-1]} if kind == "failing" else set()))
    return plan


def journal_file(folder: Path, number: int) -> Path:
    return folder / f"producer-{number}.journal"


def read_journal(file: Path) -> tuple[list[int], dict[int, float]]:
    """Groups begun, in order, and when those done were."""
    begun, done = [], {}
    for line in file.read_text().splitlines() if file.exists() else ():
        word, number, when = line.split(" ")
        if word == "begin":
            begun.append(int(number))
        elif word == "done":
            done[int(number)] = float(when)
    return begun, done


def run_producer(setup: Setup, number: int) -> int:
    """Produce until the stop file is there, then finish."""
    vars(producer_logic)["HEARTBEAT_S"] = setup.heartbeat_s
    scorers = bool(setup.settings.get("scorers"))
    file = journal_file(setup.path, number)
    begun, done = read_journal(file)
    recent = max(done.values(), default=0.0) - setup.overlap_s
    again = [n for n in dict.fromkeys(begun) if done.get(n, recent) >= recent]
    following = max(begun, default=-1) + 1
    with (
        file.open("a", buffering=1) as journal,
        Producer(setup.url, setup.run, settings=setup.run_settings) as producer,
    ):
        working: dict[int, Iterator[None]] = {}
        while True:
            while len(working) < WINDOW:
                if again:
                    n = again.pop(0)
                elif not setup.stop_file.exists():
                    n, following = following, following + 1
                    journal.write(f"begin {n} {time.time():.3f}\n")
                else:
                    break
                working[n] = work_on(producer, plan_group(setup.seed, number, n, setup.scale), scorers)
            if not working:
                break
            for n, steps in list(working.items()):
                if next(steps, "done") == "done":
                    journal.write(f"done {n} {time.time():.3f}\n")
                    del working[n]
        producer.finish()
    return 0


def work_on(producer: Producer, plan: GroupPlan, scorers: bool) -> Iterator[None]:
    """Carry one plan out, step by step; without scorers what has no reward reaches its deadline."""
    chance = random.Random(plan.group_id)
    members = [_member(plan, index) for index in range(plan.size)]
    if plan.kind == "whole":
        _patiently(lambda: producer.push(members))
        yield
    elif plan.kind == "tickets":
        with suppress(GroupEndedError):
            for rollout in producer.begin_group(plan.size, group_id=plan.group_id):
                yield
                with rollout:
                    rollout.push(**_columns(rollout.rollout_index), reward=1.0)
        for member in members:
            _push(producer, member)
            yield
    elif plan.kind == "cancelled":
        with suppress(GroupEndedError, TrajectoryError):  # there is nothing left to cancel
            group = producer.begin_group(plan.size, group_id=plan.group_id)
            _push(producer, members[0])
            yield
            group.cancel(plan.size - 1)
        _push(producer, members[0])
    else:
        order = list(range(plan.size - (plan.kind == "short")))
        chance.shuffle(order)
        if plan.kind == "short" or (plan.kind == "unscored" and not scorers):
            with suppress(GroupEndedError):
                producer.begin_group(plan.size, group_id=plan.group_id, deadline_s=1.5).touch(2.0)
        for index in order:
            _push(producer, members[index])
            yield
        if plan.kind == "scored_later":
            for index in order:
                producer.score(plan.group_id, index, float(index))
                yield
    if plan.twice:
        _push(producer, members[0])


def _member(plan: GroupPlan, index: int) -> Trajectory:
    if plan.kind == "failing" and index == plan.size - 1:
        return ended(plan.group_id, index, plan.size, "failed")
    if plan.kind in ("scored_later", "unscored"):
        return unscored(plan.group_id, index, plan.size, values=[0.5] * 5)
    reward = None if plan.kind == "unscorable" else float(index)
    return trajectory(plan.group_id, index, plan.size, reward=reward, values=[0.5] * 5)


def _columns(index: int) -> dict[str, Any]:
    return {
        "input_ids": [index] * 5,
        "response_mask": [0, 0, 1, 1, 1],
        "rollout_log_probs": [-1.0] * 5,
        "values": [0.5] * 5,
    }


def _push(producer: Producer, member: Trajectory) -> None:
    _patiently(lambda: producer.push([member]))


def _patiently(push: Callable[[], object]) -> None:
    wait = Wait(Blocked("chaos", "not admitted", None), cap=0.2)
    while True:
        try:
            push()
        except Busy:
            wait.pause()
        else:
            return
