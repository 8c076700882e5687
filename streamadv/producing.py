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
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from redis.exceptions import OutOfMemoryError

from . import metrics
from .connection import RETRYABLE, Backoff
from .errors import Busy, GroupEndedError, SettingError, TrajectoryError
from .keys import ShardKeys
from .manifest import Manifest, RunSettings, manifest_call, parse_manifest, register_call
from .schema import MAX_GROUP_SIZE, Trajectory, parse_trajectory
from .scripts import ScriptCall, script_call
from .wire import encode_payload, make_reference, payload_bytes

logger = logging.getLogger(__name__)

#: Largest slice of a group sent in one MULTI.
MAX_SLICE_RECORDS: Final = 128
MAX_SLICE_BYTES: Final = 4 << 20
HEARTBEAT_S: Final = 10.0
#: A producer silent for longer is taken for dead (three missed heartbeats).
PRODUCER_TIMEOUT_S: Final = 30.0
#: What was sent this long before the server was last seen unchanged is sent again to a restarted one.
RESEND_WINDOW_S: Final = 5.0
MAX_RESEND_BYTES: Final = 256 << 20
FALLBACK_MAX_BYTES: Final = 1 << 30
MAX_BYTES_SHARE: Final = 0.7  # of maxmemory
MAX_METADATA_BYTES: Final = 1 << 16


class Transaction(NamedTuple):
    """MULTI: write the payload hashes, then run the script. Never sent twice."""

    payloads: Sequence[tuple[str, dict[Any, Any]]]
    call: ScriptCall


class Pause(NamedTuple):
    """Wait so many seconds."""

    seconds: float


class Memory(NamedTuple):
    """Ask the server for its memory figures; {} where INFO is missing."""


class ServerId(NamedTuple):
    """Ask which server this is; None where it does not tell. Another one may have lost the last moments."""


