"""A trainer session: one rank's part in its job's ownership of a run, on the servers as they are.

A session ends when a session that was founded later owns the run. After a server was replaced, which may have lost
recent writes, each rank begins its session again (`recovery.take_over`, `join`) from its `Progress`.

Here is what all ranks have in common, and the session of a rank above 0: it reads what rank 0 has written. The only
thing it writes is what it cannot read of a batch. After a server restarts without losing anything, it does not wait
for rank 0, because rank 0 may be waiting for this rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import tracing
from ..algorithms.chain.config import ChainConfig
from ..errors import BatchLostError, SettingError
from ..run import Run
from ..run.run import fenced
from ..store.reasons import Reason
from .exclusion import DroppedGroups, Exclusions, dead_letter_groups, read_exclusions
from .hold import Hold, NotHeldError, as_hold, founding_epoch, read_hold
from .progress import Progress
from .record import BatchRecord, Death, NamingSettings, find_record
from .selection import coefficients_after


@dataclass(eq=False)
class Session:
    """What rank 0 (`leader.Leader`) and the other ranks (`Follower`) have in common."""

    leads: ClassVar[bool] = False  # whether this is rank 0
    run: Run
    settings: NamingSettings
    progress: Progress
    server_ids: Sequence[str | None]  # asked before anything else of the session was read or written

    def __post_init__(self) -> None:
        #: Groups dropped while batches were named, until somebody reports and clears them.
        self.dropped = DroppedGroups(self.run.name)
        self._chain = ChainConfig.model_validate(self.settings.chain)
        self.progress.kl = self.progress.kl or {}

    # A named batch

    def dead_letter(self, record: BatchRecord, deaths: Mapping[str, Death]) -> Exclusions:
        """Groups of a batch that cannot be computed become dead letters, which rank 0 writes.

        Returns all that is excluded from the batch.
        """
        dead, left_out = read_exclusions(self.run, record.id, record.groups)
        unwritten = {group_id: deaths[group_id] for group_id in deaths.keys() - dead}
        if self.leads and unwritten:
            dead_letter_groups(self.run, record, unwritten, self.progress.fence)
        deaths_so_far = self.progress.batch(record).dead
        written_by_others = dead - deaths_so_far.keys()
        deaths_so_far.update(dict.fromkeys(written_by_others, Death("undecodable", "")) | dict(deaths))
        return Exclusions(set(deaths_so_far), left_out)

    def note_trained(self, record: BatchRecord, kl: float | None = None, trajectories: int = 0) -> None:
        """The batch is in the weights, so many trajectories with this mean KL, whatever the server knows."""
        if record.k >= self.progress.version:
            progress, prefetch = self.progress, self.settings.prefetch
            progress.kl = coefficients_after(
                self._chain, prefetch, progress.kl or {}, record.k, kl, trajectories
            )
            progress.train(record)
            batch = self.progress.batch(record)
            if self.leads:
                batch.record_spans(tracing.TRAIN, self.run.name, batch.delivered_ns or tracing.now())
            else:
                batch.groups.clear()


# Ranks above 0


def join(run: Run, settings: NamingSettings, progress: Progress) -> Follower:
    """Join the session of the job that the progress names.

    Raises NotHeldError while rank 0 has not taken the run (again), EpochFencedError, and SettingError for another world
    size than rank 0's.
    """
    server_ids = run.server_ids()
    hold = read_hold(run)
    _check_session(run, progress, hold)
    _join_branch(run, progress, hold)
    progress.session, progress.epoch = hold.session, hold.epoch
    progress.batches = {k: batch.on_other_servers() for k, batch in progress.batches.items()}
    progress.follow(hold.committed)
    if progress.kl is None:
        kl: Any = run.connection.scripts.hget(run.keys.home.session, "kl")
        progress.kl = None if kl is None else json.loads(kl)
    return Follower(run, settings, progress, server_ids, hold)


def _check_session(run: Run, progress: Progress, hold: Hold) -> None:
    """Return if this is (still) the job's session."""
    job = progress.job
    session = progress.session  # the one this rank is in, '' = none yet
    if session and hold.session == session:
        if hold.epoch < progress.epoch:
            raise NotHeldError("the server has lost recent writes: waiting for rank 0 to repeat them")
    elif session and founding_epoch(hold.session) < founding_epoch(session):
        raise NotHeldError(f"the server has lost what job {job} has written: waiting for its rank 0")
    elif session and (hold.job != job or progress.has_delivered):
        raise fenced(run.name)
    elif not hold.session:
        raise NotHeldError(f"no trainer has the run: waiting for rank 0 of job {job}")
    elif hold.job != job:
        raise NotHeldError(f"job {hold.job} has the run: waiting for rank 0 of job {job}")
    if hold.world_size != progress.world_size:  # each rank takes its part of a plan for its world size
        raise SettingError(
            f"world_size is {progress.world_size}, rank 0 of job {hold.job} has {hold.world_size}: give every rank the "
            "same one, and each start of the job another id"
        )
    if hold.settled != hold.epoch:
        raise NotHeldError(f"rank 0 of job {hold.job} is taking the run over: waiting for it")


