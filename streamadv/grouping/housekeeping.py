"""A grouper's work once a second.

Deadlines, scores, lost producers, dead letters, kept groups, garbage, and a warning when many groups end short.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from .. import clock, metrics, tracing
from ..errors import WireError
from ..messages import log_fields
from ..metrics.instruments import EVALUATED, KEPT
from ..prompts.spec import PREFIX
from ..prompts.stored import carry_ends, give_back_of_lost
from ..run import Run, Shard
from ..run.consumer import GROUPER, Entry
from ..run.dead_letters import reject, trim_dead
from ..run.heartbeats import HEARTBEAT_S, Attendance
from ..run.kept import trim_kept
from ..run.manifest import MAX_DEADLINE_S
from ..run.packets import GROUP_ID, MAX_BYTES, is_payload_key, read_packet
from ..store.replies import as_count, as_text, replies_of
from ..store.retry import NotNowError
from .scoring_streams import PAGE as STREAM_PAGE
from .scoring_streams import are_open, pass_on, waiting_entries

logger = logging.getLogger(__name__)

#: Packets wait no longer than about this for a grouper that has much to expire or to delete.
HOUSEKEEPING_SLICE_S: Final = 0.5
EXPIRE_COUNT: Final = 100
SWEEP_COUNT: Final = 64
SCORES_COUNT: Final = 64
#: Pages of a list with foreign items that are removed before anything else is done.
FOREIGN_PAGES: Final = 16
#: Open groups whose owners are asked for in one call.
PAGE: Final = 256
#: Whom a group belongs to: name of a producer, and its instance.
OWNER: Final = re.compile(rb"(.*) ([0-9]{1,15})", re.DOTALL)

_INDEX: Final = re.compile(r"[0-9]{1,4}")


class Housekeeping:
    """What a grouper does beside grouping: settings, deadlines, lost producers, dead letters, garbage."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._attendance = Attendance(run)
        self._first_alive: dict[bytes, int] = {}  # of each producer, its first instance that may be alive
        self._lost_due = -math.inf
        self._judged = clock.now()  # when it was last seen whether many groups end short
        self._counters: Counter[str] | None = None  # of the ledger then, or at the first look

    def round(self) -> bool:
        """Once through everything; False when there was more than fits into HOUSEKEEPING_SLICE_S."""
        run, until = self._run, clock.now() + HOUSEKEEPING_SLICE_S
        run.refresh()
        self.look_for_lost()
        self._warn_of_loss()
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

    def _warn_of_loss(self) -> None:
        """Log when many of the groups since the last judgement ended short."""
        run = self._run
        now, counters = clock.now(), run.counters()
        self._counters = self._counters or counters
        lately = loss_of(counters - self._counters)
        if lately.ended >= (MIN_GROUPS if now - self._judged >= JUDGE_AFTER_S else WINDOW):
            if lately.is_much:
                logger.warning("%s", lately, extra=log_fields("groups_short", run=run.name, role=GROUPER))
            self._judged, self._counters = now, counters

    def look_for_lost(self) -> None:
        """Find out who is lost, and what prompts and groups are theirs. Without pacing groups may stay.

        All is looked through whenever the list has changed, and every HEARTBEAT_S: a server may lose what was done.
        """
        self._attendance.look()
        first_alive, now = self._attendance.first_alive, clock.now()
        if first_alive == self._first_alive and now < self._lost_due:
            return
        self._first_alive, self._lost_due = first_alive, now + HEARTBEAT_S
        give_back_of_lost(self._run, first_alive)
        abandoned = [self._abandon(shard) for shard in self._run.shards]
        if any(abandoned):  # tickets of a lost producer may open more meanwhile
            self._lost_due = now

    def _abandon(self, shard: Shard) -> int:
        """How many groups no longer count. Pacing bounds how many are open, so they are read one by one."""
        abandoned, max_staleness = 0, shard.connection.scripts.hget(shard.keys.trainer, "max_staleness")
        # Open groups count in admission if the trainer says so, or the manifest before there is one.
        if max_staleness == b"" or (max_staleness is None and self._run.manifest.max_staleness is None):
            return 0
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

    def is_scored(item: str) -> bool:
        index, _, group_id = item.partition(" ")
        return _INDEX.fullmatch(index) is not None and GROUP_ID.fullmatch(group_id) is not None

    while items := _checked_items(shard, shard.keys.scored, SCORES_COUNT, is_scored, "no slot of a group"):
        ids, since = [item.partition(" ")[2] for item in items], tracing.now()
        group_hashes = map(shard.keys.group, ids)
        ended = shard.call("apply_scores", [*run.manifest.policy_args, *items], group_hashes=group_hashes)
        note_ended(run, since, ended)