Request = ScriptCall | Transaction | Pause | Memory | ServerId
T = TypeVar("T")
Steps = Generator[Request, Any, T]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to push one rollout of an admitted group, from any process: `to_json` and `from_json`."""

    group_id: str
    rollout_index: int
    group_size: int
    places: int
    epoch: int
    model_version: int | None
    data_source: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Ticket:
        return cls(**json.loads(text))


class PushResult(NamedTuple):
    """What became of the records of one push, one code each.

    'pushed'; 'duplicate' (that place was taken before, nothing changed); 'surplus' or 'late' (the group had
    ended: complete without it, or expired).
    """

    codes: list[str]

    def count(self, code: str) -> int:
        return self.codes.count(code)


class Sent(NamedTuple):
    """Something a producer told the server, kept for a while in case the server forgets it."""

    when: float
    size: int
    again: Callable[[], Steps[PushResult]]


class ProducerLogic:
    """The state and the steps behind a producer."""

    def __init__(
        self,
        run: str,
        name: str | None,
        settings: RunSettings | None,
        resend_window: float = RESEND_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.name = name or f"{os.uname().nodename}-{os.getpid()}"
        self.id = f"{self.name}-{secrets.token_hex(4)}"
        self.settings = settings
        self.manifest: Manifest | None = None
        self.max_bytes = 0  # of one shard
        self.version: int | None = None  # newest model version heard of
        self.finished = False
        self._resend_window = resend_window
        self._clock = clock
        self._server_id: str | None = None
        self._drop_after: int | None = None
        self._sent: deque[Sent] = deque()
        self._sent_bytes = 0

    @property
    def ready(self) -> Manifest:
        if self.manifest is None:
            raise SettingError("producer is not connected: use it in a with block, or call open() first")
        return self.manifest

    def open(self) -> Steps[None]:
        """Read or write the manifest and find the byte budget."""
        reply = yield manifest_call(self.run, self.settings)
        self.manifest = parse_manifest(self.run, self.settings, reply)
        yield register_call(self.run)
        memory = yield Memory()
        self.max_bytes = byte_budget(self.manifest.max_bytes, memory) // len(self.manifest.keys.salts)
        yield from self.heartbeat()

    def heartbeat(self) -> Steps[None]:
        """Say that this producer is alive or finished, and hear of the newest model version."""
        keys = self.ready.keys.home
        names = [keys.void, keys.producers, keys.trainer]
        reply = yield script_call("heartbeat", names, [self.id, self._state()])
        if reply[0]:
            self.version = int(reply[0])
        self._drop_after = int(reply[1]) if reply[1] else None
        yield from self.check_server()

    def check_server(self) -> Steps[None]:
        """Push again what a restarted server may have lost; forget what an unchanged one has had for long."""
        server_id = yield ServerId()
        if self._server_id not in (None, server_id):
            sent, self._sent, self._sent_bytes = list(self._sent), deque(), 0
            self._server_id = server_id
            lost = 0
            for item in sent:
                result = yield from item.again()
                lost += result.count("pushed")
            logger.warning(
                "the server is not the one it was: pushed %d times again, %d trajectories were lost",
                len(sent),
                lost,
            )
        self._server_id = server_id
        oldest = self._clock() - self._resend_window
        while self._sent and (self._sent[0].when < oldest or self._sent_bytes > MAX_RESEND_BYTES):
            self._sent_bytes -= self._sent.popleft().size

    def too_late(self, ticket: Ticket) -> bool:
        """Whether a rollout begun under this ticket can only be dropped as stale."""
        if self._drop_after is None or ticket.model_version is None or self.version is None:
            return False
        return self.version - ticket.model_version > self._drop_after

    def _remember(self, size: int, again: Callable[[], Steps[PushResult]]) -> None:
        if self._resend_window > 0:
            self._sent.append(Sent(self._clock(), size, again))
            self._sent_bytes += size

    def goodbye(self) -> Steps[None]:
        """On a clean exit: only a producer that has finished stays on the list."""
        keys = self.ready.keys.home
        state = "finished" if self.finished else "gone"
        yield script_call("heartbeat", [keys.void, keys.producers, keys.trainer], [self.id, state])

    def finish(self) -> Steps[None]:
        """No more groups will come from this producer."""
        yield from self.check_server()
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
    ) -> Steps[list[Ticket]]:
        """Admit a group, waiting up to `timeout` seconds (None = for ever). Raises Busy, GroupEndedError."""
        manifest = self.ready
        redundancy = manifest.redundancy if redundancy is None else redundancy
        if not (1 <= size <= MAX_GROUP_SIZE and 0 <= redundancy <= MAX_GROUP_SIZE):
            raise TrajectoryError(
                f"group_size is {size}, redundancy {redundancy}: need 1..{MAX_GROUP_SIZE} and 0..{MAX_GROUP_SIZE}"
            )
        places = size + redundancy
        self._check_reserve(places)
        if metadata and len(json.dumps(metadata)) > MAX_METADATA_BYTES:
            raise TrajectoryError(f"metadata: more than {MAX_METADATA_BYTES} bytes: use an extra column")
        yield from self._reopen()
        backoff = Backoff()
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            chosen = group_id or new_group_id()  # a new id may land on a shard with room
            keys = self._keys(chosen)
            args = [chosen, *self._admission(size, places, data_source, deadline_s)]
            try:
                reply = yield script_call("begin", keys.admission(chosen), args)
            except OutOfMemoryError:  # above maxmemory, the fuse: what is there drains, then there is room
                reply = [b"busy", b"maxmemory", 0, 0]
            state = reply[0].decode()
            if state in ("ok", "open"):
                version = int(reply[2]) if reply[2] else None
                places = int(reply[3])
                self.version = version
                return [
                    Ticket(
                        chosen, index, size, places, int(reply[1]), version, data_source, dict(metadata or {})
                    )
                    for index in range(places)
                ]
            if state == "ended":
                raise GroupEndedError(f"group {chosen} has ended: begin another one")
            if state == "mismatch":
                raise TrajectoryError(f"group_size is {size}, group {chosen} is open with {int(reply[1])}")
            delay = backoff.delay()
            if give_up is not None and time.monotonic() + delay > give_up:
                raise busy_error(reply, timeout)
            metrics.backpressure(delay)
            yield Pause(delay)

    def push(
        self, trajectories: Sequence[Trajectory], epoch: int | None, places: int | None
    ) -> Steps[PushResult]:
        """Push records of one group. Raises Busy when that opens the group and it is not admitted."""
        manifest = self.ready
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
        yield from self._reopen()
        yield from self._register_extras(trajectories)
        places = places or size + manifest.redundancy
        self._check_reserve(places)
        keys = self._keys(first.group_id)
        encoded = [self._encode(trajectory) for trajectory in trajectories]
        spec = self._admission(size, places, first.data_source, None)
        codes: list[str] = []
        for start, stop in _slices([size for _, size in encoded]):
            records = list(zip(trajectories[start:stop], encoded[start:stop], strict=True))
            codes += yield from self._push_slice(keys, first.group_id, spec, records, epoch or 0)
        self._remember(sum(size for _, size in encoded), lambda: self.push(trajectories, epoch, places))
        return PushResult(codes)

    def end_places(
        self, ticket: Ticket, indices: Sequence[int], kind: str, nonces: Sequence[str] = ()
    ) -> Steps[PushResult]:
        """Record that rollouts ended without a trajectory: `kind` failed, aborted or cancelled; -1 = lowest free."""
        keys = self._keys(ticket.group_id)
        spec = self._admission(ticket.group_size, ticket.places, ticket.data_source, None)
        # A nonce makes a repeated call for "the lowest free place" take no second one.
        nonces = nonces or [secrets.token_hex(8) for _ in indices]
        args: list[Any] = [ticket.group_id, *spec, "0"]
        for index, nonce in zip(indices, nonces, strict=True):
            args += [index, kind, "", 0, nonce, "train", ""]
        names = [*keys.admission(ticket.group_id), keys.rollouts, *[keys.void] * (1 + len(indices))]
        backoff = Backoff()
        while True:
            try:
                reply = yield script_call("push", names, args)
                break
            except OutOfMemoryError:
                yield from self._wait_for_room(backoff)
        self._remember(0, lambda: self.end_places(ticket, indices, kind, nonces))
        return PushResult(_codes(reply, ticket.group_id, ticket.group_size))

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
        ending = [keys.ended, keys.ended_before, keys.ledger, keys.garbage]
        value = "" if reward is None else repr(float(reward))
        reply = yield script_call(
            "score",
            [keys.void, keys.group(group_id), keys.open, keys.groups, *ending],
            [group_id, rollout_index, value, json.dumps(score), *self.ready.policy_args],
        )
        return str(reply.decode())

    def touch(self, group_id: str, deadline_s: float | None) -> Steps[bool]:
        """Extend the group's deadline; False when the group has ended."""
        keys = self._keys(group_id)
        milliseconds = round((deadline_s or self.ready.group_deadline_s) * 1000)
        reply = yield script_call("touch", [keys.void, keys.open], [group_id, milliseconds])
        return bool(reply)

    def _push_slice(
        self,
        keys: ShardKeys,
        group_id: str,
        spec: list[Any],
        records: Sequence[tuple[Trajectory, tuple[dict[Any, Any], int]]],
        epoch: int,
    ) -> Steps[list[str]]:
        manifest = self.ready
        scorer = keys.scoring(manifest.scorers[0]) if manifest.scorers else keys.void
        backoff = Backoff()
        while True:
            # Fresh keys for every send: under the old ones a send whose reply was lost may live already.
            payload_keys = [
                keys.payload(secrets.token_hex(12)) if size else keys.void for _, (_, size) in records
            ]
            args: list[Any] = [group_id, *spec, "1" if manifest.scorers else "0"]
            for key, (trajectory, (_, size)) in zip(payload_keys, records, strict=True):
                args += [trajectory.rollout_index, _kind(trajectory), _reward(trajectory), size]
                reference = make_reference(trajectory, key, size, epoch) if size else None
                text = reference.model_dump_json(exclude_defaults=True) if reference else ""
                args += [key, trajectory.role, text]
            call = script_call(
                "push", [*keys.admission(group_id), keys.rollouts, scorer, *payload_keys], args
            )
            payloads = [
                (key, fields) for key, (_, (fields, size)) in zip(payload_keys, records, strict=True) if size
            ]
            try:
                reply = yield Transaction(payloads, call)
            except RETRYABLE as error:
                logger.warning("push of group %s to be repeated: %s", group_id, error)
                yield Pause(backoff.delay())
                continue
            except OutOfMemoryError:  # above maxmemory, the fuse: what is there drains, then there is room
                yield from self._wait_for_room(backoff)
                continue
            return _codes(reply, group_id, records[0][0].group_size)

    def _wait_for_room(self, backoff: Backoff) -> Steps[None]:
        delay = backoff.delay()
        metrics.backpressure(delay)
        yield Pause(delay)

    def _encode(self, trajectory: Trajectory) -> tuple[dict[Any, Any], int]:
        if _kind(trajectory) != "usable":
            return {}, 0
        fields = encode_payload(trajectory)
        size = payload_bytes(fields)
        limit = self.ready.max_trajectory_bytes
        if size > limit:
            raise TrajectoryError(
                f"trajectory {trajectory.group_id}/{trajectory.rollout_index} has {size} bytes, "
                f"max_trajectory_bytes is {limit}: drop columns or raise it for the run"
            )
        return fields, size

    def _register_extras(self, trajectories: Iterable[Trajectory]) -> Steps[None]:
        """An extra column's dtype and shape are fixed by its first push."""
        manifest = self.ready
        kinds = dict.fromkeys(
            (name, json.dumps([column.data.dtype.str, list(column.data.shape[1:]), column.per_token]))
            for trajectory in trajectories
            for row in trajectory.rows
            for name, column in row.extras.items()
        )
        if any(name not in manifest.columns for name, _ in kinds):
            reply = yield manifest_call(self.run, self.settings, dict(reversed(kinds)))
            self.manifest = manifest = parse_manifest(self.run, self.settings, reply)
        for name, kind in kinds:
            if manifest.columns[name] != kind:
                raise TrajectoryError(
                    f"extra column {name} is {kind} (dtype, shape, per token), run {self.run} has "
                    f"{manifest.columns[name]}: use another name"
                )

    def _reopen(self) -> Steps[None]:
        if self.finished:
            self.finished = False
            yield from self.heartbeat()

    def _check_reserve(self, places: int) -> None:
        """A group that needs more than the whole budget would wait for ever."""
        each = self.ready.max_trajectory_bytes
        if places * each > self.max_bytes:
            raise SettingError(
                f"max_bytes allows {self.max_bytes} bytes a shard, one group of {places} reserves {places * each}: "
                f"lower max_trajectory_bytes ({each}) or the group size"
            )

    def _state(self) -> str:
        return "finished" if self.finished else "open"

    def _keys(self, group_id: str) -> ShardKeys:
        keys = self.ready.keys
        return keys.shard(keys.shard_of(group_id))

    def _admission(
        self, size: int, places: int, data_source: str | None, deadline_s: float | None
    ) -> list[Any]:
        manifest = self.ready
        deadline_ms = round((deadline_s or manifest.group_deadline_s) * 1000)
        shards = len(manifest.keys.salts)
        return [
            size,
            places,
            data_source or "",
            deadline_ms,
            manifest.max_trajectory_bytes,
            self.max_bytes,
            shards,
        ]


