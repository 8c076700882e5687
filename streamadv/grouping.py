"""The grouper: takes records from the rollouts stream into their groups and ends groups.

A group ends when enough usable, scored members are there, when nothing more can come, or at its deadline
(`lua/lib/complete.lua`). Groupers keep no state of their own: start any number, kill any of them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import metrics
from .dead_letters import trim_dead
from .keys import ShardKeys
from .malformed import RECORD_FIELDS, is_payload_key, record_problem, reject_entry, reject_item, whole
from .outages import RETRYABLE, Backoff, retried
from .run import Run
from .scoring import pass_on_ended
from .streams import GROUPER, Consumer, Entry

logger = logging.getLogger(__name__)

STAGE: Final = GROUPER
LEASE_S: Final = 5.0
#: Records of one script call: some 2 ms, in which the server does nothing else.
TAKE_COUNT: Final = 64
#: After a read that took all there was: the next one shares its two round trips among more records.
GATHER_S: Final = 0.010
HOUSEKEEPING_S: Final = 1.0
EXPIRE_COUNT: Final = 100
SWEEP_COUNT: Final = 64


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
    backoff = Backoff(sleep=stop.wait)
    due = clock()
    while not stop.is_set():
        try:
            entries = consumer.read(TAKE_COUNT)
            if entries:
                run.keep_up()  # settings given before these were pushed are in force for them
                with metrics.timed(STAGE, "take"):
                    take(run, entries)
                consumer.done(entries)
                if len(entries) < TAKE_COUNT:
                    stop.wait(GATHER_S)
            if clock() >= due:
                housekeeping(run)
                due = clock() + HOUSEKEEPING_S
        except RETRYABLE as error:
            retried(STAGE, error, backoff)
            consumer.recover()
            backoff.wait()
        else:
            backoff.reset()
    consumer.give_back()


def take(run: Run, entries: Sequence[Entry]) -> list[str]:
    """Hand entries of one shard off into their groups. Returns the outcomes of groups that ended."""
    keys = run.keys.shard(entries[0].shard)
    positions: dict[str, int] = {}
    fixed = [keys.void, keys.rollouts, keys.open, keys.groups, keys.ended, keys.ended_before, keys.ledger]
    fixed += [keys.garbage, keys.malformed, keys.sizes]
    args: list[bytes | str | int] = [STAGE, *run.manifest.policy_args]
    payloads = []
    for entry in entries:
        problem = record_problem(run, entry.shard, entry.fields)
        if problem is not None:
            reject_entry(run, entry, keys.rollouts, problem, STAGE)
            continue
        group_id = entry.fields["group_id"].decode()
        position = positions.setdefault(group_id, len(fixed) + len(positions) + 1)
        args += [entry.id, position]
        args += [entry.fields[name] for name in RECORD_FIELDS]
        if entry.fields["bytes"] != b"0":
            payloads.append(entry.fields["key"].decode())
    if not positions:
        return []
    names = [*fixed, *[keys.group(group_id) for group_id in positions], *payloads]
    taken = run.call("take", names, args)
    metrics.entries(STAGE, "acked", len(taken) // 3)
    return [
        _ended(outcome, source) for outcome, source in zip(taken[1::3], taken[2::3], strict=True) if outcome
    ]


def housekeeping(run: Run) -> None:
    """What is done every second: settings, deadlines, records nobody scores any more, dead letters, garbage."""
    run.refresh()
    for shard, keys in enumerate(run.keys.shards):
        expire(run, keys)
        pass_on_ended(run, shard)
        trim_dead(run, keys)
        sweep(run, keys)


def expire(run: Run, keys: ShardKeys) -> list[str]:
    """End groups past their deadline; several groupers may try, the script decides."""
    now_s, microseconds = run.connection.scripts.time()
    now_ms = now_s * 1000 + microseconds // 1000
    due: Any = run.connection.scripts.zrangebyscore(keys.open, "-inf", now_ms, start=0, num=EXPIRE_COUNT)
    outcomes = []
    for member in [*due, *_foreign_members(run, keys)]:
        try:
            group_id = member.decode()
        except UnicodeDecodeError:
            reject_item(run, keys, keys.open, member, "no UTF-8", removal="ZREM")
            continue
        names = [keys.void, keys.open, keys.rollouts, keys.group(group_id), keys.groups]
        names += [keys.ended, keys.ended_before, keys.ledger, keys.garbage, keys.malformed, keys.sizes]
        if ended := run.call("expire", names, [group_id, *run.manifest.policy_args]):
            outcomes.append(_ended(*ended))
            logger.warning("group %s reached its deadline: %s", group_id, outcomes[-1])
    return outcomes


def _foreign_members(run: Run, keys: ShardKeys) -> list[bytes]:
    """Members of the open set without a group, looked for where there are more than the ledger knows of.

    A sample: what it misses is found in the next second, at the latest when few groups are open.
    """
    pipe = run.connection.scripts.pipeline(transaction=False)  # MULTI is refused above maxmemory
    pipe.zcard(keys.open)
    pipe.hget(keys.ledger, "groups_open")
    there, counted = pipe.execute()
    if there <= whole(counted):
        return []
    start = random.randrange(max(1, there - EXPIRE_COUNT + 1))
    members: Any = run.connection.scripts.zrange(keys.open, start, start + EXPIRE_COUNT - 1)
    pipe = run.connection.scripts.pipeline(transaction=False)
    for member in members:
        pipe.exists(keys.group("").encode() + member)
    return [member for member, exists in zip(members, pipe.execute(), strict=True) if not exists]


def sweep(run: Run, keys: ShardKeys) -> int:
    """Delete the payloads of dropped trajectories, in slices that do not block the server."""
    deleted = 0
    while True:
        items: Any = run.connection.scripts.lrange(keys.garbage, 0, SWEEP_COUNT - 1)
        wrong = [item for item in items if not _is_garbage(keys, item)]
        for item in wrong:
            reject_item(run, keys, keys.garbage, item, "no payload and its bytes", removal="LREM")
        if wrong:
            continue
        payloads = [item.rpartition(b" ")[0].decode() for item in items]
        swept = run.call("sweep", [keys.void, keys.garbage, keys.ledger, *payloads], items) if items else 0
        deleted += swept
        if not swept:  # nothing left, or another grouper is at it
            return deleted


def _is_garbage(keys: ShardKeys, item: bytes) -> bool:
    key, _, size = item.rpartition(b" ")
    return size.isdigit() and len(size) < 16 and is_payload_key(keys, key.decode(errors="replace"))


def _ended(outcome: bytes, data_source: bytes) -> str:
    metrics.group_ended(outcome.decode(), data_source.decode() or None)
    return outcome.decode()
