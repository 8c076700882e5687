"""Rank 0's side of a run: it alone names batches, moves the version on and commits.

Batch k is named from version k - prefetch on and kept until it is committed. What the job has trained is in
`progress.py`, how it holds the run in `session.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from .. import metrics
from ..algorithms.chain.config import ChainConfig
from ..grouping.groups_log import LoggedGroup, Pointer, find_groups, read_log
from ..run import Run
from ..run.heartbeats import Attendance, is_over
from . import commit as batch_commit
from . import record as batch_record
from . import selection
from .carryover import running_with
from .progress import Progress
from .record import BatchRecord, Death
from .selection import NamingSettings
from .session import Session, take
from .work import apply

#: Pages of the groups log looked at for one batch: bounds what one naming may drop.
SCAN_PAGES: Final = 8
#: Groups counted in one call of `set_trainer.lua`.
HELD_SLICE: Final = 1000

logger = logging.getLogger(__name__)


class Lineage(Session):
    """Rank 0's hold on a run, on one server. Made by taking it: older jobs are fenced, raises EpochFencedError."""

    leads = True

    def __init__(self, run: Run, settings: NamingSettings, progress: Progress) -> None:
        super().__init__(run, progress)
        self._settings = settings
        self._attendance = Attendance(run)
        self._applied: set[str] = set()
        #: What was read of the groups logs and is in no batch yet.
        self._waiting: list[LoggedGroup] = []
        #: What commit needs of batches that are trained.
        self._leaving: dict[int, dict[Pointer, batch_commit.Leaving]] = {}
        #: Last entry of each shard's groups log that was read (into `_waiting`). Every session reads from the start: a
        #: shard that lost recent writes has older groups again, see "Going back in time" in docs/reliability.md.
        self.seen = dict.fromkeys(range(len(run.keys.salts)), "0-0")
        self._read_to_end: set[int] = set()  # shards
        declared, begins = take(run, progress)
        recorded = batch_record.read_records(run, leads=True)
        stored: Any = run.connection.scripts.hgetall(run.keys.home.lineage)
        self._know(stored.get(b"kl"), settings)
        if not progress.knows_running:
            running = stored.get(b"running")
            progress.running = None if running is None else json.loads(running)
            following = recorded.get(progress.version)
            if following is not None:
                progress.running = following.running_before
            progress.knows_running = True
        self._settle(recorded, declared, begins)
        self.told = progress.version

    def _is_told(self) -> bool:
        """In a failover connections may lead to different servers: one was settled, another is read from now."""
        pipe = self.run.connection.scripts.pipeline(transaction=False)
        for key in (self.run.keys.home.lineage, *(keys.trainer for keys in self.run.keys.shards)):
            pipe.hget(key, "epoch")
        return set(pipe.execute()) == {str(self.epoch).encode()}

    def _has_caught_up(self) -> bool:
        return len(self._read_to_end) == len(self.seen)

    # Taking over

    def _settle(self, recorded: dict[int, BatchRecord], declared: int, begins: bool) -> None:
        """Make the run say what this job knows, and finish what an older job, or a server's restart, left half done.

        recorded: what the run has of batches. declared: version up to which it says they are committed.
        """
        progress = self.progress
        for k in [k for k in sorted(recorded) if k < declared]:
            self._finish_commit(recorded.pop(k))  # in somebody's checkpoint
        foreign = [record for record in recorded.values() if not self._is_ours(record, begins)]
        self._take_apart(foreign)
        for record in foreign:
            del recorded[record.k]
        self._write_committed(progress.committed)
        for k in [k for k in sorted(recorded) if k < progress.committed]:
            self._finish_commit(recorded.pop(k))  # that commit was lost
        mine = {k: record for k, record in self.records.items() if k >= progress.committed}
        # Behind a batch that misses groups all are named again: there may be none left for it.
        following, lost = progress.delivered, []
        known = {**recorded, **mine}
        for k in sorted(known):
            if k >= progress.delivered:
                if k > following or batch_commit.missing(self.run, known[k]):
                    logger.warning("batch %d is named again: the server has lost groups", k)
                    lost.append(known[k])
                    continue
                following += 1
            if k not in recorded:
                batch_record.name(
                    self.run, known[k], self.epoch
                )  # its naming was lost, but a rank may have it
        self._take_apart(lost)
        progress.records = {k: record for k, record in known.items() if record not in lost}
        applied = [batch_commit.applied_ids(self.run, shard) for shard in range(len(self.run.keys.salts))]
        for record in self.records.values():
            if any(record.id not in applied[pointer.shard] for pointer in record.groups):
                self._apply(record)
        for k, deaths in list(progress.deaths.items()):
            if deaths and k in self.records:
                self.bury(self.records[k], deaths)  # that may be lost
        self._tell_shards()
        batch_commit.undo_unknown(self.run, self.records.values(), self.epoch)
        if progress.ends:
            self.tell_end(progress.ends)  # to ranks that have not asked yet
        running = self._running
        args = [self.epoch, json.dumps(running) if running else ""]
        self.run.home.call("settled", args)

    def _is_ours(self, record: BatchRecord, begins: bool) -> bool:
        """Whether a record of the run is of this job's past, or a batch that it takes over as it is."""
        progress = self.progress
        mine = progress.records.get(record.k)
        if mine is not None:
            return record.id == mine.id
        if record.k < progress.version:  # of a branch that this checkpoint is not from, if named after it
            return not begins or record.epoch <= progress.loaded_epoch
        return begins or record.epoch >= progress.branch

    def _take_apart(self, records: Iterable[BatchRecord]) -> None:
        """Undo their naming. The last one first, so that what is left at any moment is a lineage without a gap."""
        for record in sorted(records, key=lambda each: -each.k):
            batch_commit.take_apart(self.run, record, self.epoch)

    def _apply(self, record: BatchRecord) -> None:
        apply(self.run, record, self.epoch)

    def _tell_shards(self) -> None:
        progress, settings = self.progress, self._settings
        held = [r for k, r in self.records.items() if progress.committed <= k < progress.version]
        pacing = "" if settings.max_staleness is None else settings.max_staleness
        drop_after = "" if settings.drop_after is None else settings.drop_after
        for shard in self.run.shards:
            entries = [pointer.entry for record in held for pointer in record.in_shard(shard.index)]
            for first in range(0, max(1, len(entries)), HELD_SLICE):
                args = [self.epoch, progress.version, pacing, settings.batch_groups, drop_after]
                args += ["1" if first else "0", *entries[first : first + HELD_SLICE]]
                shard.call("set_trainer", args)

    @property
    def _running(self) -> Mapping[str, float] | None:
        """Moments of the rewards of all named batches: what the next one goes on from."""
        ahead = [k for k in self.records if k >= self.progress.version]
        return self.records[max(ahead)].running if ahead else self.progress.running

    # Naming

    def look_ahead(self, ended: bool, max_groups: int | None = None) -> bool:
        """Name every batch that may be named now and make the shards know it. True if one is new to them."""
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
            chosen, refused = self._choose(k, limit)
            if len(chosen) >= needed or not refused:
                break
        self.scanned = not refused
        if len(chosen) < needed:
            return False
        running = self._running
        record = selection.make_record(
            k,
            self.epoch,
            chosen,
            chain=dict(settings.chain),
            late=list(settings.late),
            tokens_per_micro_batch=settings.tokens_per_micro_batch,
            kl_coefficient=self.kl.of_batch(k),
            running=running_with(ChainConfig.model_validate(settings.chain), running, chosen),
            running_before=running,
        )
        if not batch_record.name(self.run, record, self.epoch):
            # The reply to an earlier try was lost: what stands there is ours, the epoch says so.
            record = batch_record.read_records(self.run)[k]
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
    def waits_for_groups(self) -> bool:  # type: ignore[override]
        """Whether another batch may be named as soon as there are groups for it."""
        return self.version + self._settings.prefetch not in self.records

    def _read_on(self, limit: int) -> None:
        """Have up to `limit` groups of each shard at hand, in the order of the log."""
        held = {(p.shard, p.entry) for record in self.records.values() for p in record.groups}
        for shard in self.seen:
            missing = limit - sum(group.shard == shard for group in self._waiting)
            while missing > 0:
                page = read_log(self.run, shard, self.seen[shard], missing)
                if not page:
                    self._read_to_end.add(shard)
                    break
                self.seen[shard] = page[-1].entry
                # Already in a batch: can only be seen again after the server lost data.
                fresh = [group for group in page if (shard, group.entry) not in held]
                self._waiting += fresh
                if len(page) < missing:
                    self._read_to_end.add(shard)
                    break
                missing -= len(fresh)
        self._waiting.sort(key=lambda group: group.position)

    def _choose(self, k: int, limit: int) -> tuple[list[LoggedGroup], list[tuple[LoggedGroup, str]]]:
        """Groups fit for batch k, and those dropped for it with the reason."""
        settings = self._settings
        self._read_on(limit)
        rules = selection.NamingRules(
            drop_after=settings.drop_after,
            needs=settings.needs,
            trained=self.progress,
            rolled_back_above=None if settings.keep_rolled_back else self.progress.restored,
            branch=self.progress.branch,
        )
        chosen, refused = selection.choose(self._waiting, k, limit, rules)
        batch_commit.drop(self.run, refused, self.epoch)
        for group, reason in refused:
            logger.warning("group %s is not trained on: %s", group.group_id, reason)
            metrics.group_ended(reason.removeprefix("dead:"), group.data_source)
            self.passed_over.append((reason, group))
        gone = {group.pointer for group, _ in refused}
        self._waiting = [group for group in self._waiting if group.pointer not in gone]
        return chosen, refused

    def find(self, k: int) -> BatchRecord | None:
        return self.records.get(k)

    def _bury(self, record: BatchRecord, deaths: Mapping[str, Death]) -> None:
        doomed = [pointer for pointer in record.groups if pointer.group_id in deaths]
        for group in find_groups(self.run, doomed):
            if group is not None:
                death = deaths[group.group_id]
                batch_commit.dead_letter(self.run, group, death.reason, death.detail, record.id, self.epoch)

    # The end of a run

    def has_ended(self, k: int) -> bool:
        return is_over(self.run, self._attendance)

    def tell_end(self, ends: int) -> None:
        self.run.home.call("end_run", [self.epoch, self.progress.delivered, ends])

    # Trained and committed

    def tell_trained(self, record: BatchRecord) -> None:
        """First the lineage says so, then every shard's copy."""
        version, home = record.k + 1, self.run.home
        coefficients = self.progress.kl
        args = [self.epoch, version, len(record.groups), json.dumps(coefficients) if coefficients else ""]
        home.call("trained", args, version=home.keys.lineage)
        dead = self.progress.deaths.get(record.k, ())
        for shard in self.run.shards:
            living = [p for p in record.in_shard(shard.index) if p.group_id not in dead]
            args = [self.epoch, version, len(living), ""]
            shard.call("trained", args, version=shard.keys.trainer)
        budget, groups = record.tokens_per_micro_batch, self._groups.pop(record.k, {})
        if groups:
            self._leaving[record.k] = {
                pointer: batch_commit.leaving(group, budget) for pointer, group in groups.items()
            }
        self.told = version

    def commit(self, version: int) -> None:
        """Every batch below `version` is in a saved checkpoint: count and delete them."""
        if version > self.progress.committed:
            self._write_committed(version)
        committed = [k for k in sorted(self.records) if k < self.progress.committed]
        entries = batch_commit.read_results(self.run) if committed else []
        for k in committed:
            self._finish_commit(self.records[k], entries)
            del self.records[k]

    def _write_committed(self, version: int) -> None:
        args = [self.epoch, version]
        self.run.home.call("commit_lineage", args)
        self.progress.commit(version)

    def _finish_commit(
        self, record: BatchRecord, entries: Sequence[batch_commit.ResultsEntry] | None = None
    ) -> None:
        batch_commit.commit(self.run, record, self.epoch, self._leaving.pop(record.k, {}), entries)