def new_group_id() -> str:
    """A UUIDv7 (RFC 9562): unique across restarts, ordered by time."""
    value = (int(time.time() * 1000) & (1 << 48) - 1) << 80 | secrets.randbits(80)
    return str(uuid.UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62))


def byte_budget(max_bytes: int | None, memory: Mapping[str, Any]) -> int:
    """The run's budget for payload bytes.

    Given: at most 0.7 x maxmemory (SettingError above it). Else 0.7 x maxmemory, half of the system's memory
    without maxmemory, 1 GiB where the server does not tell.
    """
    maxmemory = int(memory.get("maxmemory", 0))
    limit = int(maxmemory * MAX_BYTES_SHARE)
    if max_bytes is None:
        return limit or int(memory.get("total_system_memory", 0)) // 2 or FALLBACK_MAX_BYTES
    if limit and max_bytes > limit:
        raise SettingError(
            f"max_bytes is {max_bytes}, more than {MAX_BYTES_SHARE} of the server's maxmemory ({maxmemory}): "
            f"set it to {limit} or less, or raise maxmemory"
        )
    return max_bytes


def prepare(records: Sequence[Trajectory | Mapping[str, Any]], ticket: Ticket) -> list[Trajectory]:
    """Records of one group as trajectories: what the ticket knows is filled in, what it contradicts is refused."""
    prepared = []
    for position, record in enumerate(records):
        if isinstance(record, Trajectory):
            trajectory = record
        else:
            known = {
                "group_id": ticket.group_id,
                "group_size": ticket.group_size,
                "rollout_index": ticket.rollout_index,
            }
            if ticket.model_version is not None:
                known["model_version"] = ticket.model_version
            if ticket.data_source is not None:
                known["data_source"] = ticket.data_source
            metadata = {**ticket.metadata, **record.get("metadata", {})}
            where = f"group {ticket.group_id}, record {position}"
            trajectory = parse_trajectory({**known, **record, "metadata": metadata}, where)
        if (trajectory.group_id, trajectory.group_size) != (ticket.group_id, ticket.group_size):
            raise TrajectoryError(
                f"record {position} belongs to group {trajectory.group_id} of {trajectory.group_size}, "
                f"not {ticket.group_id} of {ticket.group_size}"
            )
        if trajectory.rollout_index >= ticket.places:
            raise TrajectoryError(
                f"rollout_index is {trajectory.rollout_index}, group {ticket.group_id} has {ticket.places} places"
            )
        prepared.append(trajectory)
    return prepared


