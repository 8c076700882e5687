"""Operations of producers: each pushes groups in its own way, and notes what the server has answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..errors import Busy, GroupEndedError, RunEndedError, StreamadvError, TrajectoryError
from ..gateway.options import Options
from ..gateway.refusals import RefusedError
from ..gateway.sessions import Session, Sessions
from ..gateway.turns import Turn
from ..integrations.engines import Completion
from ..prompts import Prompts
from ..trajectory.schema import Trajectory, parse_trajectory
from .scene import SECOND_SCORE, SLOW_S, Group, Life, Violation

if TYPE_CHECKING:
    from .pipeline import Pipeline


#: Of one operation that nobody paces.
MOST_GROUPS: Final = 8
Answer = TypeVar("Answer")
#: Of a deadline that somebody puts off.
LONGEST_S: Final = 20.0
#: Of an agent at a gateway.
TURNS: Final = 3
#: Columns of some groups.
IMAGE: Final = {"image": [[1, 2], [3, 4]]}


class _Play:
    """What both kinds of producer do."""

    def __init__(self, pipeline: Pipeline, producer: Any, life: Life, prefix: str, plays: float) -> None:
        self.pipeline = pipeline
        self.world = pipeline.world
        self.producer = producer
        self.life = life
        self.prefix = prefix
        self.plays = plays  # seconds of one rollout
        self.asked = self.world.time
        self.played_s = 0.0  # seconds of the operation that were no waiting
        self.reward: dict[str, Any] = {"reward_later": True} if pipeline.scene.scored else {}
        self.needed: dict[str, Any] = {"ref_log_probs": [-1.0] * 5} if pipeline.scene.needs else {}

    def trajectory(self, group: Group, index: int) -> Trajectory:
        record = {
            "group_id": group.id,
            "group_size": group.size,
            "rollout_index": index,
            **self.columns(index),
        }
        return parse_trajectory(record | ({"role": group.role} if group.role != "train" else {}))

    def fails(self, index: int, begun: Any) -> bool:
        """Whether rollouts of this group of a prompt fail: of one always, of another one at the first try."""
        return index == 0 or (index == 1 and begun.group_id.endswith(":0"))

    def of_prompt(self, index: int, begun: Any) -> dict[str, Any]:
        """The column that the chain may need, which a third prompt lacks at the first try."""
        lacks = index == 2 and begun.group_id.endswith(":0")
        return {} if lacks or not self.pipeline.scene.needs else {"ref_log_probs": [-1.0] * 5}

    def columns(self, index: int) -> dict[str, Any]:
        reward = self.reward or {"reward": float(index)}
        return {
            "input_ids": [1, 2, 3, 4, 5],
            "response_mask": [0, 0, 1, 1, 1],
            "rollout_log_probs": [-1.0] * 5,
            **self.needed,
            **reward,
        }

    def noted(self, group: Group, codes: Sequence[str], first: int = 0) -> None:
        for index, code in enumerate(codes, first):
            self.pipeline.answers.note(self.life, self.asked, group, index, code)


class Blocking(_Play):
    def carry_out(self, kind: str) -> None:
        self.asked = self.world.time
        # Done by an earlier life, or the run has ended meanwhile.
        with suppress(GroupEndedError, RunEndedError):
            getattr(self, f"do_{kind}")()
        self.pipeline.answers.waited(self.life, self.asked + self.played_s)
        self.pipeline.answers.played(kind, self.asked)

    def _played(self, group: Group, rollout: Any, seconds: float | None = None) -> None:
        self.world.moment()
        seconds = self.plays if seconds is None else seconds
        self.world.sleep(seconds)
        self.played_s += seconds
        self.pipeline.answers.look_at_played(group)
        code = rollout.push(**self.columns(rollout.rollout_index))
        if rollout.rollout_index < group.size:
            self.noted(group, [code], rollout.rollout_index)

    def _pushed(self, group: Group, indices: Sequence[int]) -> None:
        while True:
            try:
                result = self.producer.push([self.trajectory(group, index) for index in indices])
            except Busy:
                self.world.sleep(0.5)
                continue
            self.noted(group, result.codes, indices[0])
            return

    def do_push(self) -> None:
        self._pushed(self.pipeline.plan_group(self.prefix), (0, 1))

    def do_single(self) -> None:
        group = self.pipeline.plan_group(self.prefix)
        for index in range(2):
            self._pushed(group, (index,))

    def do_slow(self) -> None:
        """A group with a deadline of its own."""
        group = self.pipeline.plan_group(self.prefix, deadline_s=SLOW_S)
        with self.producer.group(2, group_id=group.id, deadline_s=SLOW_S) as begun:
            for rollout in list(begun)[:2]:
                self._played(group, rollout, 6.0)

    def do_many(self) -> None:
        groups = [self.pipeline.plan_group(f"{self.prefix}.{number}") for number in range(2)]
        results = self.producer.push_many([[self.trajectory(g, index) for index in range(2)] for g in groups])
        for group, result in zip(groups, results, strict=True):
            self.noted(group, result.codes)

    def do_group(self) -> None:
        group = self.pipeline.plan_group(self.prefix)
        with self.producer.group(2, group_id=group.id) as begun:
            for rollout in begun:
                self._played(group, rollout)

    def do_run(self) -> None:
        group = self.pipeline.plan_group(self.prefix)
        self.producer.begin_group(2, group_id=group.id).run(lambda rollout: self._played(group, rollout))

    def do_groups(self) -> None:
        """Two groups, the second one begun ahead."""
        for number, begun in enumerate(self.producer.groups(2, ahead=1)):
            # It was opened at some time since it was asked for: the reply may have been long under way.
            group = self.pipeline.plan_group(begun.group_id, begun=self.asked)
            for rollout in begun:
                self._played(group, rollout)
            if number:
                break

    def do_fail(self) -> None:
        group = self.pipeline.plan_group(self.prefix, whole=False)
        with self.producer.group(2, group_id=group.id) as begun:
            rollouts = list(begun)
            rollouts[0].push(**self.columns(0))
            rollouts[1].fail()

    def do_cancel(self) -> None:
        group = self.pipeline.plan_group(self.prefix, whole=False)
        begun = self.producer.begin_group(2, group_id=group.id)
        with suppress(TrajectoryError):
            begun.cancel(len(begun))  # a slot that stays would keep others from admission until the deadline

    def do_touch(self) -> None:
        """A deadline that is put off when most of it is over; the last rollout ends after the first one."""
        group = self.pipeline.plan_group(self.prefix)
        own_s = self.pipeline.scene.deadline_s
        with self.producer.group(2, group_id=group.id) as begun:
            self.world.sleep(0.7 * min(own_s, LONGEST_S))
            asked = self.world.time
            if begun.touch(own_s):
                self.pipeline.answers.touched(self.life, asked, group)
            for rollout in begun:
                self._played(group, rollout, 0.35 * min(own_s, LONGEST_S))

    def do_score(self) -> None:
        """The producer brings the rewards after the pushes, where no scorer does."""
        if not self.pipeline.scene.scored:
            self.reward = {"reward_later": True}
        group = self.pipeline.plan_group(self.prefix, whole=self.pipeline.scene.scored)
        self._pushed(group, (0, 1))
        if not self.pipeline.scene.scored:
            self.world.sleep(self.plays)
            codes = [self.producer.score(group.id, index, float(index)) for index in range(2)]
            self.producer.score(group.id, 0, SECOND_SCORE)
            self.pipeline.answers.note_scored(self.life, self.asked, group, codes)

    def do_unscored(self) -> None:
        """One of the members gets no reward, where no scorer brings them."""
        if self.pipeline.scene.scored:
            return self.do_push()
        self.reward = {"reward_later": True}
        group = self.pipeline.plan_group(self.prefix, whole=False)
        self._pushed(group, (0, 1))
        for index, reward in enumerate((0.0, None)):
            self.world.sleep(self.plays)
            self.producer.score(group.id, index, reward)

    def do_bare(self) -> None:
        """A group without the column that the chain may need: then it becomes a dead letter."""
        self.needed = {}
        self._pushed(self.pipeline.plan_group(self.prefix, whole=not self.pipeline.scene.needs), (0, 1))

    def do_eval(self) -> None:
        self._pushed(self.pipeline.plan_group(self.prefix, role="eval"), (0, 1))

    def do_prompts(self, prompts: Prompts, leaves: int) -> None:
        """All prompts of the set, together with the other producers; or only so many, unless 0."""
        iterator = self.producer.prompts(prompts, 2)
        for index, begun in iterator:
            leaves -= 1
            group = self.pipeline.plan_group(begun.group_id, whole=False)
            for rollout in begun:
                self.needed = self.of_prompt(index, begun)
                if self.fails(index, begun):
                    rollout.fail()
                else:
                    self._played(group, rollout, 0.1)
            if leaves == 0:
                self.pipeline.left.append(iterator)
                return
        self.pipeline.prompts_over.append(self.world.time)

    do_turns = do_again = do_group  # a gateway is an asyncio producer, and nobody cancels a thread's call

    def do_later(self) -> None:
        """Another pause, in which heartbeats and heavy faults may come."""
        self.world.sleep(5.0)
        self.do_push()


class Asyncio(_Play):
    async def carry_out(self, kind: str) -> None:
        self.asked = self.world.time
        with suppress(GroupEndedError, RunEndedError):
            await getattr(self, f"do_{kind}")()
        self.pipeline.answers.waited(self.life, self.asked + self.played_s)
        self.pipeline.answers.played(kind, self.asked)

    async def do_push(self) -> None:
        group = self.pipeline.plan_group(self.prefix)
        while True:
            try:
                result = await self.producer.push([self.trajectory(group, index) for index in range(2)])
            except Busy:
                await asyncio.sleep(0.5)
                continue
            self.noted(group, result.codes)
            return

    do_later = do_single = do_touch = do_score = do_unscored = do_bare = do_push

    async def do_many(self) -> None:
        """Tasks at once."""
        groups = [self.pipeline.plan_group(f"{self.prefix}.{number}") for number in range(2)]
        await asyncio.gather(*(self._whole(group) for group in groups))

    async def _whole(self, group: Group, **options: Any) -> None:
        with suppress(GroupEndedError, RunEndedError):
            async with self.producer.group(2, group_id=group.id, **options) as begun:
                await self._push_all(group, begun)

    async def _push_all(self, group: Group, begun: Any) -> None:
        for rollout in begun:
            await self._played(group, rollout)

    async def do_prompts(self, prompts: Prompts, leaves: int) -> None:
        iterator = self.producer.prompts(prompts, 2)
        async for index, begun in iterator:
            leaves -= 1
            group = self.pipeline.plan_group(begun.group_id, whole=False)
            for rollout in begun:
                self.needed = self.of_prompt(index, begun)
                if self.fails(index, begun):
                    await rollout.fail()
                else:
                    await self._played(group, rollout, 0.1)
            if leaves == 0:
                self.pipeline.left.append(iterator)
                return
        self.pipeline.prompts_over.append(self.world.time)

    async def _played(self, group: Group, rollout: Any, seconds: float | None = None) -> None:
        self.world.moment()
        seconds = self.plays if seconds is None else seconds
        await asyncio.sleep(seconds)
        self.played_s += seconds
        self.pipeline.answers.look_at_played(group)
        code = await rollout.push(**self.columns(rollout.rollout_index))
        if rollout.rollout_index < group.size:
            self.noted(group, [code], rollout.rollout_index)

    async def do_group(self) -> None:
        await self._whole(self.pipeline.plan_group(self.prefix))

    async def do_turns(self) -> None:
        """Agents play by turns that a gateway keeps."""
        if self.pipeline.scene.needs:
            return await self.do_push()
        group = self.pipeline.plan_group(self.prefix, whole=False)
        begun = await self.producer.begin_group(2, group_id=group.id)
        options = Options(("http://engine",), idle_s=group.deadline_s)
        sessions = Sessions(self.producer, options, lambda _: None)
        await asyncio.gather(*(self._turns(group, sessions, rollout.ticket) for rollout in begun))

    async def _turns(self, group: Group, sessions: Sessions, ticket: Any) -> None:
        said, session = [ticket.rollout_index], None
        for number in range(TURNS):
            await asyncio.sleep(self.plays / TURNS)
            sampled = Completion(said, [100 + number, 200 + number], [-1.0, -2.0], "stop")
            turn = Turn([sampled], digest=str(number))
            session = await self._until_answered(partial(self._turn, sessions, ticket, turn))
            if session is None:
                return
            said = [*said, *sampled.token_ids]
        reward = self.reward or {"reward": float(ticket.rollout_index)}
        ended = await self._until_answered(partial(sessions.end, ticket, reward))
        if ended is None or ended["ended"] != "pushed":
            return
        # Another row is of an agent that an earlier life of the producer had let play.
        if session is not None and said not in session.episode.rows:
            raise Violation(f"P12: an agent has seen {said}, pushed were {session.episode.rows}")
        if ticket.rollout_index < group.size:
            self.noted(group, [ended["result"]], ticket.rollout_index)

    async def _turn(self, sessions: Sessions, ticket: Any, turn: Turn) -> Session:
        session = await sessions.get(ticket)
        await sessions.commit(session, turn)
        return session

    async def _until_answered(self, ask: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """As a client does: again while the gateway says so. None if the rollout is over."""
        while True:
            try:
                return await ask()
            except RefusedError as error:
                if error.status == 410:
                    return None
                if error.status != 503:
                    raise
            except Busy:  # the gateway makes 503 of it
                pass
            await asyncio.sleep(1.0)

    async def do_slow(self) -> None:
        await self._whole(self.pipeline.plan_group(self.prefix, deadline_s=SLOW_S), deadline_s=SLOW_S)

    async def do_run(self) -> None:
        group = self.pipeline.plan_group(self.prefix)
        begun = await self.producer.begin_group(2, group_id=group.id)
        await begun.run(lambda rollout: self._played(group, rollout))

    async def do_groups(self) -> None:
        """Somebody waits for groups and is cancelled."""
        self.life.leaves_open = True
        await self._cancel(asyncio.create_task(self._iterate()))

    do_cancel = do_groups

    async def do_again(self) -> None:
        """Two tasks begin a group, and one of them is cancelled: the other one plays it."""
        group = self.pipeline.plan_group(self.prefix)
        task = asyncio.create_task(self.producer.begin_group(2, group_id=group.id))
        plays = asyncio.create_task(self._whole(group))
        await self._cancel(task)
        await plays

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        draw = self.world.plan.choose(
            f"{self.prefix}/cancelled",
            lambda source: source.choice((1e-4, 2e-4, 4e-4, 6e-4, 1e-3, 0.01, 1.0)),
        )
        await asyncio.wait({task}, timeout=draw or 3e-4)
        task.cancel()
        with suppress(asyncio.CancelledError, StreamadvError):
            await task

    async def _iterate(self) -> None:
        left = MOST_GROUPS
        async for begun in self.producer.groups(2, ahead=2):
            group = self.pipeline.plan_group(begun.group_id, whole=False, begun=self.asked)
            await self._push_all(group, begun)
            left -= 1
            if not left:  # nothing but the cancellation ends an unpaced loop
                return

    async def do_fail(self) -> None:
        group = self.pipeline.plan_group(self.prefix, whole=False)
        async with self.producer.group(2, group_id=group.id) as begun:
            rollouts = list(begun)
            await rollouts[0].push(**self.columns(0))
            await rollouts[1].fail()

    async def do_eval(self) -> None:
        group = self.pipeline.plan_group(self.prefix, role="eval")
        with suppress(Busy):
            result = await self.producer.push([self.trajectory(group, index) for index in range(2)])
            self.noted(group, result.codes)