def expire(run: Run, shard: Shard) -> list[tuple[str, str]]:
    """End groups past their deadline, a page at most; their ids and outcomes.

    Several groupers may try, the script decides. A deadline that is too far is one that foreign processes have written.
    While the set has more members than the ledger counts, also a page of any is looked at: those without a group count
    in pacing, so they must not stay until their deadline.
    """
    now_ms: int = shard.call("tick")
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
    ids = []
    for member in dict.fromkeys([*due, *beyond, *page]):
        if GROUP_ID.fullmatch(group_id := _text(member)):
            ids.append(group_id)
        else:
            reject(shard, shard.keys.open, member, "no id of a group")
    ended: list[tuple[str, str]] = []
    since = tracing.now()
    while ids:
        args = [*run.manifest.policy_args, *ids]
        looked_at, *flat = shard.call("expire", args, group_hashes=map(shard.keys.group, ids))
        ended += note_ended(run, since, flat).items()
        ids = ids[looked_at:]
    return ended


def pass_on_ended(run: Run, shard: Shard) -> int:
    """Send what waits for a scorer although its group has ended to the grouper: no scorer may run that would do so.

    Looks at a page of each scorer's stream. Returns how many packets were sent.
    """
    passed = 0
    for scorer in run.manifest.scorers:
        packets = list[Entry]()
        for entry in islice(waiting_entries(shard, scorer), STREAM_PAGE):
            with suppress(WireError):
                read_packet(run, shard.index, entry.fields)
                packets.append(entry)
        states = are_open(run, packets)
        ended = [entry for entry, is_open in zip(packets, states, strict=True) if not is_open]
        with suppress(NotNowError):  # while the rollouts stream takes no more, groupers go on emptying it
            passed += pass_on(shard, scorer, ended)
    return passed


def sweep(shard: Shard) -> int:
    """Delete payloads of dropped packets, a slice that does not block the server. Returns how many.

    0: nothing is left, or another grouper is at it.
    """

    def is_garbage(item: str) -> bool:
        key, _, size = item.rpartition(" ")
        is_size = re.fullmatch("[0-9]{1,10}", size) is not None and int(size) <= MAX_BYTES
        return is_size and is_payload_key(shard.keys, key)

    problem = "no payload and its bytes"
    items = _checked_items(shard, shard.keys.garbage, SWEEP_COUNT, is_garbage, problem)
    payloads = [item.rpartition(" ")[0] for item in items]
    return shard.call("sweep", items, payloads=payloads) if items else 0


