"""The consumer loop every stage shares: read, reclaim what dead consumers left, survive what passes by itself.

An entry is delivered to one consumer of the stage's group and stays pending until a hand-off script acks it.
After a start or a lost connection a consumer first asks for its own pending entries, since a reply that was
lost on the wire is already among them. Entries that nobody has touched for a lease, by this process's own clock, are
taken over from others: the server's may be set.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from .. import metrics
from ..messages import log_fields
from ..store.keys import ShardKeys
from ..store.retry import RETRYABLE, Outage
from .run import Run

logger = logging.getLogger(__name__)

#: Names of stages: their consumer groups, and the label of their metrics.
GROUPER: Final = "grouper"
ADVANTAGE: Final = "advantage"

BLOCK_MS: Final = 1000
#: Block on one stream while others may have entries, when a process serves several shards.
SHARED_BLOCK_MS: Final = 50
KEEP_UP_S: Final = 1.0
RETIRE_AFTER_MS: Final = 3_600_000


#: Pending entries looked at in one call.
PENDING_PAGE: Final = 1000
#: Owns entries that were given back: anybody may take them at once.
NOBODY: Final = "nobody"


class Delivery(NamedTuple):
    """Who has a pending entry, and how often it was delivered: one of both changes whenever somebody takes it."""

    consumer: bytes
    times: int


class Leases:
    """What is pending on a stream, and since when nobody has touched it, as one process has seen it."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, tuple[Delivery, float]] = {}

    def look(self, pending: Mapping[str, Delivery], now: float) -> None:
        """pending: all there is, by entry id."""
        seen = self._seen
        self._seen = {
            entry: seen[entry] if entry in seen and seen[entry][0] == delivery else (delivery, now)
            for entry, delivery in pending.items()
        }

    def over(self, now: float) -> list[tuple[str, Delivery]]:
        """Entries whose lease is over, oldest first."""
        return [
            (entry, delivery)
            for entry, (delivery, since) in self._seen.items()
            if now - since >= self._lease_s or delivery.consumer == NOBODY.encode()
        ]


class Entry(NamedTuple):
    """One stream entry and where it came from."""

    shard: int
    id: str
    fields: dict[str, bytes]
    reclaimed: bool = False  # whoever had it before did not finish it within the lease


def consumer_name() -> str:
    """Unique for this process: a name used again would inherit, and hide, what is pending under it."""
    return f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(3)}"


