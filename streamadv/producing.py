"""What a producer does, without I/O: generators that yield requests and receive replies.

`producer.py` drives them with a blocking client, `async_producer.py` with an asyncio one, so that admission,
dedupe codes, slicing and retries exist once. torch is not imported here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from . import metrics
from .admission import (
    LOST_GROUPS_FIRST,
    NO_ROOM,
    broken_group_error,
    busy_error,
    byte_budget,
    check_room,
    push_codes,
    refusal,
)
from .errors import (
    Busy,
    GroupEndedError,
    ManifestMismatchError,
    ProducerClosedError,
    SettingError,
    TrajectoryError,
)
from .exchange import Memory, Pause, Request, Steps
from .failures import Failures
from .keys import ShardKeys
from .manifest import MAX_DEADLINE_S, Manifest, RunSettings, manifest_call, parse_manifest, register_call
from .outages import RETRYABLE, Backoff, retried
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
from .resend import RESEND_WINDOW_S, ResendWindow
from .schema import Trajectory
from .scripts import script_call
from .tickets import PushResult, Ticket, check_group, check_seconds, new_group_id
from .waiting import Reason, Waiting

logger = logging.getLogger(__name__)

STAGE: Final = "producer"
#: How long closing a producer lets calls under way end by themselves.
CLOSE_S: Final = 1.0
#: First wait for admission: about what a batch takes of a trainer that keeps up.
ADMISSION_WAIT_S: Final = 0.005
#: Between heartbeats while the server has no room for what it has lost.
CATCH_UP_S: Final = 1.0
ABOVE_MAXMEMORY: Final = Reason("maxmemory", "the server is above its maxmemory")


@dataclass(slots=True)
class Call:
    """One call of `begin`: by its nonce the server knows which group it opened."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    wanted: bool = True  # whether the caller still waits


