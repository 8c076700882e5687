"""The grouper: takes records from the rollouts stream into their groups and ends groups.

A group ends when enough usable, scored members are there, when nothing more can come, or at its deadline
(`lua/lib/complete.lua`). Groupers keep no state of their own: start any number, kill any of them.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from .. import metrics
from ..messages import log_fields
from ..run import Run
from ..run.consumer import GROUPER, Consumer, Entry
from ..run.dead_letters import trim_dead
from ..run.malformed import (
    MAX_BYTES,
    RECORD_FIELDS,
    is_payload_key,
    record_problem,
    reject,
    reject_entry,
)
from ..run.manifest import MAX_DEADLINE_S
from ..store.keys import ShardKeys
from ..store.retry import RETRYABLE, Outage
from .lost_producers import LostProducers
from .scoring import pass_on_ended
from .short_groups import ShortGroups

logger = logging.getLogger(__name__)

STAGE: Final = GROUPER
LEASE_S: Final = 5.0
#: Records of one script call: some 2 ms, in which the server does nothing else.
TAKE_COUNT: Final = 64
#: After a read that took all there was: the next one shares its two round trips among more records.
GATHER_S: Final = 0.010
HOUSEKEEPING_S: Final = 1.0
#: Records wait no longer than about this for a grouper that has much to expire or to delete.
HOUSEKEEPING_SLICE_S: Final = 0.5
#: How often the list of scores is looked at, while records come.
SCORES_S: Final = 0.05
EXPIRE_COUNT: Final = 100
SWEEP_COUNT: Final = 64

_SCORED: Final = re.compile(r"[0-9]{1,4} \S{1,200}")


def run_grouper(
    run: Run,
    stop: threading.Event,
    *,
    lease_s: float = LEASE_S,
    name: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Group until `stop` is set. Redis being away is waited out."""
    consumer = Consumer(run, STAGE, lambda keys: keys.rollouts, lease_s=lease_s, stop=stop, name=name)
    outage = Outage(STAGE, sleep=stop.wait)
    chores, due, behind = Housekeeping(run, clock), clock(), False
    scores_due = due
    while not stop.is_set():
        try:
            entries = consumer.read(TAKE_COUNT, wait=not behind)
            if entries:
                run.keep_up()  # settings given before these were pushed are in force for them
                with metrics.timed(STAGE, "take"):
                    take(run, entries)
                consumer.done(entries)
                if len(entries) < TAKE_COUNT:
                    stop.wait(GATHER_S)
            if clock() >= due:
                behind = not chores.round()
                due = clock() + (0 if behind else HOUSEKEEPING_S)
            elif clock() >= scores_due:
                for keys in run.keys.shards:
                    apply_scores(run, keys)
                scores_due = clock() + SCORES_S
        except RETRYABLE as error:
            consumer.recover()
            outage.pause_after(error)
        else:
            outage.over()
    consumer.give_back()


def take(run: Run, entries: Sequence[Entry]) -> list[str]:
    """Hand entries of one shard off into their groups. Returns the outcomes of groups that ended."""
    shard = run.shard(entries[0].shard)
    keys = shard.keys
    positions: dict[str, int] = {}
    args: list[bytes | str | int] = [STAGE, *run.manifest.policy_args]
    payloads = []
    for entry in entries:
        problem = record_problem(run, entry.shard, entry.fields)
        if problem is not None:
            reject_entry(run, entry, keys.rollouts, problem, STAGE)
            continue
        group_id = entry.fields["group_id"].decode()
        position = positions.setdefault(group_id, len(positions) + 1)
        args += [entry.id, position]
        args += [entry.fields[name] for name in RECORD_FIELDS]
        if entry.fields["bytes"] != b"0":
            payloads.append(entry.fields["key"].decode())
    if not positions:
        return []
    taken, *ended = shard.call("take", args, group_hashes=map(keys.group, positions), payloads=payloads)
    metrics.entries(STAGE, "acked", taken)
    return [_ended(outcome, source) for outcome, source in zip(ended[::2], ended[1::2], strict=True)]