def note_ended(
    run: Run,
    since: int,
    ended: Sequence[Any],
    ids: Sequence[str] | None = None,
    whole: Sequence[Sequence[float]] = (),
) -> dict[str, str]:
    """Metrics and spans of groups that a script has ended; those of prompts are carried. Returns outcomes, by id.

    Args:
      since: when the script was prepared, as `tracing.now`.
      ended: of each group which one it is, its outcome, data source and rewards, which blanks separate.
      ids: of all groups that the script has seen; None = those that ended. With them `ended` has instead of an id the
        group's number, counted from 1, and None for rewards that `whole` has under this number.
    """
    outcomes, groups = dict[str, str](), list[metrics.EndedGroup]()
    for which, outcome, source, rewards in zip(*(ended[field::4] for field in range(4)), strict=True):
        group_id = which.decode() if ids is None else ids[which - 1]
        figures = whole[which - 1] if rewards is None else list(map(float, rewards.split()))
        outcomes[group_id] = outcome.decode()
        groups.append(metrics.EndedGroup(outcomes[group_id], as_text(source) or None, figures))
    metrics.groups_ended(groups)
    kept = (*KEPT, EVALUATED)
    failed = {
        group_id: f"dropped: {outcome}" for group_id, outcome in outcomes.items() if outcome not in kept
    }
    tracing.record(
        tracing.GROUP, run.name, outcomes if ids is None else ids, since, outcomes=outcomes, failed=failed
    )
    if any(group_id.startswith(PREFIX) for group_id in failed):
        carry_ends(run)  # before a shard forgets the first ones
    return outcomes


def _checked_items(
    shard: Shard, key: str, count: int, is_item: Callable[[str], bool], problem: str
) -> list[str]:
    """The first items of a list, up to `count`. Those that `is_item` refuses are removed as malformed.

    [] also while there are more of these than one call removes.
    """
    for _ in range(FOREIGN_PAGES):
        items: Any = shard.connection.scripts.lrange(key, 0, count - 1)
        foreign = [item for item in items if not is_item(_text(item))]
        if not foreign:
            return list(map(_text, items))
        for item in foreign:
            reject(shard, key, item, problem)
    return []


def _text(item: bytes) -> str:
    """The item as text; '' if it is no UTF-8."""
    try:
        return item.decode()
    except UnicodeDecodeError:
        return ""


# Groups that end short

# What groups cost that end short of usable rollouts: a failed rollout costs its whole group, unless
# `partial_min_usable` or `redundancy` allows for it. By default only whole groups are trained on, because mean and
# deviation over the rollouts that happened not to fail are biased towards them.
SHORT: Final = ("incomplete", "expired")
#: How a group can end in the grouper.
GROUPER_ENDINGS: Final = (*SHORT, "complete", "partial", "zero_variance", "difficulty", "no_train_members")
#: How a slot can end without a usable trajectory.
UNUSABLE: Final = ("failed", "aborted", "cancelled", "unscorable")
#: From this share of groups, or of usable trajectories, on groupers warn.
WARN_RATIO: Final = 0.2
#: Groups after which the shares are judged; after JUDGE_AFTER_S seconds MIN_GROUPS are enough.
WINDOW: Final = 20
MIN_GROUPS: Final = 5
JUDGE_AFTER_S: Final = 30.0
REMEDY: Final = (
    "play failed rollouts again by group.run(..., retries=), set partial_min_usable to train on short groups, or "
    "redundancy to have rollouts to spare"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """`groups` of `ended` groups ended short; they took `trajectories` of `usable` usable trajectories with them."""

    groups: int
    ended: int
    trajectories: int
    usable: int

    @property
    def is_much(self) -> bool:
        shares = [(self.groups, self.ended), (self.trajectories, self.usable)]
        is_large = any(lost / total >= WARN_RATIO for lost, total in shares if total)
        return self.ended >= MIN_GROUPS and is_large

    def __str__(self) -> str:
        return (
            f"{self.groups} of {self.ended} groups ended short of usable rollouts and were dropped, with "
            f"{self.trajectories} usable trajectories: {REMEDY}"
        )


def loss_of(counters: Mapping[str, int]) -> Loss:
    """From the counters of a ledger."""
    ended = {ending: counters.get(f"outcome:{ending}", 0) for ending in GROUPER_ENDINGS}
    dropped = {reason: counters.get(f"dropped:{reason}", 0) for reason in (*SHORT, *UNUSABLE, "eval")}
    short = [dropped.pop(reason) for reason in SHORT]
    usable = counters.get("pushed", 0) - sum(dropped.values())
    return Loss(sum(ended[ending] for ending in SHORT), sum(ended.values()), sum(short), usable)
