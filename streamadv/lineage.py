"""The training job's side of a run: its epoch, the named batches, and what of them is trained and committed.

Version v says that batches 0 .. v - 1 are in the weights, `committed` c that those below c are in a saved
checkpoint. Batch k is named from version k - prefetch on and kept until it is committed. Rank 0 leads: it alone
names, advances and commits; the others follow the records.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from . import batches, commits, metrics, naming
from .algorithms.config import ChainConfig
from .batch_statistics import KLCoefficients, running_with
from .batches import BatchRecord, LoggedGroup, Pointer, check_fence
from .isolation import Death
from .presence import Attendance, is_over
from .results import batch_scope
from .run import Run

#: Pages of the groups log looked at for one batch: bounds what one naming may drop.
SCAN_PAGES: Final = 8
#: A server may lose commits this recent: they are repeated when their groups come back.
DURABILITY_WINDOW_S: Final = 10.0

#: A lost group comes back when somebody pushes it again: with `resend_window`, or by hand, much later.
RETURN_WINDOW_S: Final = 3600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamingSettings:
    """What the trainer queue decides about batches."""

    batch_groups: int
    min_groups: int  # enough to name a batch
    prefetch: int
    max_staleness: int | None
    drop_after: int | None
    keep_rolled_back: bool
    rolled_back_above: int | None  # version a checkpoint set the run back to
    needs: frozenset[str]  # columns producers must have pushed
    chain: Mapping[str, Any]
    late: tuple[str, ...]
    tokens_per_micro_batch: int | None


@dataclass(frozen=True, slots=True)
class Start:
    """Where a training job goes on from; all of it unset = after the last commit.

    version: of its weights. committed: of its last checkpoint. trained: ids of groups in the weights; when such
    a group is there again, the server has lost its commit. records: named batches as the job remembers them.
    epoch: the last one known. job: unique name of the training job. goes_on: it had the run before the server came
    back, and must not take it from a newer job.
    """

    version: int | None = None
    committed: int | None = None
    trained: Mapping[str, float | None] = field(default_factory=dict)
    records: Mapping[int, BatchRecord] = field(default_factory=dict)
    kl: Mapping[str, float] | None = None  # coefficients after the last batches
    epoch: int = 0
    job: str = ""
    goes_on: bool = False


def returning_since(now: float) -> float:
    """When groups count as committed that a server may have lost: they are remembered for RETURN_WINDOW_S."""
    return now + RETURN_WINDOW_S - DURABILITY_WINDOW_S


class Lineage:
    """One training job's hold on a run, as one rank sees it. Made by taking over: older jobs are fenced."""

    def __init__(
        self,
        run: Run,
        settings: NamingSettings,
        start: Start,
        *,
        leads: bool,
        alone: bool,
        epoch: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.server_ids = run.server_ids()
        self._settings = settings
        self._start = start
        self.leads = leads
        self._alone = alone  # the only rank
        self._clock = clock
        self._attendance = Attendance(run, clock)
        #: Groups in the weights -> when they were committed, None = not yet.
        self.trained = dict(start.trained)
        self._applied: set[str] = set()
        #: Whether the last look at the groups logs came to their end, so that nothing fit for a batch is behind.
        self.scanned = True
        #: Groups dropped at naming, with the reason, until somebody reports and clears them.
        self.passed_over: list[tuple[str, LoggedGroup]] = []
        self._dead: dict[int, set[str]] = {}  # group ids of batch k that became dead letters
        #: What was read of the groups logs and is in no batch yet.
        self._waiting: list[LoggedGroup] = []
        #: Groups of batches that are not trained yet, and what commit needs of them after that.
        self._groups: dict[int, dict[Pointer, LoggedGroup]] = {}
        self._leaving: dict[int, dict[Pointer, commits.Leaving]] = {}
        home = run.keys.home
        if leads:
            version = "" if start.version is None else start.version
            args = [version, start.epoch, start.job, "1" if start.goes_on else "0"]
            reply = run.call("take_epoch", [home.void, home.lineage], args)
            if reply == -1:
                check_fence(run, reply)
            self.epoch, self.version, self.committed = (int(number) for number in reply)
        else:
            fields = run.connection.scripts.hmget(home.lineage, ["epoch", "version", "committed"])
            current, self.version, self.committed = (int(value or 0) for value in fields)
            self.epoch = current if epoch is None else epoch
        self.records = batches.read_records(run, leads)
        stored: Any = run.connection.scripts.hgetall(home.lineage)
        running, kl = stored.get(b"running"), stored.get(b"kl")
        self._running: Mapping[str, float] | None = None if running is None else json.loads(running)
        known = start.kl if start.kl is not None else None if kl is None else json.loads(kl)
        self.kl = KLCoefficients(ChainConfig.model_validate(settings.chain), settings.prefetch, known)
        self._cursors = {
            shard: stored.get(f"cursor:{shard}".encode(), b"0-0").decode()
            for shard in range(len(run.keys.salts))
        }
        if leads:
            self._settle()
        #: Last entry of each shard's groups log that was read (into `_waiting`). From the start: a shard that lost its
        #: last moments alone has groups again that the home slot's cursors have passed.
        self.seen = dict.fromkeys(self._cursors, "0-0")

    def has_same_servers(self) -> bool:
        """Whether every shard is still on the server it was on when this began, and was told of this there.

        Ranks must come to the same answer: several compare the servers only.
        """
        return self.run.server_ids() == self.server_ids and (not self._alone or self._is_told())

    def _is_told(self) -> bool:
        """In a failover connections may lead to different servers: one was settled, another is read from now."""
        pipe = self.run.connection.scripts.pipeline(transaction=False)
        for key in (self.run.keys.home.lineage, *(keys.trainer for keys in self.run.keys.shards)):
            pipe.hget(key, "epoch")
        return set(pipe.execute()) == {str(self.epoch).encode()}

    def remember(self) -> Start:
        """What to go on from when the server comes back without its last moments."""
        returning = returning_since(self._clock())
        trained = {group_id: when and returning for group_id, when in self.trained.items()}
        return Start(
            self.version,
            self.committed,
            trained,
            self.records,
            self.kl.to_json(),
            epoch=self.epoch,
            job=self._start.job,
            goes_on=True,
        )

    def _settle(self) -> None:
        """Finish what an older job, or a server before its restart, left half done."""
        start = self._start
        committed = self.committed if start.committed is None else start.committed
        if committed > self.committed:
            self._write_committed(committed)  # the commit was lost: repeat it
        for k, record in start.records.items():
            if committed <= k < self.version and k not in self.records:
                self._write_record(record)  # its naming was lost, but the weights have it
        self._finish_commits()
        if committed < self.committed:
            # An older checkpoint: what later commits removed stays removed, its numbers are given out again.
            self._write_committed(committed)
        # Behind a batch that misses groups all are named again: there may be none left for it.
        following = self.version
        for k, record in sorted(self.records.items()):
            if k == following and not commits.missing(self.run, record):
                following += 1
            elif k >= following:
                logger.warning("batch %d is named again: the server has lost groups", k)
                self._cursors = commits.take_apart(self.run, record, self._cursors, self.epoch)
                del self.records[k]
        self._tell_shards()
        commits.undo_unknown(self.run, self.records.values(), self.epoch)

    def _write_record(self, record: BatchRecord) -> None:
        # The cursors stay: groups in between may have come back as well, trained ones among them.
        if batches.name(self.run, record, self._cursors, self.epoch):
            self.records[record.k] = record
            self._apply(record)

    def _apply(self, record: BatchRecord) -> None:
        known = [*self.records.values(), *self._start.records.values()]
        batches.apply(self.run, record, batch_scope(record), self.epoch, known)

    def _tell_shards(self) -> None:
        held = [record for k, record in self.records.items() if self.committed <= k < self.version]
        settings = self._settings
        pacing = "" if settings.max_staleness is None else settings.max_staleness
        drop_after = "" if settings.drop_after is None else settings.drop_after
        for shard, keys in enumerate(self.run.keys.shards):
            groups = sum(len(record.in_shard(shard)) for record in held)
            args = [self.epoch, self.version, pacing, settings.batch_groups, groups, drop_after]
            check_fence(self.run, self.run.call("set_trainer", [keys.void, keys.trainer], args))

    # Naming

    def look_ahead(self, ended: bool, max_groups: int | None = None) -> bool:
        """Name every batch that may be named now and make the shards know it. True if one is new to them."""
        if not self.leads:
            return False
        found = False
        for k in range(self.version, self.version + self._settings.prefetch + 1):
            if k not in self.records and not self._name(k, ended, max_groups):
                break
            record = self.records[k]
            if record.id not in self._applied:
                self._apply(record)
                self._applied.add(record.id)
                found = True
        return found

    def _name(self, k: int, ended: bool, max_groups: int | None) -> bool:
        settings = self._settings
        limit = max_groups or settings.batch_groups
        needed = 1 if ended else min(settings.min_groups, limit)
        for _ in range(SCAN_PAGES):  # what is dropped leaves the log, so the next page holds others
            candidates, chosen, refused = self._choose(k, limit)
            if len(chosen) >= needed or not refused:
                break
        self.scanned = not refused
        if len(chosen) < needed:
            return False
        record = naming.make_record(
            k,
            self.epoch,
            chosen,
            chain=dict(settings.chain),
            late=list(settings.late),
            tokens_per_micro_batch=settings.tokens_per_micro_batch,
            kl_coefficient=self.kl.of_batch(k),
            running=running_with(ChainConfig.model_validate(settings.chain), self._running, chosen),
        )
        passed = {group.group_id for group in chosen} | {group.group_id for group, _ in refused}
        cursors = dict(self._cursors)
        cursors.update((group.shard, group.entry) for group in candidates if group.group_id in passed)
        if not batches.name(self.run, record, cursors, self.epoch):
            # The reply to an earlier try was lost: what stands there is ours, the epoch says so.
            record = batches.read_records(self.run)[k]
        self._cursors, self._running = cursors, record.running
        self.records[k] = record
        self._groups[k] = {group.pointer: group for group in chosen}
        named = set(record.groups)
        self._waiting = [group for group in self._waiting if group.pointer not in named]
        return True

    def could_name(self, max_groups: int | None = None) -> bool:
        """Read on in the groups logs: whether there are enough groups for another batch."""
        self._read_on(max_groups or self._settings.batch_groups)
        return self.share_behind_next(max_groups) < 0

    def share_behind_next(self, max_groups: int | None = None) -> float:
        """How much of another batch, 0 to 1, is missing when one more group is there; below 0: none is needed."""
        needed = min(self._settings.min_groups, max_groups or self._settings.batch_groups)
        return (needed - len(self._waiting) - 1) / needed

    @property
    def waits_for_groups(self) -> bool:
        """Whether another batch may be named as soon as there are groups for it."""
        return self.leads and self.version + self._settings.prefetch not in self.records

    def _read_on(self, limit: int) -> None:
        """Have up to `limit` groups of each shard at hand, in the order of the log."""
        held = {(p.shard, p.entry) for record in self.records.values() for p in record.groups}
        for shard in self._cursors:
            missing = limit - sum(group.shard == shard for group in self._waiting)
            while missing > 0:
                page = batches.read_log(self.run, shard, self.seen[shard], missing)
                if not page:
                    break
                self.seen[shard] = page[-1].entry
                fresh = [
                    g for g in page if (shard, g.entry) not in held
                ]  # behind the cursor only after a loss
                earlier = [pointer for record in self.records.values() for pointer in record.groups]
                earlier += [group.pointer for group in self._waiting]
                self._waiting += commits.mark_copies(self.run, fresh, earlier)
                if len(page) < missing:
                    break  # that was the end of the log
                missing -= len(fresh)
        self._waiting.sort(key=lambda group: group.position)

    def _choose(
        self, k: int, limit: int
    ) -> tuple[list[LoggedGroup], list[LoggedGroup], list[tuple[LoggedGroup, str]]]:
        """Groups at the head of the logs, those fit for batch k, and those dropped for it with the reason."""
        settings = self._settings
        self._read_on(limit)
        candidates = self._waiting
        rules = naming.NamingRules(
            drop_after=settings.drop_after,
            needs=settings.needs,
            trained=self.trained,
            rolled_back_above=None if settings.keep_rolled_back else settings.rolled_back_above,
            epoch=self.epoch,
        )
        chosen, refused = naming.choose(candidates, k, limit, rules)
        commits.drop(self.run, refused, self.epoch)
        for group, reason in refused:
            logger.warning("group %s is not trained on: %s", group.group_id, reason)
            metrics.group_ended(reason.removeprefix("dead:"), group.data_source)
            self.passed_over.append((reason, group))
        gone = {group.pointer for group, _ in refused}
        self._waiting = [group for group in candidates if group.pointer not in gone]
        return candidates, chosen, refused

    def read_groups(self, record: BatchRecord, dead: Container[str]) -> list[LoggedGroup]:
        """The groups of a batch without the dead ones, in its order, read from the log once.

        Raises BatchLostError if the server no longer has one.
        """
        known = self._groups.get(record.k, {})
        living = [pointer for pointer in record.groups if pointer.group_id not in dead]
        unknown = [pointer for pointer in living if pointer not in known]
        groups = {**known, **dict(zip(unknown, batches.read_groups(self.run, unknown), strict=True))}
        self._groups[record.k] = groups
        return [groups[pointer] for pointer in living]

    def find(self, k: int) -> BatchRecord | None:
        """The record of batch k, if it has been named."""
        if not self.leads:  # rank 0 may have named it again
            record = batches.find_record(self.run, k)
            if record is not None:
                self.records[k] = record
        return self.records.get(k)

    def bury(self, record: BatchRecord, deaths: Mapping[str, Death]) -> commits.Marks:
        """Groups of batch k that cannot be computed leave it as dead letters. Returns all that is not trained on."""
        dead, left_out = commits.marks(self.run, record)
        if self.leads:
            doomed = [p for p in record.groups if p.group_id in deaths and p.group_id not in dead]
            for group in batches.find_groups(self.run, doomed):
                if group is not None:
                    death = deaths[group.group_id]
                    commits.bury(self.run, group, death.reason, death.detail, record.id, self.epoch)
        self._dead[record.k] = dead | deaths.keys()
        return commits.Marks(self._dead[record.k], left_out)

    def leave_out(self, record: BatchRecord, problems: Mapping[tuple[str, int], str]) -> bool:
        """Members of batch k that this rank cannot read. False when the server has lost or committed the batch."""
        pointers = {pointer.group_id: pointer for pointer in record.groups}
        return all(
            commits.leave_out(self.run, pointers[group_id], index, "undecodable", text, record.id, self.epoch)
            for (group_id, index), text in problems.items()
        )

    # The end of a run

    def has_ended(self, k: int) -> bool:
        """Whether no batch k can come: rank 0 finds out, the others are told."""
        if self.leads:
            return is_over(self.run, self._attendance)
        end = self.run.connection.scripts.hget(self.run.keys.home.lineage, "end")
        return end is not None and int(end) == k

    def tell_end(self, k: int) -> None:
        """Let the other ranks end before batch k as well."""
        if self.leads:
            home = self.run.keys.home
            check_fence(self.run, self.run.call("end_run", [home.void, home.lineage], [self.epoch, k]))

    # Trained and committed

    def advance(self, record: BatchRecord, kl: float | None = None) -> None:
        """Batch k is trained, with this mean KL: first the lineage says so, then every shard's copy."""
        version = record.k + 1
        if version > self.version:
            self.kl.trained(record.k, kl, record.trajectories)
        if self.leads:
            home = self.run.keys.home
            coefficients = self.kl.to_json()
            args = [self.epoch, version, len(record.groups), json.dumps(coefficients) if coefficients else ""]
            check_fence(self.run, self.run.call("trained", [home.void, home.lineage], args))
            for shard, keys in enumerate(self.run.keys.shards):
                living = [p for p in record.in_shard(shard) if p.group_id not in self._dead.get(record.k, ())]
                args = [self.epoch, version, len(living), ""]
                check_fence(self.run, self.run.call("trained", [keys.void, keys.trainer], args))
        self.note_trained(record)

    def note_trained(self, record: BatchRecord) -> None:
        """The batch is in the weights, whatever the server knows."""
        self.version = max(self.version, record.k + 1)
        budget = record.tokens_per_micro_batch
        groups = self._groups.pop(record.k, {})
        leaving = {pointer: commits.leaving(group, budget) for pointer, group in groups.items()}
        self._leaving.setdefault(record.k, leaving)
        dead = self._dead.get(record.k, ())
        self.trained.update((p.group_id, None) for p in record.groups if p.group_id not in dead)

    def commit(self, version: int) -> None:
        """Every batch below `version` is in a saved checkpoint: count and delete them."""
        if version > self.committed:
            self._write_committed(version)
        self._finish_commits()

    def _write_committed(self, version: int) -> None:
        if self.leads:
            home = self.run.keys.home
            args = [self.epoch, version]
            check_fence(self.run, self.run.call("commit_lineage", [home.void, home.lineage], args))
        self.committed = version

    def _finish_commits(self) -> None:
        committed = [k for k in self.records if k < self.committed]
        ready = commits.read_ready(self.run) if committed and self.leads else []
        for k in committed:
            leaving = self._leaving.pop(k, {})
            if self.leads:
                commits.commit(self.run, self.records[k], self.epoch, leaving, ready)
            now = self._clock()
            for pointer in self.records[k].groups:
                if pointer.group_id in self.trained:
                    self.trained[pointer.group_id] = now
            del self.records[k]
            self._dead.pop(k, None)
        oldest = self._clock() - DURABILITY_WINDOW_S
        self.trained = {
            group_id: when for group_id, when in self.trained.items() if when is None or when > oldest
        }
