"""A training job's hold on a run: taken by rank 0, which writes it into the run, and read there by the other ranks.

Nothing is agreed on between ranks: each finds its job's session by the job's id and then keeps to that session. It
ends when a session that was founded later has the run; on a server that has gone back to a time before it, it waits
for rank 0.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..algorithms.chain.config import ChainConfig
from ..errors import BatchLostError, EpochFencedError, StreamadvError
from ..grouping.groups_log import LoggedGroup, Pointer, read_groups
from ..run import Run
from ..store.reasons import Reason
from ..store.replies import as_count
from . import commit as batch_commit
from . import record as batch_record
from .carryover import KLCoefficients
from .passed_over import PassedOver
from .progress import Progress
from .record import BatchRecord, Death
from .selection import NamingSettings

_SESSION: Final = re.compile(r"([0-9]+)-[0-9a-f]+")
_FIELDS: Final = ("job", "session", "epoch", "settled", "branch", "loaded", "began", "committed")


class NotHeldError(StreamadvError):
    """Rank 0 has not taken the run (again): one line that says what this rank waits for."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Who has the run, as the run says. Numbers are 0 where nothing is written."""

    job: str
    session: str
    epoch: int
    settled: int  # epoch whose taking over is complete
    branch: int  # epoch at which the session began, or last loaded a checkpoint
    loaded: int  # the same if it loaded a checkpoint
    began: int  # version the branch began at
    committed: int

    @property
    def founded(self) -> int:
        return founded(self.session)


def founded(session: str) -> int:
    """The epoch in which a session began: of two, the later one has the run."""
    match = _SESSION.fullmatch(session)
    return int(match[1]) if match else 0


def read_hold(run: Run) -> Hold:
    """What rank 0 has written."""
    values: Any = run.connection.scripts.hmget(run.keys.home.lineage, list(_FIELDS))
    job, session, *numbers = ((value or b"").decode(errors="replace") for value in values)
    return Hold(job, session, *map(as_count, numbers))


def take(run: Run, progress: Progress) -> tuple[int, bool]:
    """Rank 0 takes the run, or takes it again after the server came back. Raises EpochFencedError.

    Returns the version that the run said was committed, and whether this begins a branch: a session, or a checkpoint.
    """
    begins = progress.branch == 0
    args: list[Any] = [
        "" if progress.began is None else progress.version,
        progress.epoch,
        progress.job,
        progress.session,
        founded(progress.session) if progress.session else "",
        secrets.token_hex(6),
        "" if begins else progress.branch,
        "" if progress.began is None else progress.began,
        "1" if progress.loaded else "0",
    ]
    reply: Any = run.home.call("take_epoch", args)
    if reply == -1:
        raise fenced(run)
    epoch, version, committed, branch = int(reply[0]), int(reply[2]), int(reply[3]), int(reply[4])
    progress.epoch, progress.session = epoch, reply[1].decode()
    if branch == progress.branch > 0:
        progress.commit(min(committed, progress.version))  # whose reply was lost
    if progress.began is None:
        progress.begin(version)
    if begins:
        progress.branch = epoch
    return committed, begins


def fenced(run: Run) -> EpochFencedError:
    return EpochFencedError(f"run {run.name}: a newer trainer has taken over, this one must stop")