def busy_error(reply: Sequence[bytes], timeout: float | None) -> Busy:
    """Busy with the figures of a refusal."""
    reason, used, limit = (part.decode() if isinstance(part, bytes) else part for part in reply[1:4])
    waited = "" if timeout is None else f" after {timeout:g} s"
    if reason == "maxmemory":
        return Busy(f"not admitted{waited}: the server is above its maxmemory")
    if reason == "max_staleness":
        return Busy(
            f"not admitted{waited}: {used} groups begun and not yet trained, max_staleness allows {limit}"
        )
    return Busy(f"not admitted{waited}: {used} bytes live or reserved of max_bytes {limit}")


def _codes(reply: list[Any], group_id: str, size: int) -> list[str]:
    state = reply[0].decode()
    if state == "busy":
        raise busy_error(reply, None)
    if state == "mismatch":
        raise TrajectoryError(f"group_size is {size}, group {group_id} is open with {int(reply[1])}")
    codes = [code.decode() for code in reply[1:]]
    metrics.producer_pushed(codes)
    if "range" in codes:
        raise TrajectoryError(f"record {codes.index('range')}: group {group_id} has no such place left")
    return codes


def _kind(trajectory: Trajectory) -> str:
    if not trajectory.status.usable:
        return str(trajectory.status)
    return "unscorable" if trajectory.scored and trajectory.reward is None else "usable"


def _reward(trajectory: Trajectory) -> str:
    return "" if trajectory.reward is None else repr(trajectory.reward)


def _slices(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of at most MAX_SLICE_RECORDS records and MAX_SLICE_BYTES bytes (one record may exceed it)."""
    ranges, start, total = [], 0, 0
    for position, size in enumerate(sizes):
        if position > start and (total + size > MAX_SLICE_BYTES or position - start >= MAX_SLICE_RECORDS):
            ranges.append((start, position))
            start, total = position, 0
        total += size
    return [*ranges, (start, len(sizes))]