def _join_branch(run: Run, progress: Progress, hold: Hold) -> None:
    """Go on in the branch that rank 0 is in, or begin with it."""
    if progress.session == hold.session and progress.branch == hold.branch:
        # Data loss can make rank 0 take back, and name again, a batch that this rank has delivered.
        stored: Any = run.connection.scripts.hget(run.keys.home.session, "taken_back")
        taken_back = (stored or b"").decode(errors="replace").split()
        for k, batch in progress.batches.items():
            if k < progress.delivered and batch.record.id in taken_back:
                raise BatchLostError(
                    f"the server has lost groups of batch {k}, and rank 0 names it again with others: restart the "
                    "trainer from its checkpoint"
                )
        return
    # load_state_dict was called here, and no branch of rank 0 has been matched with it yet
    pending = progress.loaded and progress.branch == 0
    if pending and not (hold.loaded == hold.branch > progress.claimed):
        raise NotHeldError("rank 0 has not loaded a state: waiting for its load_state_dict")
    if progress.loaded and hold.began != progress.began:
        raise NotHeldError(
            f"rank 0 goes on from version {hold.began}, the state loaded here has {progress.began}: waiting until "
            "every rank has loaded the same state"
        )
    if progress.has_delivered:
        raise NotHeldError(
            f"rank 0 has gone back to version {hold.began}: waiting for load_state_dict on this rank"
        )
    progress.begin(hold.began)
    progress.branch = hold.branch
    if pending:
        progress.claimed = hold.branch


@dataclass(eq=False)
class Follower(Session):
    """Made by `join`."""

    hold: Hold  # rank 0's, as it was joined

    def has_same_servers(self) -> bool:
        """Whether every shard is still on the server it was on, and rank 0 has the run as it was joined."""
        pipe: Any = self.run.connection.scripts.pipeline(transaction=False)
        pipe.hmget(self.run.keys.home.session, list(Hold._fields))
        server_ids, [stored] = self.run.server_ids_with(pipe)
        hold = as_hold(stored)
        if server_ids != self.server_ids or hold != self.hold._replace(committed=hold.committed):
            return False
        self.hold = hold
        self.progress.follow(hold.committed)
        return True

    def find(self, k: int) -> BatchRecord | None:
        """The record of batch k, if rank 0 has named it."""
        record = find_record(self.run, k)
        if record is None and k < self.hold.committed:
            text = f"batch {k} is committed and this rank has not had it"
            if self.progress.has_delivered:
                raise BatchLostError(f"{text}: restart the trainer from its checkpoint")
            raise NotHeldError(f"{text}: waiting for another rank 0 of job {self.hold.job}")
        if record is not None and k >= self.progress.delivered and not record.is_for(self.settings):
            raise NotHeldError(
                f"batch {k} is named for another chain than this rank's: waiting for rank 0 to name it again. All "
                "ranks need the same chain and late columns"
            )
        return record

    def waits_for(self, k: int) -> Reason:
        """Why this rank has no batch k yet."""
        if find_record(self.run, k) is None:
            return Reason("other_rank", f"rank 0 has not named batch {k}")
        return Reason("computing", f"results of batch {k}")

    def has_ended(self, k: int) -> bool:
        """Whether rank 0 has ended before batch k, and this rank has not."""
        stored: Any = self.run.connection.scripts.hmget(self.run.keys.home.session, ["end", "ends"])
        end, ends = stored
        return end is not None and int(end) == k and int(ends) > self.progress.ends

    has_all = has_ended  # rank 0 names batches