class ProducerLogic:
    """The state and the steps behind a producer."""

    def __init__(
        self,
        run: str,
        name: str | None,
        settings: RunSettings | None,
        resend_window: float = RESEND_WINDOW_S,
    ) -> None:
        self.run = run
        self.name = name or f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self.settings = settings
        self.manifest: Manifest | None = None
        self.max_bytes = 0  # of one shard
        self.version: int | None = None  # newest model version heard of
        self.finished = False
        self._process = os.getpid()  # a forked child is nobody on the list of producers
        self._instance: int | None = None  # among those of one name, the latest has the name's place
        self._succeeded = False
        self._refused: ManifestMismatchError | None = None  # the run is another one now
        self._drop_after: int | None = None
        self._told_unpaced = False
        self._resend = ResendWindow(resend_window)
        self._who = f"{STAGE} {self.name}"
        self._not_admitted = Waiting(self._who, "not admitted")  # of all threads and tasks together
        self.failures = Failures()
        self.closed = False
        self._unclaimed: dict[str, str] = {}  # nonce of a begin that nobody waits for any more -> group id

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of a producer in a child of its process."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raises ProducerClosedError once it is closed."""
        if self.closed:
            raise ProducerClosedError(f"producer {self.name} is closed: make another one")

    @property
    def joined(self) -> Manifest:
        """The manifest of the run this producer has joined."""
        if self._refused is not None:
            raise self._refused
        if self.manifest is None:
            raise SettingError("producer is not connected: use it in a with block, or call open() first")
        return self.manifest

    def open(self) -> Steps[None]:
        """Read or write the manifest and find the byte budget."""
        memory = yield Memory()
        if self.settings is not None:
            byte_budget(self.settings.max_bytes, memory)  # before others read it
        yield from self._agree()
        yield register_call(self.run)
        self._set_budget(memory)
        yield from self.heartbeat()

    def _set_budget(self, memory: Mapping[str, Any]) -> None:
        self.max_bytes = byte_budget(self.joined.max_bytes, memory) // len(self.joined.keys.salts)

    def heartbeat(self) -> Steps[None]:
        """Say that this producer is alive or finished, and hear of the newest model version."""
        self.failures.tell()
        yield from self.withdraw()
        yield from self._agree()  # a setting that nobody had given may have been given since
        yield from self._say("finished" if self.finished else "open")
        try:
            self._set_budget((yield Memory()))
        except SettingError as error:  # written by a process that asks for no memory
            logger.warning("%s; until then %d bytes a shard", error, self.max_bytes)
        yield from self._resend.check(self.joined.keys.voids)

    def _agree(self, columns: Mapping[str, str] | None = None) -> Steps[Manifest]:
        """Read the manifest, writing what this process knows of it and the server does not.

        Raises ManifestMismatchError when the run is another one; every later call does then as well.
        """
        known = self.manifest
        reply = yield manifest_call(self.run, self.settings, columns, known)
        try:
            self.manifest = parse_manifest(self.run, self.settings, reply, known)
        except ManifestMismatchError as error:
            self._refused = None if known is None else error
            raise
        if reply[0] and known is not None:
            yield register_call(self.run)
        return self.manifest

    def _laid_out(self, request: Callable[[], Request]) -> Steps[Any]:
        """The reply to a request that may open a group, made again once the shard knows the run's manifest."""
        while (reply := (yield request()))[0] == b"layout":
            manifest = yield from self._agree()
            for keys in manifest.keys.shards:
                yield script_call("lay_out", [keys.void, keys.ledger], [len(manifest.keys.salts)])
        return reply

    def until_heartbeat(self, usual: float) -> float:
        """Seconds to the next heartbeat, which also sends again what the server had no room for."""
        return min(usual, CATCH_UP_S) if self._resend.behind else usual

    def too_late(self, ticket: Ticket) -> bool:
        """Whether a rollout begun under this ticket can only be dropped as stale."""
        if self._drop_after is None or ticket.model_version is None or self.version is None:
            return False
        return self.version - ticket.model_version > self._drop_after

    def goodbye(self) -> Steps[None]:
        """On a clean exit: only a producer that has finished stays on the list."""
        self.failures.tell(now=True)
        if self._refused is None and self.manifest is not None:
            yield from self.withdraw()
            yield from self._say("finished" if self.finished else "gone")

    def _say(self, state: str) -> Steps[None]:
        if self.is_forked:
            return
        keys = self.joined.keys.home
        args = [self.name, state, "" if self._instance is None else self._instance]
        reply = yield script_call("heartbeat", [keys.void, keys.producers, keys.trainer], args)
        if reply[0]:
            self.version = int(reply[0])
        self._drop_after = int(reply[1]) if reply[1] else None
        if self._instance is None:
            self._instance = int(reply[2])
        elif int(reply[2]) != self._instance and not self._succeeded:
            self._succeeded = True
            logger.warning(
                "another producer has taken the name %s, and this one's place on the list", self.name
            )

    def finish(self) -> Steps[None]:
        """No more groups will come from this producer."""
        backoff = Backoff()
        while not (yield from self._resend.check(self.joined.keys.voids)):
            backoff.because(self._who, "not finished", LOST_GROUPS_FIRST)
            yield Pause(backoff.delay())
        self.finished = True
        yield from self.heartbeat()

    def begin(
        self,
        size: int,
        group_id: str | None,
        data_source: str | None,
        metadata: Mapping[str, Any] | None,
        deadline_s: float | None,
        redundancy: int | None,
        timeout: float | None,
        call: Call | None = None,
    ) -> Steps[list[Ticket]]:
        """Admit a group, waiting up to `timeout` seconds (None = for ever). Raises Busy, GroupEndedError."""
        call = call or Call()
        manifest = self.joined
        redundancy = manifest.redundancy if redundancy is None else redundancy
        shared = check_group(
            new_group_id() if group_id is None else group_id, size, redundancy, data_source, metadata
        )
        deadline_s = check_seconds("deadline_s", deadline_s, MAX_DEADLINE_S)
        timeout = check_seconds("timeout", timeout, zero=True)
        places = size + redundancy
        yield from self._reopen()
        yield from self.withdraw()
        backoff = Backoff(base=ADMISSION_WAIT_S)
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            chosen = group_id or new_group_id()
            reply = yield from self._begin(call, chosen, size, places, data_source, deadline_s)
            if self._over_share(reply):
                counts = yield from self._groups_ahead()
                if group_id is None:
                    chosen = self._new_id_in(counts.index(min(counts)))
                elsewhere = sum(counts) - counts[self.joined.keys.shard_of(chosen)]
                reply = yield from self._begin(call, chosen, size, places, data_source, deadline_s, elsewhere)
            state = reply[0].decode()
            if state in ("ok", "open"):
                self._not_admitted.over()
                if self.closed or not call.wanted:
                    self.forgo(call, chosen)
                    self.check_open()
                    return []
                places = int(reply[3])
                self.version = version = int(reply[2] or 0)
                return [
                    Ticket(
                        chosen,
                        index,
                        size,
                        places,
                        int(reply[1]),
                        version,
                        shared.data_source,
                        dict(shared.metadata),
                    )
                    for index in range(places)
                ]
            if state == "ended":
                raise GroupEndedError(f"group {chosen} has ended: begin another one")
            if state == "broken":
                raise broken_group_error(chosen)
            if state == "mismatch":
                raise TrajectoryError(f"group_size is {size}, group {chosen} is open with {int(reply[1])}")
            check_room(reply, places)
            shard = self.joined.keys.shard_of(chosen) if len(self.joined.keys.salts) > 1 else None
            self._not_admitted.because(refusal(reply, shard))
            delay = backoff.delay()
            if give_up is not None and time.monotonic() + delay > give_up:
                raise busy_error(reply, timeout, shard)
            metrics.backpressure(delay)
            yield Pause(delay)
            if not call.wanted:
                return []

    def forgo(self, call: Call, group_id: str) -> None:
        """Nobody has heard, or wants to hear, that this call may have opened the group."""
        self._unclaimed[call.nonce] = group_id

    def withdraw(self) -> Steps[None]:
        """Undo the opening of groups by calls that ended without hearing of it."""
        for nonce, group_id in list(self._unclaimed.items()):
            keys = self._keys(group_id)
            names = [keys.void, keys.group(group_id), keys.open, keys.ledger]
            yield script_call("withdraw", names, [group_id, nonce])
            self._unclaimed.pop(nonce, None)

    def _begin(
        self,
        call: Call,
        group_id: str,
        size: int,
        places: int,
        data_source: str | None,
        deadline_s: float | None,
        elsewhere: int | None = None,
    ) -> Steps[list[Any]]:
        """Ask for admission once. elsewhere: groups that count in the other shards."""
        self._tell_if_unpaced()
        keys = self._keys(group_id)
        room = self._room(group_id)
        args = self._admission(group_id, size, places, data_source, deadline_s, room, elsewhere)
        try:
            ask = partial(script_call, "begin", keys.admission(group_id), [*args, call.nonce])
            reply: list[Any] = yield from self._laid_out(ask)
        except OutOfMemoryError:  # above maxmemory, the fuse: what is there drains, then there is room
            return [b"busy", b"maxmemory", 0, 0]
        except BaseException:  # also the end of the steps: the answer has not come, and may have been yes
            self.forgo(call, group_id)
            raise
        return reply

    def _over_share(self, reply: Sequence[Any]) -> bool:
        """Whether a shard has its share of the groups that may be ahead, which other shards may have less of."""
        return reply[:2] == [b"busy", b"max_staleness"] and len(self.joined.keys.salts) > 1

    def _groups_ahead(self) -> Steps[list[int]]:
        """How many groups count in pacing, of each shard."""
        counts = []
        for keys in self.joined.keys.shards:
            counts.append((yield script_call("ahead", [keys.open, keys.groups, keys.ledger, keys.trainer])))
        return counts

    def _new_id_in(self, shard: int) -> str:
        while self.joined.keys.shard_of(group_id := new_group_id()) != shard:
            pass
        return group_id

    def _tell_if_unpaced(self) -> None:
        manifest = self.joined
        known = self.version is not None or None not in (manifest.batch_groups, manifest.max_staleness)
        if known or self._told_unpaced:
            return
        self._told_unpaced = True
        logger.warning(
            "run %s has no trainer yet: until one starts only max_bytes (%d) limits how many groups are begun, "
            "all at version 0; `streamadv runs create --batch-groups N --max-staleness N` paces them until then",
            self.run,
            self.max_bytes * len(manifest.keys.salts),
        )

    def push(
        self, trajectories: Sequence[Trajectory], epoch: int | None, places: int | None
    ) -> Steps[PushResult]:
        """Push records of one group. Raises Busy when that opens the group and it is not admitted."""
        manifest = self.joined
        if not trajectories:
            return PushResult([])
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
        keys, backoff = self._keys(spec[0]), Backoff()
        while True:
            try:
                reply: list[Any] = yield from self._laid_out(
                    partial(ending_request, keys, spec, endings, allowed)
                )
                return reply
            except OutOfMemoryError:
                yield from self._wait_for_room(backoff)

    def score(
        self, group_id: str, rollout_index: int, reward: float | None, rewards: Mapping[str, float] | None
    ) -> Steps[str]:
        """Bring the reward of a pushed trajectory: 'scored', 'duplicate', 'ended' or 'unknown'."""
        for name, number in {**(rewards or {}), "reward": reward}.items():
            if number is not None and not math.isfinite(number):
                raise TrajectoryError(
                    f"{name} of {group_id}/{rollout_index} is {number}: give a finite number, or None for unscorable"
                )
        keys = self._keys(group_id)
        score: dict[str, Any] = {"reward": reward} | ({"rewards": dict(rewards)} if rewards else {})
        value = "" if reward is None else repr(float(reward))
        call = script_call(
            "score",
            [keys.void, keys.group(group_id), keys.ended, keys.ended_before, keys.scored],
            [group_id, rollout_index, value, json.dumps(score)],
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
        backoff = Backoff()
        while True:
            try:
                result = yield from (first_try or send)()
                break
            except Busy as busy:
                if not admitted:
                    raise
                yield from self._wait_for_room(backoff, Reason(*busy.reason))
        self._resend.remember(shard, server_id, sum(record.size for record in records), send)
        return result

    def _room(self, group_id: str) -> int:
        """The byte budget for a group that may be new: none while its shard has no room for what it has lost.

        That was admitted once. Behind new groups it might wait until this producer dies and what it kept with it.
        """
        return NO_ROOM if self.joined.keys.shard_of(group_id) in self._resend.behind else self.max_bytes

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
        backoff = Backoff()
        elsewhere: int | None = None
        while True:
            args = spec(elsewhere)
            try:
                reply = yield from self._laid_out(
                    partial(push_request, self.joined, keys, args, records, epoch)
                )
            except RETRYABLE as error:
                retried(STAGE, error, backoff)
                yield Pause(backoff.delay())
                continue
            except OutOfMemoryError:  # above maxmemory, the fuse: what is there drains, then there is room
                yield from self._wait_for_room(backoff)
                continue
            if elsewhere is None and self._over_share(reply):
                counts = yield from self._groups_ahead()
                elsewhere = sum(counts) - counts[self.joined.keys.shard_of(args[0])]
                continue
            return push_codes(reply, *args[:3])

    def _wait_for_room(self, backoff: Backoff, reason: Reason = ABOVE_MAXMEMORY) -> Steps[None]:
        backoff.because(self._who, "a push waits", reason)
        delay = backoff.delay()
        metrics.backpressure(delay)
        yield Pause(delay)

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

    def _reopen(self) -> Steps[None]:
        if self.finished:
            self.finished = False
            yield from self.heartbeat()

    def _keys(self, group_id: str) -> ShardKeys:
        keys = self.joined.keys
        return keys.shard(keys.shard_of(group_id))

    def _admission(
        self,
        group_id: str,
        size: int,
        places: int,
        data_source: str | None,
        deadline_s: float | None,
        max_bytes: int | None = None,
        elsewhere: int | None = None,
    ) -> list[Any]:
        """The first arguments of the scripts that may open a group, see `lua/lib/admit.lua`.

        max_bytes: None = the shard's budget, for a group admitted before. Sizes were known then, which its server may
        have forgotten: it needs no more than there is.
        """
        manifest = self.joined
        each = manifest.max_trajectory_bytes
        if max_bytes is None:
            max_bytes = self.max_bytes
            each = max(1, min(each, max_bytes // places))
        deadline_ms = round((deadline_s or manifest.group_deadline_s) * 1000)
        return [
            group_id,
            size,
            places,
            data_source or "",
            deadline_ms,
            each,
            max_bytes,
            len(manifest.keys.salts),
            "" if elsewhere is None else elsewhere,
            "" if manifest.max_staleness is None else manifest.max_staleness,
            "" if manifest.batch_groups is None else manifest.batch_groups,
            self.name,
        ]