class Session:
    """One rank's part in its job's hold on a run, on one server (one for each shard)."""

    leads = False
    #: Whether the last look at the groups logs came to their end, so that nothing fit for a batch is behind.
    scanned = True
    #: Rank 0 waits for groups as well, see `trainer/results_log.py`.
    waits_for_groups = False

    kl: KLCoefficients

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run = run
        self.progress = progress
        self.server_ids = run.server_ids()
        self.told = 0  # version that the run was told by rank 0
        #: Groups dropped at naming, with the reason, until somebody reports and clears them.
        self.passed_over = PassedOver()
        #: Groups of batches that are not trained yet.
        self._groups: dict[int, dict[Pointer, LoggedGroup]] = {}
        #: Last entry of each shard's groups log that was read.
        self.seen: dict[int, str] = {}

    @property
    def version(self) -> int:
        return self.progress.version

    @property
    def epoch(self) -> int:
        return self.progress.epoch

    @property
    def records(self) -> dict[int, BatchRecord]:
        return self.progress.records

    def has_same_servers(self) -> bool:
        """Whether every shard is still on the server it was on, and there is told what the job has told."""
        asked = time.monotonic()
        if self.run.server_ids() != self.server_ids or not self._is_told():
            return False
        self.progress.seen(asked, self._has_caught_up())
        return True

    def _is_told(self) -> bool:
        raise NotImplementedError

    def _has_caught_up(self) -> bool:
        return True

    def _know(self, stored: bytes | None, settings: NamingSettings) -> None:
        """The adaptive KL coefficients, as this rank knows them or as the run has them."""
        known = self.progress.kl
        if known is None and stored is not None:
            known = json.loads(stored)
        self.kl = KLCoefficients(ChainConfig.model_validate(settings.chain), settings.prefetch, known)
        self.progress.kl = self.kl.to_json()

    def look_ahead(self, ended: bool, max_groups: int | None = None) -> bool:
        """Rank 0 names what may be named. True if something is new."""
        return False

    def could_name(self, max_groups: int | None = None) -> bool:
        return False

    def share_behind_next(self, max_groups: int | None = None) -> float:
        return 0.0

    def find(self, k: int) -> BatchRecord | None:
        """The record of batch k, if it has been named."""
        raise NotImplementedError

    def has_ended(self, k: int) -> bool:
        """Whether no batch k can come."""
        raise NotImplementedError

    def waits_for(self, k: int) -> Reason:
        """Why a rank above 0 has no batch k yet."""
        raise NotImplementedError

    def tell_end(self, ends: int) -> None:
        """Let the other ranks end before the next batch as well, so many times in all."""

    def read_groups(self, record: BatchRecord, dead: Container[str]) -> list[LoggedGroup]:
        """The groups of a batch without the dead ones, in its order, read from the log once.

        Raises BatchLostError if the server no longer has one.
        """
        known = self._groups.get(record.k, {})
        living = [pointer for pointer in record.groups if pointer.group_id not in dead]
        unknown = [pointer for pointer in living if pointer not in known]
        groups = {**known, **dict(zip(unknown, read_groups(self.run, unknown), strict=True))}
        self._groups[record.k] = groups
        return [groups[pointer] for pointer in living]

    def bury(self, record: BatchRecord, deaths: Mapping[str, Death]) -> batch_commit.Exclusions:
        """Groups of batch k that cannot be computed leave it as dead letters. Returns all that is not trained on."""
        dead, left_out = batch_commit.read_exclusions(self.run, record)
        self._bury(record, {group_id: death for group_id, death in deaths.items() if group_id not in dead})
        known = self.progress.deaths.setdefault(record.k, {})
        known.update({group_id: Death("undecodable", "") for group_id in dead - known.keys()} | dict(deaths))
        return batch_commit.Exclusions(set(known), left_out)

    def _bury(self, record: BatchRecord, deaths: Mapping[str, Death]) -> None:
        """Rank 0 does it for all."""

    def leave_out(self, record: BatchRecord, problems: Mapping[tuple[str, int], str]) -> bool:
        """Members of batch k that this rank cannot read. False when the server has lost or committed the batch."""
        pointers = {pointer.group_id: pointer for pointer in record.groups}
        return all(
            batch_commit.leave_out(
                self.run, pointers[group_id], index, "undecodable", text, record.id, self.epoch
            )
            for (group_id, index), text in problems.items()
        )

    def note_trained(self, record: BatchRecord, kl: float | None = None) -> None:
        """The batch is in the weights, with this mean KL, whatever the server knows."""
        if record.k >= self.version:
            self.kl.trained(record.k, kl, record.trajectories)
            self.progress.kl = self.kl.to_json()
            self.progress.train(record)

    def tell_trained(self, record: BatchRecord) -> None:
        """Rank 0 says so to the run."""
        self._groups.pop(record.k, None)

    def commit(self, version: int) -> None:
        """Every batch below `version` is in a saved checkpoint."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a rank above 0 knows its job's session among others."""

    job: str | None
    epoch: int | None  # one that rank 0 has had


