"""What a producer does, without I/O: generators that yield requests and receive replies.

`producer.py` drives them with a blocking client, `async_producer.py` with an asyncio one, so that admission,
dedupe codes, slicing and retries exist once. torch is not imported here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from redis.exceptions import OutOfMemoryError

from ..errors import Busy, TrajectoryError
from ..messages import brief
from ..run.manifest import MAX_DEADLINE_S
from ..store.keys import ShardKeys
from ..store.reasons import Reason
from ..store.retry import RETRYABLE, Outage
from ..store.scripts import script_call
from ..trajectory.schema import Trajectory
from .admission import push_codes
from .beginning import Beginner
from .membership import STAGE
from .records import (
    MAX_SLICE_RECORDS,
    Ending,
    Record,
    encode_record,
    ended_places,
    ending_request,
    push_request,
    slices,
)
from .requests import Pause, Steps
from .tickets import PushResult, Ticket, check_score, check_seconds


class ProducerLogic(Beginner):
    """The state and the steps behind a producer."""

    def push(
        self, trajectories: Sequence[Trajectory], epoch: int | None, places: int | None
    ) -> Steps[PushResult]:
        """Push records of one group. Raises Busy when that opens the group and it is not admitted."""
        manifest = self.joined
        if not trajectories:
            return PushResult([])
        for position, each in enumerate(trajectories):
            if not isinstance(each, Trajectory):
                raise TrajectoryError(f"record {position} is {brief(each)}, needs to be a Trajectory")
        first = trajectories[0]
        size = first.group_size
        for trajectory in trajectories:
            if (trajectory.group_id, trajectory.group_size) != (first.group_id, size):
                raise TrajectoryError(
                    f"group {trajectory.group_id} of {trajectory.group_size} is pushed together with group "
                    f"{first.group_id} of {size}: push one group at a time"
                )
        yield from self._check_rewards(trajectories)
        yield from self._reopen()
        yield from self._register_extras(trajectories)
        places = places or size + manifest.redundancy
        records = [encode_record(trajectory, self.joined.max_trajectory_bytes) for trajectory in trajectories]

        def send(max_bytes: int | None = None) -> Steps[PushResult]:
            def spec(elsewhere: int | None) -> list[Any]:
                return self._admission(
                    first.group_id, size, places, first.data_source, None, max_bytes, elsewhere
                )

            return (yield from self._push_records(spec, records, epoch or 0))

        admitted = epoch is not None
        first_try = send if admitted else partial(send, self._room(first.group_id))
        return (yield from self._remembered(first.group_id, send, records, admitted, first_try))

    def end_places(self, ticket: Ticket, indices: Sequence[int], kind: str) -> Steps[PushResult]:
        """Record that these rollouts ended without a trajectory: `kind` failed, aborted or cancelled."""
        return (yield from self._end(ticket, [Ending(index, kind, "") for index in indices], ""))

    def cancel(self, ticket: Ticket, count: int, free: Collection[int]) -> Steps[PushResult]:
        """Cancel `count` of the places `free`: the highest ones that nobody has ended elsewhere."""
        allowed = "".join("1" if place in free else "0" for place in range(ticket.places))
        endings = [Ending(-1, "cancelled", secrets.token_hex(8)) for _ in range(count)]
        return (yield from self._end(ticket, endings, allowed))

    def _end(self, ticket: Ticket, endings: Sequence[Ending], allowed: str) -> Steps[PushResult]:
        spec = self._admission(ticket.group_id, ticket.group_size, ticket.places, ticket.data_source, None)

        def send() -> Steps[PushResult]:
            codes, indices, rest = [], list[int](), allowed
            for start in range(0, len(endings), MAX_SLICE_RECORDS):
                part = endings[start : start + MAX_SLICE_RECORDS]
                reply = yield from self._end_slice(spec, part, rest)
                indices += ended_places(reply, part)
                if b"range" in reply and allowed:
                    raise TrajectoryError(
                        f"cancel: {len(endings)} rollouts of group {ticket.group_id} were to be cancelled, the rest "
                        f"has ended: {', '.join(map(str, indices)) or 'none'} cancelled now"
                    )
                codes += push_codes(reply, *spec[:3])
                rest = rest[: min(indices, default=len(rest))] if rest else rest
            return PushResult(codes, indices)

        return (yield from self._remembered(ticket.group_id, send, admitted=True))

    def _end_slice(self, spec: list[Any], endings: Sequence[Ending], allowed: str) -> Steps[list[Any]]:
        keys, room = self._keys(spec[0]), self._room_for_push()
        while True:
            try:
                reply: list[Any] = yield from self._laid_out(
                    partial(ending_request, keys, spec, endings, allowed)
                )
                return reply
            except OutOfMemoryError:
                yield from self._wait_for_room(room)

    def score(
        self, group_id: str, rollout_index: int, reward: float | None, rewards: Mapping[str, float] | None
    ) -> Steps[str]:
        """Bring the reward of a pushed trajectory: 'scored', 'duplicate', 'ended' or 'unknown'."""
        scored = check_score(group_id, rollout_index, reward, rewards)
        keys = self._keys(group_id)
        score: dict[str, Any] = {"reward": scored.reward} | ({"rewards": scored.rewards} if rewards else {})
        value = "" if scored.reward is None else repr(scored.reward)
        call = script_call(
            "score",
            [keys.void, keys.group(group_id), keys.ended, keys.ended_before, keys.scored],
            [group_id, scored.rollout_index, value, json.dumps(score)],
        )

        def send() -> Steps[PushResult]:
            reply = yield call
            return PushResult([reply.decode()])

        result = yield from self._remembered(group_id, send)
        return result.codes[0]

    def touch(self, group_id: str, deadline_s: float | None) -> Steps[bool]:
        """Extend the group's deadline; False when the group has ended."""
        keys = self._keys(group_id)
        deadline_s = check_seconds("deadline_s", deadline_s, MAX_DEADLINE_S)
        milliseconds = round((deadline_s or self.joined.group_deadline_s) * 1000)
        reply = yield script_call(
            "touch",
            [keys.void, keys.open, keys.group(group_id), keys.ledger],
            [group_id, milliseconds, self.name],
        )
        return bool(reply)

    def _remembered(
        self,
        group_id: str,
        send: Callable[[], Steps[PushResult]],
        records: Sequence[Record] = (),
        admitted: bool = False,
        first_try: Callable[[], Steps[PushResult]] | None = None,
    ) -> Steps[PushResult]:
        """Send, and keep it for a server that comes back without it.

        A group once admitted that the server has forgotten is admitted again by this: waits instead of Busy.
        """
        shard = self.joined.keys.shard_of(group_id)
        server_id = self._resend.server_of(shard)
        room = self._room_for_push()
        while True:
            try:
                result = yield from (first_try or send)()
                break
            except Busy as busy:
                if not admitted:
                    raise
                yield from self._wait_for_room(room, Reason(*busy.reason))
        self._resend.remember(shard, server_id, sum(record.size for record in records), send)
        return result

    def _push_records(
        self, spec: Callable[[int | None], list[Any]], records: Sequence[Record], epoch: int
    ) -> Steps[PushResult]:
        """spec: arguments of the group's admission, given how many groups count in the other shards."""
        codes: list[str] = []
        keys = self._keys(spec(None)[0])
        for start, stop in slices([record.size for record in records]):
            codes += yield from self._push_slice(keys, spec, records[start:stop], epoch)
        pushed = [
            record.rollout_index for record, code in zip(records, codes, strict=True) if code == "pushed"
        ]
        return PushResult(codes, pushed)

    def _push_slice(
        self,
        keys: ShardKeys,
        spec: Callable[[int | None], list[Any]],
        records: Sequence[Record],
        epoch: int,
    ) -> Steps[list[str]]:
        outage, room = Outage(STAGE), self._room_for_push()
        elsewhere: int | None = None
        while True:
            args = spec(elsewhere)
            try:
                reply = yield from self._laid_out(
                    partial(push_request, self.joined, keys, args, records, epoch)
                )
            except RETRYABLE as error:
                yield Pause(outage.delay_after(error))
                continue
            except OutOfMemoryError:  # above maxmemory, the fuse: what is there drains, then there is room
                yield from self._wait_for_room(room)
                continue
            if elsewhere is None and self._over_share(reply):
                counts = yield from self._groups_ahead()
                elsewhere = sum(counts) - counts[self.joined.keys.shard_of(args[0])]
                continue
            return push_codes(reply, *args[:3])

    def _check_rewards(self, trajectories: Iterable[Trajectory]) -> Steps[None]:
        """A trajectory whose reward nobody brings would keep its group open until the deadline."""
        waiting = [each for each in trajectories if each.waits_for_reward and not each.reward_later]
        if waiting and not self.joined.scorers:  # some may have been named since
            yield from self._agree()
        if waiting and not self.joined.scorers:
            raise TrajectoryError(
                f"reward: trajectory {waiting[0].group_id}/{waiting[0].rollout_index} has none, and run {self.run} "
                f"has no scorers to bring it: give reward (None = unscorable), name scorers in the settings of the "
                f"run, or say reward_later=True and bring it with producer.score"
            )

    def _register_extras(self, trajectories: Iterable[Trajectory]) -> Steps[None]:
        """An extra column's dtype and shape are fixed by its first push."""
        manifest = self.joined
        kinds = dict.fromkeys(
            (name, json.dumps([column.data.dtype.str, list(column.data.shape[1:]), column.per_token]))
            for trajectory in trajectories
            for row in trajectory.rows
            for name, column in row.extras.items()
        )
        if any(name not in manifest.columns for name, _ in kinds):
            manifest = yield from self._agree(dict(reversed(kinds)))
        for name, kind in kinds:
            if manifest.columns.get(name) != kind:
                raise TrajectoryError(
                    f"extra column {name} is {kind} (dtype, shape, per token), run {self.run} has "
                    f"{manifest.columns.get(name, 'nothing that can be read')}: use another name"
                )
