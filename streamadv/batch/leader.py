"""Rank 0's trainer session: it alone names batches, publishes the version and commits.

Batch k may be named from version k - prefetch on, and is kept until it is committed. `progress.py` holds what the job
has trained; `recovery.py` makes this session. `Candidates` are the groups that it chooses from.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Final

from .. import clock, doors, metrics, tracing
from ..grouping.groups_log import LoggedGroup, Pointer, parse_groups, read_entries
from ..prompts.spec import PREFIX, identity
from ..run import Run
from ..run.heartbeats import SETTLE_S, Attendance, is_over
from ..store.reasons import Reason
from .ends import commit, commit_arguments, drop, warn_of_oversize
from .progress import NamedBatch
from .prompts import CARRIED, RunPrompts
from .record import BatchRecord, apply, find_record, name_batch
from .selection import choose, coefficient_of, running_with
from .session import Session

#: Pages of the groups log read for one batch: bounds how many groups one naming may drop.
SCAN_PAGES: Final = 8
#: Batches' worth of groups of each shard that quotas choose from.
QUOTA_BATCHES: Final = 4
#: Seconds until candidates that are too few for a batch are judged again: unfit groups among them hold memory.
JUDGE_S: Final = 0.2
#: Seconds within which a producer that waits in its loop over prompts asks for more.
ASK_S: Final = 2.0
#: More than the groups logs hold.
ALL_GROUPS: Final = 10**6


class Candidates:
    """Groups for the next batches, oldest first.

    Invariant: every entry of a shard's log up to its cursor is a candidate, in a named batch, or was dropped.
    """

    def __init__(self, run: Run, named: Iterable[Pointer]) -> None:
        """named: groups of the batches that the session began with, which are in the logs still."""
        self._run = run
        #: With their ids: a server whose clock was set back, and that has lost entries, gives their places to others.
        self.named = {(each.shard, each.entry.encode(), each.group_id.encode()) for each in named}
        #: Last entry read of each shard's groups log. Every session reads from the start: a shard that lost recent
        #: writes has older groups again, see "Going back in time" in docs/reference/guarantees.md.
        self.cursors = dict.fromkeys(range(len(run.keys.salts)), "0-0")
        self._groups: dict[int, list[LoggedGroup]] = {shard: [] for shard in self.cursors}  # in log order
        self.unread = set(self.cursors)  # shards whose log was never read to its end

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __iter__(self) -> Iterator[LoggedGroup]:
        return heapq.merge(*self._groups.values(), key=attrgetter("position"))

    def read_on(self, limit: int) -> bool:
        """Read until there are `limit` candidates of each shard, or its log ends. Returns whether there may be more."""
        has_more = False
        for shard, groups in self._groups.items():
            while (missing := limit - len(groups)) > 0:
                page = read_entries(self._run, shard, self.cursors[shard], missing)
                cursor = page[-1][1].decode() if page else self.cursors[shard]
                new = [entry for entry in page if (*entry[:2], entry[2].get(b"group_id")) not in self.named]
                parsed = parse_groups(self._run.keys, new)
                groups += parsed  # with the cursor at once: an interrupt before it loses nothing
                self.cursors[shard] = cursor
                if len(page) < missing:
                    self.unread.discard(shard)
                    break
            else:
                has_more = True
        return has_more

    def remove(self, groups: Collection[LoggedGroup] | Collection[Pointer]) -> None:
        """Take groups off the list, which were seen on it: they were named, or dropped."""
        removed = {(group.shard, group.entry) for group in groups}
        for shard, candidates in self._groups.items():
            self._groups[shard] = [group for group in candidates if (shard, group.entry) not in removed]


@dataclass(eq=False)
class Leader(Session):
    """Made by `recovery.take_over`."""

    leads: ClassVar[bool] = True
    is_replaced: bool  # a server may not have heard every living producer yet

    def __post_init__(self) -> None:
        super().__post_init__()
        self._may_end_from = clock.now() + SETTLE_S if self.is_replaced else -math.inf
        #: That it has written into the run.
        self.published_version = self.progress.version
        #: Whether the last look at the groups logs came to their end, so that nothing fit for a batch follows.
        self.has_scanned_logs = True
        self._attendance = Attendance(self.run)
        self._judge_due = 0.0
        named = [pointer for batch in self.progress.batches.values() for pointer in batch.record.groups]
        self._candidates = Candidates(self.run, named)
        #: Last entry of each shard's groups log that was read.
        self.cursors = self._candidates.cursors
        self.prompts = RunPrompts(self.run)

    def has_same_servers(self) -> bool:
        """Whether every shard is still on the server it was on, and says there what the session has written.

        In a failover connections may lead to different servers: one was settled, another is read from now.
        """
        asked, run = clock.now(), self.run
        keys = [run.keys.home.session, *(keys.trainer for keys in run.keys.shards)]
        pipe: Any = run.connection.scripts.pipeline(transaction=False)
        for key in keys:
            pipe.hmget(key, ["epoch", "session"])
        server_ids, replies = run.server_ids_with(pipe)
        own = [str(self.progress.epoch).encode(), self.progress.session.encode()]
        if server_ids != self.server_ids or any(reply != own for reply in replies):
            return False
        self.progress.servers_confirmed(asked, caught_up=not self._candidates.unread)
        return True

    # Naming

    def name_ahead(self, ended: bool, max_groups: int | None = None) -> bool:
        """Name every batch that may be named now, and make the shards know it. True if one is new to this session.

        ended: no more groups can come, so fewer make a batch. max_groups: of a batch (default batch_groups).
        """
        is_new = False
        for k in range(self.progress.version, self._last_nameable + 1):
            if k not in self.progress.batches and not self._name(k, ended, max_groups):
                break
            batch = self.progress.batches[k]
            if not batch.is_applied:
                apply(self.run, batch.record, self.progress.fence)
                batch.is_applied = is_new = True
        return is_new

    def _name(self, k: int, ended: bool, max_groups: int | None) -> bool:
        settings, since = self.settings, tracing.now()
        limit = max_groups or settings.batch_groups
        needed = 1 if ended else min(settings.min_groups, limit)
        ahead = limit * (QUOTA_BATCHES if settings.quotas else 1)
        has_more = self._candidates.read_on(ahead)
        if 0 < len(self._candidates) < needed and clock.now() < self._judge_due:
            return False
        self._judge_due = clock.now() + JUDGE_S
        for _ in range(SCAN_PAGES):  # what is dropped leaves the log, so the next page holds others
            groups, has_dropped = self._choose(k, limit)
            if len(groups) >= needed or not (has_dropped or has_more):
                break
            waiting = len(self._candidates) - len(groups)  # other tries of prompts: what follows may be fit
            has_more = self._candidates.read_on(ahead + waiting)
        self.has_scanned_logs = not (has_dropped or has_more)
        self.dropped.lines.log(now=len(groups) >= needed)
        if len(groups) < needed:
            return False
        running = self.progress.running_named
        record = BatchRecord(
            k=k,
            id=f"{k}-{doors.random_bytes(6).hex()}",
            epoch=self.progress.epoch,
            # Sorted by id, so that nothing depends on the order of arrival.
            groups=[group.pointer for group in sorted(groups, key=attrgetter("group_id"))],
            chain=dict(settings.chain),
            late=list(settings.late),
            tokens_per_micro_batch=settings.tokens_per_micro_batch,
            keep_groups=settings.keep_groups,
            kl_coefficient=coefficient_of(self._chain, settings.prefetch, self.progress.kl or {}, k),
            running=running_with(self._chain, running, groups),
            running_before=running,
        )
        if not name_batch(self.run, record, self.progress.fence):
            # The reply to an earlier try was lost: the record there is ours, since it bears our epoch.
            found = find_record(self.run, k)
            if found is None:  # a server has lost it since: the next session names the batch
                return False
            record = found
        self.progress.batches[k] = NamedBatch(record, groups={group.group_id: group for group in groups})
        self._candidates.remove(record.groups)
        self.progress.batches[k].record_spans(tracing.NAME, self.run.name, since)
        if settings.tokens_per_micro_batch is not None:
            warn_of_oversize(self.run.name, k, groups, settings.tokens_per_micro_batch)
        return True

    def _choose(self, k: int, limit: int) -> tuple[list[LoggedGroup], bool]:
        """Up to `limit` groups for batch k, and whether a look at what follows could bring more."""
        since = tracing.now()
        fit, unfit = choose(self._candidates, k, limit, self.settings, self.progress)
        if not unfit:
            return fit, False
        # An entry that a server has lost since would make a copy of the one that came again.
        if not self.has_same_servers():
            return [], True  # what the logs hold is not known, so the run must not end by this look
        for start in range(0, len(unfit), CARRIED):
            part = unfit[start : start + CARRIED]
            drop(self.run, part, self.progress.fence, k, self.settings.drop_after, self.progress.uncommitted)
            self.prompts.note_ended(len(part))
        for group, reason in unfit:
            self.dropped.add(k, group, reason)
        ended = [(reason.removeprefix("dead:"), group.data_source) for group, reason in unfit]
        metrics.groups_ended([metrics.EndedGroup(*each) for each in ended])
        failed = {
            group.group_id: reason.replace(":", ": ") if reason.startswith("dead:") else f"dropped: {reason}"
            for group, reason in unfit
        }
        tracing.record(tracing.NAME, self.run.name, failed, since, k=k, failed=failed)
        self._candidates.remove([group for group, _ in unfit])
        return fit, True

    @property
    def waits_for_groups(self) -> bool:
        """Whether another batch may be named as soon as there are groups for it."""
        return self._last_nameable not in self.progress.batches

    @property
    def _last_nameable(self) -> int:
        """The last batch that may be named at this version."""
        return self.progress.version + self.settings.prefetch

    def waits_for(self, k: int) -> Reason | None:
        """Why batch k cannot be named before the training loop marks earlier ones as trained; None if it can."""
        if k <= self._last_nameable:
            return None
        return Reason(
            "unmarked",
            f"batches {self.progress.version} to {k - 1} are delivered and not marked as trained, prefetch is "
            f"{self.settings.prefetch}",
        )

    def could_name(self, max_groups: int | None = None) -> bool:
        """Read on in the groups logs: whether there are enough groups for another batch."""
        limit = max_groups or self.settings.batch_groups
        self._candidates.read_on(limit)
        return len(self._candidates) >= min(self.settings.min_groups, limit)

    def find(self, k: int) -> BatchRecord | None:
        """The record of batch k, if it has been named."""
        batch = self.progress.batches.get(k)
        return None if batch is None else batch.record

    # Trained and committed

    def publish_version(self, record: BatchRecord | None, commits: bool = False) -> None:
        """Write into the run that the batch was trained, and where the newest weights lie; None = the weights only.

        First in the home shard, then in every shard's copy. commits: that all batches up to this one are in a saved
        checkpoint as well; `commit` does the rest.
        """
        progress = self.progress
        version = progress.version if record is None else record.k + 1
        batch = None if record is None else progress.batches.get(record.k) or NamedBatch(record)
        trained = batch.living if batch is not None else ()
        coefficients = json.dumps(progress.kl) if progress.kl else ""
        commits = commits and version > progress.committed
        for shard in self.run.shards:
            own = sum(pointer.shard == shard.index for pointer in trained)
            args = [progress.fence, version, own, coefficients, progress.weights, version if commits else ""]
            is_home = shard.index == self.run.home.index
            shard.call("trained", args, version=shard.keys.session if is_home else shard.keys.trainer)
            if is_home and commits:
                progress.commit(version)
        if batch is not None:
            for group_id, group in batch.groups.items():
                arguments = commit_arguments(group, batch.record.tokens_per_micro_batch)
                batch.commit_arguments[group_id] = arguments
            batch.groups.clear()
            self.published_version = version

    def commit(self, version: int) -> None:
        """Commit every batch below `version`: first in the run's session, then in every shard."""
        if version > self.progress.committed:
            self.run.home.call("commit_session", [self.progress.fence, version])
            self.progress.commit(version)
        committed = [k for k in sorted(self.progress.batches) if k < self.progress.committed]
        for k in committed:
            batch, since = self.progress.batches[k], tracing.now()
            stored = (batch.commit_arguments, batch.results or (), batch.figures)
            commit(self.run, batch.record, self.progress.fence, *stored, self.prompts.note_ended)
            self.progress.note_deleted(batch.record)
            batch.record_spans(tracing.COMMIT, self.run.name, since)
            # Gone from the logs: a group that a server has lost may come again to the place that it had.
            places = {
                (each.shard, each.entry.encode(), each.group_id.encode()) for each in batch.record.groups
            }
            self._candidates.named -= places
            del self.progress.batches[k]
            if any(group.group_id.startswith(PREFIX) for group in batch.record.groups):
                self.prompts.carry()

    # The end of a run

    def has_ended(self, k: int) -> bool:
        """Whether no batch k can come."""
        return self.has_all(k) and not self.prompts.will_go_on(self._attendance)

    def has_all(self, k: int) -> bool:
        """Whether no more groups for batch k can come, before another one was trained."""
        if k > self._last_nameable:
            return False
        if not is_over(self.run, self._attendance):
            return False
        have_begun = self.prompts.look()  # before anybody is asked for the last time whether more can come
        if have_begun and not is_over(self.run, self._attendance):
            return False
        # Servers that were replaced since the session began may have lost that a producer is alive.
        if clock.now() < self._may_end_from or not self.has_same_servers():
            return False
        # Who waits in a loop has not asked since prompts were set back.
        if clock.now() < self.progress.set_back_at + ASK_S and self.prompts.will_begin(self._attendance):
            return False
        if not have_begun:
            return True
        # No group is open: are prompts to be played again, and by somebody?
        self._candidates.read_on(ALL_GROUPS)
        named = [pointer.group_id for batch in self.progress.batches.values() for pointer in batch.living]
        waiting = [group.group_id for group in self._candidates]
        known = set(map(identity, [*named, *waiting, *self.progress.groups]))
        return not self.prompts.are_left(known, self.progress, self._attendance)

    def finish(self) -> None:
        """Tell the producers that the trainer ends the run."""
        for shard in self.run.shards:
            shard.call("finish_run", [self.progress.fence])

    def publish_end(self, ends: int) -> None:
        """Let the other ranks end before the next batch as well, so many times in all."""
        servers = server_text(self.server_ids)
        self.run.home.call("end_run", [self.progress.fence, self.progress.delivered, ends, servers])


def server_text(server_ids: Sequence[str | None]) -> str:
    """The servers of a run as its session notes them."""
    return "; ".join(server_id or "-" for server_id in server_ids)