class Follower(Session):
    """A rank above 0. It reads what rank 0 has written, and writes only what it cannot read of a batch.

    A server that restarts and has lost nothing needs no rank 0: that one may be waiting for this rank.
    """

    def __init__(self, run: Run, settings: NamingSettings, progress: Progress, wanted: Wanted) -> None:
        """Raises NotHeldError while rank 0 has not taken the run (again), EpochFencedError."""
        super().__init__(run, progress)
        hold = read_hold(run)
        self._find_session(hold, wanted)
        self._join_branch(hold)
        progress.job, progress.session, progress.epoch = hold.job, hold.session, hold.epoch
        progress.follow(hold.committed)
        self._hold = hold
        kl: Any = run.connection.scripts.hget(run.keys.home.lineage, "kl")
        self._know(kl, settings)

    def _find_session(self, hold: Hold, wanted: Wanted) -> None:
        """Whether this is (still) the job's session."""
        mine, progress = self.progress.session, self.progress
        if mine and hold.session == mine:
            if hold.job != progress.job:  # somebody of an older release, who knows no sessions
                raise fenced(self.run)
            if hold.epoch < progress.epoch:
                raise NotHeldError("the server has lost its last moments: waiting for rank 0 to repeat them")
        elif mine and hold.founded < founded(mine):
            raise NotHeldError(
                f"the server has lost what job {progress.job} has written: waiting for its rank 0"
            )
        elif mine and (hold.job != progress.job or progress.has_delivered):
            raise fenced(self.run)
        elif not hold.session:
            raise NotHeldError(f"no trainer has the run: waiting for rank 0 of {_told(wanted)}")
        elif wanted.epoch is not None and hold.founded > wanted.epoch:
            raise fenced(self.run)
        elif wanted.epoch is not None and hold.epoch < wanted.epoch:
            raise NotHeldError(f"the run is at epoch {hold.epoch}: waiting for rank 0 of {_told(wanted)}")
        elif wanted.job is not None and hold.job != wanted.job:
            raise NotHeldError(f"job {hold.job} has the run: waiting for rank 0 of {_told(wanted)}")
        if hold.settled != hold.epoch:
            raise NotHeldError(f"rank 0 of job {hold.job} is taking the run over: waiting for it")

    def _join_branch(self, hold: Hold) -> None:
        """Go on in the branch that rank 0 is in, or begin with it."""
        progress = self.progress
        if progress.session == hold.session and progress.branch == hold.branch:
            if hold.epoch > progress.epoch and progress.has_delivered:
                self._check_last(hold)
            return
        pending = (
            progress.loaded and progress.branch == 0
        )  # load_state_dict was called here, and not matched yet
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

    def _check_last(self, hold: Hold) -> None:
        """Rank 0 has repeated what a server lost: what this rank was given last must be among it."""
        last = self.progress.delivered - 1
        if last < hold.committed:
            return
        found, mine = batch_record.find_record(self.run, last), self.records.get(last)
        if found is None and last < read_hold(self.run).committed:
            return
        if found is None or mine is None or found.id != mine.id:
            raise BatchLostError(
                f"batch {last} is lost, or named again: restart the trainer from its checkpoint"
            )

    def _is_told(self) -> bool:
        hold = read_hold(self.run)
        if (hold.job, hold.session, hold.epoch, hold.settled, hold.branch) != (
            *(self._hold.job, self._hold.session, self._hold.epoch),
            *(self._hold.settled, self._hold.branch),
        ):
            return False
        self._hold = hold
        self.progress.follow(hold.committed)
        return True

    def find(self, k: int) -> BatchRecord | None:
        record = batch_record.find_record(self.run, k)
        if record is None and k < self._hold.committed:
            text = f"batch {k} is committed and this rank has not had it"
            if self.progress.has_delivered:
                raise BatchLostError(f"{text}: restart the trainer from its checkpoint")
            raise NotHeldError(f"{text}: waiting for another rank 0 of job {self._hold.job}")
        return record

    def waits_for(self, k: int) -> Reason:
        if batch_record.find_record(self.run, k) is None:
            return Reason("other_rank", f"rank 0 has not named batch {k}")
        return Reason("computing", f"results of batch {k}")

    def has_ended(self, k: int) -> bool:
        found: Any = self.run.connection.scripts.hmget(self.run.keys.home.lineage, ["end", "ends"])
        end, ends = (None if each is None else int(each) for each in found)
        # An older release does not count its ends.
        return end == k and (ends is None or ends > self.progress.ends)


def _told(wanted: Wanted) -> str:
    return f"job {wanted.job}" if wanted.job is not None else f"the job that took epoch {wanted.epoch}"
