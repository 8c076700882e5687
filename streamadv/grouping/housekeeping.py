"""A grouper's work once a second: deadlines, scores, lost producers, dead letters, kept groups, garbage.

A group belongs to the instance of a producer that was the last to open it, push to it or touch it. If that instance
is lost, or a later instance has its name, the group stops counting in pacing. It stays open, and counts again as soon
as any producer pushes to it or touches it. Prompts that it has leased are there for others.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from .. import clock, metrics, tracing
from ..messages import log_fields
from ..metrics.instruments import EVALUATED, KEPT
from ..prompts.spec import PREFIX
from ..prompts.stored import carry_ends, give_back_of_lost
from ..run import Run, Shard
from ..run.consumer import GROUPER
from ..run.dead_letters import trim_dead
from ..run.heartbeats import HEARTBEAT_S, Attendance
from ..run.kept import trim_kept
from ..run.malformed import reject
from ..run.manifest import MAX_DEADLINE_S
from ..run.packets import GROUP_ID, MAX_BYTES, is_payload_key
from ..store.replies import as_count, as_text, replies_of
from .scoring_streams import pass_on_ended
from .short_groups import ShortGroups

logger = logging.getLogger(__name__)

#: Packets wait no longer than about this for a grouper that has much to expire or to delete.
HOUSEKEEPING_SLICE_S: Final = 0.5
EXPIRE_COUNT: Final = 100
SWEEP_COUNT: Final = 64
SCORES_COUNT: Final = 64
#: Pages of a list with foreign items that are removed before anything else is done.
FOREIGN_PAGES: Final = 16

_INDEX: Final = re.compile(r"[0-9]{1,4}")


class Housekeeping:
    """What a grouper does beside grouping: settings, deadlines, lost producers, dead letters, garbage."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lost = LostProducers(run)
        self._short = ShortGroups(run)

    def round(self) -> bool:
        """Once through everything; False when there was more than fits into HOUSEKEEPING_SLICE_S."""
        run, until = self._run, clock.now() + HOUSEKEEPING_SLICE_S
        run.refresh()
        self._lost.look()
        self._short.look()
        done, memory = True, run.connection.memory()
        for shard in run.shards:
            more_kept = trim_kept(shard, run.manifest, memory)  # before any group ends
            apply_scores(run, shard)  # before a deadline ends the groups that they complete
            more_due = self._expire(shard, until)
            while pass_on_ended(run, shard) and clock.now() < until:
                pass
            trim_dead(shard, run.manifest.dead_bytes)
            while swept := sweep(shard):
                if clock.now() >= until:
                    break
            done = done and not more_due and not more_kept and not swept
        carry_ends(run)
        return done

    def _expire(self, shard: Shard, until: float) -> bool:
        """End groups past their deadline, page by page; True when there may be more of them."""
        ended = page = expire(self._run, shard)
        while len(page) >= EXPIRE_COUNT and clock.now() < until:
            page = expire(self._run, shard)
            ended = ended + page
        if ended:
            outcomes = Counter(outcome for _, outcome in ended)
            listed = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items())
            text = "%d groups reached their deadline, %s among them: %s"
            fields = log_fields(
                "groups_expired", run=shard.run, role=GROUPER, group=ended[0][0], count=len(ended)
            )
            logger.warning(text, len(ended), ended[0][0], listed, extra=fields)
        return len(page) >= EXPIRE_COUNT


def apply_scores(run: Run, shard: Shard) -> None:
    """Fill in rewards that `producer.score` brought for members taken before, and end the groups that they complete."""
    while items := _checked_items(shard, shard.keys.scored, SCORES_COUNT, _is_scored, "no slot of a group"):
        ids, since = [item.partition(b" ")[2].decode() for item in items], tracing.now()
        group_hashes = map(shard.keys.group, ids)
        ended = shard.call("apply_scores", [*run.manifest.policy_args, *items], group_hashes=group_hashes)
        outcomes = dict(count_ended(ended))
        record_grouped(run, outcomes, since, outcomes)