class Consumer:
    """Reads one stage's stream of every shard. Used by one thread; `done` and `give_back` by any."""

    def __init__(
        self,
        run: Run,
        stage: str,
        stream: Callable[[ShardKeys], str],
        *,
        lease_s: float,
        stop: threading.Event,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.stage = stage  # also the name of the consumer group
        self.name = name or consumer_name()
        self.streams = [stream(keys) for keys in run.keys.shards]
        self.lease_s = lease_s
        self.stop = stop
        self._clock = clock
        self._outage = Outage(stage, sleep=stop.wait)
        self._own: list[str | None] = ["0"] * len(self.streams)  # where to go on in the own pending entries
        self._leases = [Leases(lease_s) for _ in self.streams]
        self._free: list[list[tuple[str, Delivery]]] = [[] for _ in self.streams]  # to be taken over
        self._look_due = [clock()] * len(self.streams)
        self._in_hand: dict[tuple[int, str], float] = {}  # shard and entry id -> when it was read
        self._lock = threading.Lock()
        self._turn = 0

    def read(self, count: int, wait: bool = True) -> list[Entry]:
        """Up to `count` entries of one shard, or [] after a short wait. Entries in hand are not given twice."""
        for _ in self.streams:
            self._turn = (self._turn + 1) % len(self.streams)
            entries = self._guarded(self._turn, count, block_ms=None)
            if entries or self.stop.is_set():
                return entries
        if not wait:
            return []
        block_ms = BLOCK_MS if len(self.streams) == 1 else SHARED_BLOCK_MS
        started = self._clock()
        entries = self._guarded(self._turn, count, block_ms)
        if not entries and self._clock() - started < block_ms / 2000:
            self.stop.wait(SHARED_BLOCK_MS / 1000)  # a server that does not block must not be asked in a loop
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
        count = "1 entry" if len(since) == 1 else f"{len(since)} entries"
        return f"{count} in hand, the oldest for {self._clock() - min(since):.1f} s"

    def recover(self) -> None:
        """A hand-off failed: offer everything pending under this name again."""
        with self._lock:
            self._in_hand.clear()
        self._own = ["0"] * len(self.streams)

    def recover_own(self) -> None:
        """Ask for the own pending entries again, without those still in hand."""
        self._own = ["0"] * len(self.streams)

    def give_back(self) -> None:
        """On shutdown: let others take what is in hand at once instead of after the lease."""
        text = "%s: stops, gives back %s"
        logger.info(
            text, self.stage, self.in_hand, extra=log_fields("stopped", run=self.run.name, role=self.stage)
        )
        with self._lock:
            held, self._in_hand = sorted(self._in_hand), {}
        self._claim(held, NOBODY)

    def release(self, entries: Sequence[Entry]) -> None:
        """Let others take these at once: this process can do nothing with them."""
        self.done(entries)
        self._claim([(entry.shard, entry.id) for entry in entries], NOBODY)

    def renew(self) -> None:
        """Begin the lease of all that is in hand anew: the work takes longer."""
        with self._lock:
            held = sorted(self._in_hand)
        self._claim(held, self.name)

    def _claim(self, held: Sequence[tuple[int, str]], owner: str) -> None:
        """Have `owner` take these, one more delivery: others see that. Where the server is away, the lease goes on."""
        for shard, stream in enumerate(self.streams):
            ids: list[Any] = [entry for where, entry in held if where == shard]
            if ids:
                with suppress(*RETRYABLE):
                    self.run.connection.scripts.xclaim(stream, self.stage, owner, 0, ids)

    def retire_others(self) -> None:
        """Forget consumers that are gone and have nothing pending."""
        for shard, stream in zip(self.run.shards, self.streams, strict=True):
            shard.call("retire", [self.stage, RETIRE_AFTER_MS, self.name], stream=stream)

    def _guarded(self, shard: int, count: int, block_ms: int | None) -> list[Entry]:
        try:
            try:
                entries = self._read(shard, count, block_ms)
            except ResponseError as error:
                if isinstance(error, RETRYABLE) or not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
                self._make_group(shard)  # the stream or its group is gone
                return []
        except RETRYABLE as error:
            self._own[shard] = "0"
            self._outage.pause_after(error)
            return []
        self._outage.over()
        return entries

    def _make_group(self, shard: int) -> None:
        metrics.group_recreated(self.stage)
        self._outage.pause()  # somebody may delete it again and again
        self.run.keep_up()  # lost with the stream
        self.run.shard(shard).call("ensure_group", [self.stage], stream=self.streams[shard])

    def _read(self, shard: int, count: int, block_ms: int | None) -> list[Entry]:
        stream = self.streams[shard]
        own = self._own[shard]
        if own is not None:
            pending = self._group_read(shard, own, count, None)
            self._own[shard] = pending[-1].id if pending else None
            if fresh := self._take_in_hand(pending):
                return fresh
            if pending:
                return []
        if self._clock() >= self._look_due[shard]:
            self._look_due[shard] = self._clock() + self.lease_s / 3 * random.uniform(0.8, 1.2)
            self._leases[shard].look(self._pending(stream), self._clock())
            with self._lock:
                held = {entry for owner, entry in self._in_hand if owner == shard}
            self._free[shard] = [
                each for each in self._leases[shard].over(self._clock()) if each[0] not in held
            ]
            self.retire_others()
            self.run.keep_up(KEEP_UP_S)
        if self._free[shard]:
            due, self._free[shard] = self._free[shard][:count], self._free[shard][count:]
            args = [self.stage, self.name, *(part for entry, delivery in due for part in (entry, *delivery))]
            reply = self.run.shard(shard).call("reclaim", args, stream=stream)
            claimed = [(entry, dict(zip(flat[::2], flat[1::2], strict=True))) for entry, flat in reply]
            if fresh := self._take_in_hand(_entries(shard, claimed, reclaimed=True)):
                metrics.entries(self.stage, "reclaimed", len(fresh))
                return fresh
        fresh = self._take_in_hand(self._group_read(shard, ">", count, block_ms))
        metrics.entries(self.stage, "delivered", len(fresh))
        return fresh

    def _pending(self, stream: str) -> dict[str, Delivery]:
        """Everything pending on a stream, by entry id, in their order."""
        found: dict[str, Delivery] = {}
        start = "-"
        while True:
            page: Any = self.run.connection.scripts.xpending_range(
                stream, self.stage, start, "+", PENDING_PAGE
            )
            for each in page:
                entry = each["message_id"].decode()
                found[entry] = Delivery(each["consumer"], each["times_delivered"])
            if len(page) < PENDING_PAGE:
                return found
            start = f"({page[-1]['message_id'].decode()}"

    def _group_read(self, shard: int, start: str, count: int, block_ms: int | None) -> list[Entry]:
        client = self.run.connection.scripts if block_ms is None else self.run.connection.blocking(block_ms)
        if start == ">" and block_ms is None:
            client = self.run.connection.push  # a repeated read would leave the first reply's entries pending
        reply: Any = client.xreadgroup(
            self.stage, self.name, {self.streams[shard]: start}, count=count, block=block_ms
        )
        pairs = reply.items() if isinstance(reply, dict) else reply or []
        return [entry for _, entries in pairs for entry in _entries(shard, entries)]

    def _take_in_hand(self, entries: Sequence[Entry]) -> list[Entry]:
        with self._lock:
            fresh = [entry for entry in entries if (entry.shard, entry.id) not in self._in_hand]
            self._in_hand.update(((entry.shard, entry.id), self._clock()) for entry in fresh)
        return fresh


def _entries(shard: int, entries: Sequence[Any], reclaimed: bool = False) -> list[Entry]:
    """Entries of a reply; one whose content was deleted while pending has no fields and is left out."""
    return [
        Entry(shard, entry_id.decode(), _named(fields), reclaimed) for entry_id, fields in entries if fields
    ]


def _named(fields: Mapping[bytes, bytes]) -> dict[str, bytes]:
    return {name.decode(errors="backslashreplace"): value for name, value in fields.items()}