class Housekeeping:
    """What a grouper does beside grouping: settings, deadlines, lost producers, dead letters, garbage."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._lost = LostProducers(run, clock)
        self._short = ShortGroups(run, clock)

    def round(self) -> bool:
        """Once through everything; False when there was more than fits into HOUSEKEEPING_SLICE_S."""
        run, until = self._run, self._clock() + HOUSEKEEPING_SLICE_S
        run.refresh()
        self._lost.look()
        self._short.look()
        done = True
        for shard, keys in enumerate(run.keys.shards):
            mend_streams(run, keys)
            apply_scores(run, keys)  # before a deadline ends what they complete
            full = self._expire(keys, until)
            while pass_on_ended(run, shard) and self._clock() < until:
                pass
            trim_dead(run, keys)
            while swept := sweep(run, keys):
                if self._clock() >= until:
                    break
            done = done and not full and not swept
        return done

    def _expire(self, keys: ShardKeys, until: float) -> bool:
        """End groups past their deadline, page by page; True when there may be more of them."""
        ended = page = expire(self._run, keys)
        while len(page) >= EXPIRE_COUNT and self._clock() < until:
            page = expire(self._run, keys)
            ended = ended + page
        if ended:
            told = ", ".join(f"{name} {n}" for name, n in Counter(name for _, name in ended).items())
            text = "%d groups reached their deadline, %s among them: %s"
            fields = log_fields("groups_expired", run=self._run.name, role=STAGE, group=ended[0][0])
            logger.warning(text, len(ended), ended[0][0], told, extra=fields)
        return len(page) >= EXPIRE_COUNT


def mend_streams(run: Run, keys: ShardKeys) -> None:
    """Have streams that producers may write go on whose last id somebody has set to the last possible one."""
    for stream in (keys.rollouts, *map(keys.scoring, run.manifest.scorers)):
        place = stream.partition("}:")[2]
        if run.call("mend_stream", [keys.void, stream, keys.ledger, keys.malformed], [place]):
            text = "%s: somebody has set its last id, it was made anew with all its entries"
            logger.error(text, place, extra=log_fields("stream_mended", run=run.name, role=STAGE))


def apply_scores(run: Run, keys: ShardKeys) -> None:
    """Fill in what `producer.score` brought, and end the groups that it completes."""
    while True:
        items: Any = run.connection.scripts.lrange(keys.scored, 0, TAKE_COUNT - 1)
        if not items:
            return
        wrong = [item for item in items if not _SCORED.fullmatch(item.decode(errors="replace"))]
        for item in wrong:
            reject(run, keys, keys.scored, item, "no slot of a group")
        if wrong:
            continue
        names = [keys.void, keys.scored, keys.open, keys.groups, keys.ended, keys.ended_before, keys.ledger]
        ids = [item.partition(b" ")[2].decode(errors="replace") for item in items]
        names += [keys.garbage, keys.sizes, *map(keys.group, ids)]
        ended = run.call("apply_scores", names, [*run.manifest.policy_args, *items])
        for outcome, source in zip(ended[::2], ended[1::2], strict=True):
            _ended(outcome, source)


def expire(run: Run, keys: ShardKeys) -> list[tuple[str, str]]:
    """End groups past their deadline, a page at most; their ids and outcomes.

    Several groupers may try, the script decides.
    """
    now_ms = run.now_ms()
    due: Any = run.connection.scripts.zrangebyscore(keys.open, "-inf", now_ms, start=0, num=EXPIRE_COUNT)
    waiting = []
    for member in [*due, *_shorten_deadlines(run, keys, now_ms)]:
        try:
            waiting.append(member.decode())
        except UnicodeDecodeError:
            reject(run, keys, keys.open, member, "no UTF-8")
    fixed = [keys.void, keys.open, keys.rollouts, keys.groups, keys.ended, keys.ended_before, keys.ledger]
    fixed += [keys.garbage, keys.malformed, keys.sizes]
    ended: list[tuple[str, str]] = []
    while waiting:
        names = [*fixed, *map(keys.group, waiting)]
        looked_at, *flat = run.call("expire", names, [*run.manifest.policy_args, *waiting])
        ended += [
            (group_id.decode(), _ended(outcome, source))
            for group_id, outcome, source in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        ]
        waiting = waiting[looked_at:]
    return ended


def _shorten_deadlines(run: Run, keys: ShardKeys, now_ms: int) -> list[bytes]:
    """Give groups whose deadline is farther than any may be the run's own. Returns them: some may be no groups.

    Such deadlines keep a run from ending. They come from a foreign process, or from a server whose clock was ahead.
    """
    farthest = now_ms + round(2 * MAX_DEADLINE_S * 1000)
    scripts = run.connection.scripts
    beyond: Any = scripts.zrangebyscore(keys.open, f"({farthest}", "+inf", start=0, num=EXPIRE_COUNT)
    if beyond:
        deadline = now_ms + round(run.manifest.group_deadline_s * 1000)
        with suppress(OutOfMemoryError):  # above maxmemory: later
            scripts.zadd(keys.open, dict.fromkeys(beyond, deadline), xx=True)
        text = "%d open groups had deadlines farther than any may be: they get the run's"
        logger.warning(text, len(beyond), extra=log_fields("deadlines_shortened", run=run.name, role=STAGE))
    return list(beyond)


def sweep(run: Run, keys: ShardKeys) -> int:
    """Delete payloads of dropped trajectories, a slice that does not block the server. Returns how many.

    0: nothing is left, or another grouper is at it.
    """
    while True:
        items: Any = run.connection.scripts.lrange(keys.garbage, 0, SWEEP_COUNT - 1)
        wrong = [item for item in items if not _is_garbage(keys, item)]
        if not wrong:
            break
        for item in wrong:
            reject(run, keys, keys.garbage, item, "no payload and its bytes")
    if not items:
        return 0
    payloads = [item.rpartition(b" ")[0].decode() for item in items]
    swept: int = run.call("sweep", [keys.void, keys.garbage, keys.ledger, *payloads], items)
    return swept


def _is_garbage(keys: ShardKeys, item: bytes) -> bool:
    key, _, size = item.rpartition(b" ")
    is_size = size.isdigit() and len(size) <= 10 and int(size) <= MAX_BYTES
    return is_size and is_payload_key(keys, key.decode(errors="replace"))


def _ended(outcome: bytes, data_source: bytes) -> str:
    metrics.group_ended(outcome.decode(), data_source.decode() or None)
    return outcome.decode()