def expire(run: Run, shard: Shard) -> list[tuple[str, str]]:
    """End groups past their deadline, a page at most; their ids and outcomes.

    Several groupers may try, the script decides.
    """
    now_ms: int = shard.call("tick")
    ids = []
    for member in dict.fromkeys(_due(shard, now_ms)):
        if GROUP_ID.fullmatch(group_id := _text(member)):
            ids.append(group_id)
        else:
            reject(shard, shard.keys.open, member, "no id of a group")
    ended: list[tuple[str, str]] = []
    since = tracing.now()
    while ids:
        args = [*run.manifest.policy_args, *ids]
        looked_at, *flat = shard.call("expire", args, group_hashes=map(shard.keys.group, ids))
        outcomes = count_ended(flat)
        record_grouped(run, dict(outcomes), since, dict(outcomes))
        ended += outcomes
        ids = ids[looked_at:]
    if any(group_id.startswith(PREFIX) for group_id, _ in ended):
        carry_ends(run)  # before a shard forgets the first ones
    return ended


def _due(shard: Shard, now_ms: int) -> list[bytes]:
    """Members of the open set whose deadline has passed, or is so far that foreign processes have written it.

    While the set has more members than the ledger counts, also a page of any: those without a group count in pacing, so
    they must not stay until their deadline.
    """
    open_key, farthest = shard.keys.open, now_ms + round(2 * MAX_DEADLINE_S * 1000)
    pipe = shard.connection.scripts.pipeline(transaction=False)  # MULTI is refused above maxmemory
    pipe.zrangebyscore(open_key, "-inf", now_ms, start=0, num=EXPIRE_COUNT)
    pipe.zrangebyscore(open_key, f"({farthest}", "+inf", start=0, num=EXPIRE_COUNT)
    pipe.zcard(open_key)
    pipe.hget(shard.keys.ledger, "groups_open")
    due, beyond, members, groups_open = pipe.execute()
    page: Any = []
    if members > as_count(groups_open):
        start = random.randrange(max(1, members - EXPIRE_COUNT + 1))
        page = shard.connection.scripts.zrange(open_key, start, start + EXPIRE_COUNT - 1)
    return [*due, *beyond, *page]


def sweep(shard: Shard) -> int:
    """Delete payloads of dropped packets, a slice that does not block the server. Returns how many.

    0: nothing is left, or another grouper is at it.
    """
    garbage = shard.keys.garbage
    items = _checked_items(shard, garbage, SWEEP_COUNT, _is_garbage, "no payload and its bytes")
    if not items:
        return 0
    payloads = [item.rpartition(b" ")[0].decode() for item in items]
    swept: int = shard.call("sweep", items, payloads=payloads)
    return swept


def count_ended(ended: Sequence[Any], whole: Sequence[Sequence[float]] = ()) -> list[tuple[Any, str]]:
    """Count groups that a script has ended in the metrics. Returns which ones, as the script says, and their outcomes.

    ended: of each group which one it is, its outcome, data source and rewards, which blanks separate; instead of them
    None for the group whose number, counted from 1, `whole` has them under.
    """
    names, groups = list[Any](), list[metrics.EndedGroup]()
    for which, outcome, source, rewards in zip(*(ended[field::4] for field in range(4)), strict=True):
        names.append(which.decode() if isinstance(which, bytes) else which)
        figures = whole[which - 1] if rewards is None else list(map(float, rewards.split()))
        groups.append(metrics.EndedGroup(outcome.decode(), as_text(source) or None, figures))
    metrics.groups_ended(groups)
    return [(name, group.outcome) for name, group in zip(names, groups, strict=True)]


def record_grouped(run: Run, group_ids: Iterable[str], since: int, outcomes: Mapping[str, str]) -> None:
    """A span of each group, which has failed where the group is dropped. outcomes: of groups that ended."""
    kept = (*KEPT, EVALUATED)
    failed = {
        group_id: f"dropped: {outcome}" for group_id, outcome in outcomes.items() if outcome not in kept
    }
    tracing.record(tracing.GROUP, run.name, group_ids, since, outcomes=outcomes, failed=failed)


