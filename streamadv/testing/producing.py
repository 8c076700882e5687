"""A producer of a scene as a process: its threads or tasks carry out what it has to do, then it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import doors
from ..producer import Producer
from ..producer.logic import LEAVE_S
from ..producer.requests import LOST_GROUPS_FIRST
from ..prompts import Prompts
from .excuses import is_quiet
from .players import Asyncio, Blocking
from .scene import RUN, Life
from .world import URL

if TYPE_CHECKING:
    from .pipeline import Pipeline


class Producing:
    """One producer, in all its lives. plan: what it has to do, of a scene's `producers`."""

    def __init__(self, pipeline: Pipeline, number: int, plan: dict[str, Any]) -> None:
        self._pipeline = pipeline
        self._world = pipeline.world
        self._number = number
        self._plan = plan
        self._finished: set[int] = set()  # operations

    def run(self) -> None:
        """One life."""
        plan, world = self._plan, self._world
        if self._number in self._pipeline.done:
            return
        name = f"engine-{self._number}" if plan["kind"] == "named" else None
        producer = Producer(URL, RUN, name=name, settings=self._pipeline.settings)
        life = Life(producer._logic.membership.name, world.process, world.time)
        if plan["kind"] == "asyncio":
            world.run_async(lambda: self._run_async(producer, life))
            return
        with producer:
            self._opened(life)
            self._at_once([partial(self._hand, due, producer, life) for due in plan["hands"]])
            self._at_once([partial(self._prompts, prompts, producer, life) for prompts in self._sets])
            if plan["ends"] == "finish":
                life.finishes = True
                producer.finish()
                life.finished = world.time
                world.moment()
            world.sleep(plan["lingers"])
            life.closed = world.time
            world.moment()
        self._left(life, producer)

    async def _run_async(self, producer: Any, life: Life) -> None:
        plan, world = self._plan, self._world
        if plan["ends"] == "serve":
            producer._logic.membership.serve(str)
        async with producer as opened:
            self._opened(life)
            await asyncio.gather(*(self._async_hand(due, opened, life) for due in plan["hands"]))
            players = [Asyncio(self._pipeline, opened, life, f"p{self._number}", 0.0) for _ in self._sets]
            played = zip(players, self._sets, strict=True)
            await asyncio.gather(*(player.do_prompts(each, plan["leaves"]) for player, each in played))
            if plan["ends"] in ("finish", "serve"):
                life.finishes = True
                await opened.finish()
                life.finished = world.time if plan["ends"] == "finish" else None
                world.moment()
            await asyncio.sleep(plan["lingers"])
            life.closed = world.time
            world.moment()
        self._left(life, producer)

    @property
    def _sets(self) -> list[Prompts]:
        return self._pipeline.prompts if self._pipeline.scene.prompts else []

    def _prompts(self, prompts: Prompts, producer: Producer, life: Life) -> None:
        player = Blocking(self._pipeline, producer, life, f"p{self._number}", 0.0)
        player.do_prompts(prompts, self._plan["leaves"])

    def _at_once(self, calls: Sequence[Callable[[], None]]) -> None:
        """Each in a thread of its own, the first one here."""
        threads = [doors.Thread(target=call, name="hand") for call in calls[1:]]
        for thread in threads:
            thread.start()
        for call in calls[:1]:
            call()
        for thread in threads:
            thread.join()

    def _hand(self, due: Any, producer: Producer, life: Life) -> None:
        """One of its threads."""
        for place, kind, pause in self._unfinished(due):
            self._world.sleep(pause)
            Blocking(self._pipeline, producer, life, *self._as_played(place)).carry_out(kind)
            self._finished.add(place)

    async def _async_hand(self, due: Any, producer: Any, life: Life) -> None:
        for place, kind, pause in self._unfinished(due):
            await asyncio.sleep(pause)
            await Asyncio(self._pipeline, producer, life, *self._as_played(place)).carry_out(kind)
            self._finished.add(place)

    def _unfinished(self, due: Any) -> Iterator[tuple[int, str, float]]:
        """Operations that no life has carried out: number, kind, and the pause before it."""
        return (each for each in due if each[0] not in self._finished)

    def _as_played(self, place: int) -> tuple[str, float]:
        """What the names of an operation's groups begin with, and the seconds of its rollouts."""
        return f"p{self._number}o{place}", self._plan["plays"]

    def _opened(self, life: Life) -> None:
        life.opened = self._world.time
        self._pipeline.lives.append(life)

    def _left(self, life: Life, producer: Any) -> None:
        world = self._world
        life.left = world.time
        unheard = producer._logic._unheard
        life.is_unheard = unheard is not None
        tried = life.left - (life.closed or life.left)
        was_quiet = unheard is not LOST_GROUPS_FIRST and is_quiet(
            world, life.process, life.left - LEAVE_S, life.left
        )
        if life.is_unheard and (tried < LEAVE_S - 1.0 or was_quiet):
            self._pipeline.violate(f"P2: producer {life.name} has left unheard after {tried:.1f} s")
        self._pipeline.done.add(self._number)
