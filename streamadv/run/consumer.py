"""The consumer loop of every stage: read entries, take over those of dead consumers, wait while the server is away.

The server delivers an entry to one consumer of the stage's group; the entry stays pending until a hand-off script
acknowledges it. After a start or a lost connection a consumer first reads its own pending entries, because they
include any reply that was lost on the wire. Before it reads new entries, it takes over entries whose lease is over.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from .. import clock, doors, metrics
from ..messages import counted, log_fields
from ..store.keys import LAST_ID, ShardKeys
from ..store.retry import RETRYABLE, SERVER_ERRORS, Outage
from .run import Run, Shard

logger = logging.getLogger(__name__)

#: Names of stages: their consumer groups, and the label of their metrics.
GROUPER: Final = "grouper"
ADVANTAGE: Final = "advantage"
#: What they export; any other stage is a scorer.
KINDS: Final[Mapping[str, metrics.Kind]] = {GROUPER: "grouper", ADVANTAGE: "advantage"}

BLOCK_MS: Final = 1000
#: Block on one stream while others may have entries, when a process serves several shards.
SHARED_BLOCK_MS: Final = 50
#: How often a consumer looks for new settings of the run.
REFRESH_S: Final = 1.0
#: A consumer without pending entries is forgotten after this long a silence.
RETIRE_AFTER_MS: Final = 3_600_000
#: Pending entries looked at in one call.
PENDING_PAGE: Final = 1000
#: The start of what is pending under a name.
FIRST: Final = "0"
#: Owns entries that were given back: anybody may take them at once.
NOBODY: Final = "nobody"


class Delivery(NamedTuple):
    """Who has a pending entry, and how often it was delivered: one of both changes whenever somebody takes it."""

    consumer: bytes
    times: int


class Entry(NamedTuple):
    """One stream entry and where it came from."""

    shard: int
    id: str
    fields: Mapping[bytes, bytes]
    reclaimed: bool = False  # whoever had it before did not finish it within the lease


@dataclass(slots=True)
class Cursor:
    """How far one consumer is in the stream of one shard.

    Whatever is pending under the consumer's name is in its hands, or stands at `pending_from` or after it. Leases
    are by this process's own clock: the server's may be set, and a failover brings another one.
    """

    shard: Shard
    stream: str
    pending_from: str | None = FIRST
    check_due: float = -math.inf
    expired: list[tuple[str, Delivery]] = field(default_factory=list)  # to be taken over
    #: What is pending, with the time since which its delivery is unchanged.
    seen: dict[str, tuple[Delivery, float]] = field(default_factory=dict)


class Consumer:
    """Reads one stage's stream of every shard. Used by one thread; `done`, `release` and `give_back` by any.

    An entry is in hand from `read` until `done`, `release` or `give_back`, and is not given twice meanwhile.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        stream: Callable[[ShardKeys], str],
        *,
        lease_s: float,
        stop: threading.Event,
        name: str | None = None,
    ) -> None:
        self.run = run
        self.stage = stage  # also the name of the consumer group
        # A name used again would inherit, and hide, what is pending under it.
        self.name = name or f"{os.uname().nodename}-{os.getpid()}-{doors.random_bytes(3).hex()}"
        self.lease_s = lease_s
        self.stop = stop
        self._outage = Outage(stage, run.name, sleep=stop.wait)
        metrics.begin_stage(stage, KINDS.get(stage, "scorer"))
        self._cursors = [Cursor(shard, stream(shard.keys)) for shard in run.shards]
        self._in_hand: dict[tuple[int, str], float] = {}  # shard and entry id -> when it was read
        self._lock = threading.Lock()  # of what is in hand
        self._turn = 0

    def read(self, count: int, wait: bool = True) -> list[Entry]:
        """Up to `count` entries of one shard, or [] after a short wait."""
        if not wait or len(self._cursors) > 1 or self.stop.is_set():
            for _ in self._cursors:
                self._turn = (self._turn + 1) % len(self._cursors)
                entries = self._read(self._cursors[self._turn], count, block_ms=None)
                if entries or self.stop.is_set():
                    return entries
            if not wait:
                return []
        block_ms = BLOCK_MS if len(self._cursors) == 1 else SHARED_BLOCK_MS
        with metrics.wait(self.stage):
            started = clock.now()
            entries = self._read(self._cursors[self._turn], count, block_ms)
            if not entries and clock.now() - started < block_ms / 2000:
                self.stop.wait(SHARED_BLOCK_MS / 1000)  # a server that does not block is not asked in a loop
        return entries

    def done(self, entries: Sequence[Entry]) -> None:
        """The entries were handed off (by whomever)."""
        with self._lock:
            for entry in entries:
                self._in_hand.pop((entry.shard, entry.id), None)

    @property
    def in_hand(self) -> str:
        """The entries in hand, for the log: how many, and how long the oldest has been."""
        with self._lock:
            since = list(self._in_hand.values())
        if not since:
            return "no entries"
        count = counted(len(since), "entry", "entries")
        return f"{count} in hand, the oldest for {clock.now() - min(since):.1f} s"

    def start_over(self) -> None:
        """Give everything pending under this name again, also what is in hand: a hand-off failed."""
        with self._lock:
            self._in_hand.clear()
        self.reread_pending()

    def reread_pending(self) -> None:
        """Give everything pending under this name again, except what is in hand."""
        for cursor in self._cursors:
            cursor.pending_from = FIRST

    def give_back(self) -> None:
        """On shutdown: let others take what is in hand at once instead of after the lease, and leave the list."""
        fields = log_fields("stopped", run=self.run.name, role=self.stage)
        logger.info("%s: stops, gives back %s", self.stage, self.in_hand, extra=fields)
        with self._lock:
            in_hand, self._in_hand = set(self._in_hand), {}
        self._claim(in_hand, NOBODY)
        self.retire(leaves=True)

    def release(self, entries: Sequence[Entry]) -> None:
        """Let others take these at once: this process can do nothing with them."""
        self.done(entries)
        self._claim({(entry.shard, entry.id) for entry in entries}, NOBODY)

    def renew(self) -> None:
        """Begin the lease of all that is in hand anew."""
        with self._lock:
            in_hand = set(self._in_hand)
        self._claim(in_hand, self.name)

    @contextmanager
    def leases_kept(self) -> Iterator[None]:
        """Renew the leases of all that is in hand, in a thread, however long the work takes."""
        over = doors.Event()

        def keep() -> None:
            while not over.wait(max(self.lease_s / 3, 0.05)):
                with suppress(*SERVER_ERRORS):  # the next time, or another consumer takes them over
                    self.renew()

        keeper = doors.Thread(target=keep, name="streamadv-leases", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join(1.0)

    def retire(self, leaves: bool = False) -> None:
        """Forget consumers that are gone and have nothing pending; and this one if it leaves."""
        args = [self.stage, RETIRE_AFTER_MS, self.name, "1" if leaves else ""]
        for cursor in self._cursors:
            with suppress(*(RETRYABLE if leaves else ())):  # else it is forgotten after a while
                cursor.shard.call("retire", args, stream=cursor.stream)

    def _claim(self, in_hand: set[tuple[int, str]], owner: str) -> None:
        """Have `owner` take entries: one more delivery, which others see. While the server is away, leases go on."""
        for cursor in self._cursors:
            ids: list[Any] = sorted(entry_id for shard, entry_id in in_hand if shard == cursor.shard.index)
            if ids:
                with suppress(*RETRYABLE):
                    self.run.connection.scripts.xclaim(cursor.stream, self.stage, owner, 0, ids)

    def _read(self, cursor: Cursor, count: int, block_ms: int | None) -> list[Entry]:
        """Up to `count` entries of one stream. Waits while the server is away; makes a stream anew that is gone."""
        try:
            try:
                entries = self._advance(cursor, count, block_ms)
            except ResponseError as error:
                if isinstance(error, RETRYABLE) or not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
                metrics.group_recreated(self.stage)
                self._outage.pause()  # somebody may delete it again and again
                self.run.refresh_if_changed()  # lost with the stream
                cursor.shard.call("ensure_group", [self.stage], stream=cursor.stream)
                return []
        except RETRYABLE as error:
            cursor.pending_from = FIRST  # a reply may have been lost
            self._outage.pause_after(error)
            return []
        self._outage.over()
        return entries

    def _advance(self, cursor: Cursor, count: int, block_ms: int | None) -> list[Entry]:
        """What is pending under its name, then what others have left, then new entries: the first there are."""
        if cursor.pending_from is not None:
            pending = self._group_read(cursor, cursor.pending_from, count, None)
            cursor.pending_from = pending[-1].id if pending else None
            if pending:
                return self._take_in_hand(pending)
        if clock.now() > cursor.check_due:
            self._check_leases(cursor)
        while cursor.expired:
            # Their leases were over at the last look. The script claims those that nobody has touched since.
            page, cursor.expired = cursor.expired[:count], cursor.expired[count:]
            args: list[Any] = [self.stage, self.name]
            for entry_id, delivery in page:
                args += [entry_id, *delivery]
            claimed = [
                (entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
                for entry_id, fields in cursor.shard.call("reclaim", args, stream=cursor.stream)
            ]
            entries = self._take_in_hand(entries_of(cursor.shard.index, claimed, reclaimed=True))
            metrics.entries(self.stage, "reclaimed", len(entries))
            if entries:
                return entries
        entries = self._take_in_hand(self._group_read(cursor, ">", count, block_ms))
        metrics.entries(self.stage, "delivered", len(entries))
        return entries

    def _check_leases(self, cursor: Cursor) -> None:
        """Note the entries whose lease is over, oldest first, among all that is pending on the stream."""
        cursor.check_due = clock.now() + self.lease_s / 3 * random.uniform(0.8, 1.2)
        pending, start = dict[str, Delivery](), "-"
        page: Any = range(PENDING_PAGE)
        while len(page) == PENDING_PAGE and start != f"({LAST_ID}":
            page = self.run.connection.scripts.xpending_range(
                cursor.stream, self.stage, start, "+", PENDING_PAGE
            )
            for item in page:
                delivery = Delivery(item["consumer"], item["times_delivered"])
                pending[item["message_id"].decode()] = delivery
            start = f"({next(reversed(pending), '')}"
        now, seen = clock.now(), cursor.seen
        cursor.seen = {
            entry_id: seen[entry_id]
            if entry_id in seen and seen[entry_id][0] == delivery
            else (delivery, now)
            for entry_id, delivery in pending.items()
        }
        with self._lock:
            cursor.expired = [
                (entry_id, delivery)
                for entry_id, (delivery, since) in cursor.seen.items()
                if (now - since >= self.lease_s or delivery.consumer == NOBODY.encode())
                and (cursor.shard.index, entry_id) not in self._in_hand
            ]
        self.retire()
        self.run.refresh_if_changed(REFRESH_S)

    def _group_read(self, cursor: Cursor, start: str, count: int, block_ms: int | None) -> list[Entry]:
        connection = self.run.connection
        client = connection.scripts if block_ms is None else connection.blocking(block_ms)
        if start == ">" and block_ms is None:
            client = connection.push  # a repeated read would leave the first reply's entries pending
        call: Any = (self.stage, self.name, {cursor.stream: start}, count, block_ms)
        if connection.is_cluster:  # it has the manifest elsewhere, and its pipelines send again
            reply: Any = client.xreadgroup(*call)
            if reply:
                self.run.refresh_if_changed()
        else:  # settings given before an entry was written are in force for it
            reply = self.run.execute(client.pipeline(transaction=False).xreadgroup(*call))[0]
        pairs = reply.items() if isinstance(reply, dict) else reply or []
        return [entry for _, entries in pairs for entry in entries_of(cursor.shard.index, entries)]

    def _take_in_hand(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of `entries` that are not in hand yet."""
        with self._lock:
            fresh = [entry for entry in entries if (entry.shard, entry.id) not in self._in_hand]
            self._in_hand.update(((entry.shard, entry.id), clock.now()) for entry in fresh)
        return fresh


def entries_of(shard: int, entries: Sequence[Any], reclaimed: bool = False) -> list[Entry]:
    """Entries of a reply. One whose content was deleted while it was pending has no fields and is left out."""
    return [Entry(shard, entry_id.decode(), fields, reclaimed) for entry_id, fields in entries if fields]