def _checked_items(
    shard: Shard, key: str, count: int, is_item: Callable[[Shard, bytes], bool], problem: str
) -> list[bytes]:
    """The first items of a list, up to `count`. Those that `is_item` refuses are removed as malformed.

    [] also while there are more of these than one call removes.
    """
    for _ in range(FOREIGN_PAGES):
        items: Any = shard.connection.scripts.lrange(key, 0, count - 1)
        foreign = [item for item in items if not is_item(shard, item)]
        if not foreign:
            return list(items)
        for item in foreign:
            reject(shard, key, item, problem)
    return []


def _is_scored(shard: Shard, item: bytes) -> bool:
    index, _, group_id = _text(item).partition(" ")
    return _INDEX.fullmatch(index) is not None and GROUP_ID.fullmatch(group_id) is not None


def _is_garbage(shard: Shard, item: bytes) -> bool:
    key, _, size = item.rpartition(b" ")
    is_size = size.isdigit() and len(size) <= 10 and int(size) <= MAX_BYTES
    return is_size and is_payload_key(shard.keys, _text(key))


def _text(item: bytes) -> str:
    """The item as text; '' if it is no UTF-8."""
    try:
        return item.decode()
    except UnicodeDecodeError:
        return ""


PAGE: Final = 256
#: Whom a group belongs to: name of a producer, and its instance.
OWNER: Final = re.compile(rb"(.*) ([0-9]{1,15})", re.DOTALL)


class LostProducers:
    """What one grouper knows of producers that are lost."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._attendance = Attendance(run)
        self._first_alive: dict[bytes, int] = {}  # of each producer, its first instance that may be alive
        self._due = -math.inf

    def look(self) -> None:
        """Find out who is lost, and what prompts and groups are theirs. Without pacing groups may stay.

        All is looked through whenever the list has changed, and every HEARTBEAT_S: a server may lose what was done.
        """
        self._attendance.look()
        first_alive, now = self._attendance.first_alive, clock.now()
        if first_alive == self._first_alive and now < self._due:
            return
        self._first_alive, self._due = first_alive, now + HEARTBEAT_S
        give_back_of_lost(self._run, first_alive)
        abandoned = [self._abandon(shard) for shard in self._run.shards if self._is_paced(shard)]
        if any(abandoned):  # tickets of a lost producer may open more meanwhile
            self._due = now

    def _is_paced(self, shard: Shard) -> bool:
        """Whether admission depends on open groups: as the trainer says, or the manifest before there is one."""
        max_staleness = shard.connection.scripts.hget(shard.keys.trainer, "max_staleness")
        if max_staleness is None:
            return self._run.manifest.max_staleness is not None
        return max_staleness != b""

    def _abandon(self, shard: Shard) -> int:
        """How many groups no longer count. Pacing bounds how many are open, so they are read one by one."""
        abandoned = 0
        open_groups: Any = shard.connection.scripts.zrange(shard.keys.open, 0, -1)
        for start in range(0, len(open_groups), PAGE):
            members = open_groups[start : start + PAGE]
            pipe = shard.connection.scripts.pipeline(transaction=False)
            for member in members:
                pipe.hget(shard.keys.group("").encode() + member, "producer")
            groups = defaultdict[bytes, list[str]](list)  # by who was the last to open, push to or touch them
            for member, owner in zip(members, replies_of(pipe), strict=True):
                groups[owner or b""].append(member.decode(errors="replace"))
            for owner, ids in groups.items():
                match = OWNER.fullmatch(owner)  # nobody plays those of b""
                if match is None or int(match[2]) >= self._first_alive.get(match[1], 0):
                    continue
                count: int = shard.call("abandon", [owner, *ids], group_hashes=map(shard.keys.group, ids))
                if count:
                    abandoned += count
                    text = "producer %s is lost or was started again: %d of its groups do not count in pacing"
                    fields = log_fields("producer_lost", run=shard.run, role=GROUPER)
                    logger.warning(text, as_text(match[1]), count, extra=fields)
        return abandoned
