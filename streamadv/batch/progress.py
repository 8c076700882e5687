"""What a rank knows of its training job, whatever the servers have forgotten."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from .record import BatchRecord, Death

#: A server may lose writes this recent.
DURABILITY_WINDOW_S: Final = 10.0
#: A lost group comes back when somebody pushes it again: with `resend_window`, or by hand, much later.
RETURN_WINDOW_S: Final = 3600.0


class Progress:
    """Where one rank stands. It outlives every hold on the run (`session.py`), and is all that outlives one.

    Invariant: the weights have the batches below `version`, a saved checkpoint those below `committed`, and the
    training loop was given those below `delivered`: committed <= version <= delivered <= version + 1. Of every group in
    the weights that a server may still have, or have again, the id is here: uncommitted, or committed and the same
    servers not seen `window` seconds later.
    """

    def __init__(self, window: float = DURABILITY_WINDOW_S) -> None:
        self._window = window
        #: The hold on the run: id of the job and of its session, epoch last known, epoch that began the branch.
        self.job, self.session, self.epoch, self.branch = "", "", 0, 0
        self.loaded, self.loaded_epoch = False, 0  # from a checkpoint, and the epoch it was saved in
        self.claimed = 0  # above rank 0: the branch that belongs to the last load_state_dict
        self.began: int | None = None  # version at which the branch began; None = after the last commit
        self.restored: int | None = None  # version of the checkpoint, None = from none
        self.version = self.committed = self.delivered = 0
        self.ends = 0  # how often iteration has ended before batch `delivered`: a push opens the run again
        #: Batches that are named and, as far as this rank knows, not committed. Above rank 0 the last ones delivered.
        self.records: dict[int, BatchRecord] = {}
        self.deaths: dict[int, dict[str, Death]] = {}  # groups of batch k that became dead letters
        self.kl: Mapping[str, float] | None = None  # coefficients after the last batches
        self.running: Mapping[str, float] | None = (
            None  # moments of the rewards of all batches below `version`
        )
        self.knows_running = False
        self._uncommitted: dict[str, int] = {}  # group -> its batch, in the order of the batches
        self._committed: dict[str, float] = {}  # group -> when, in that order
        self._returning: dict[str, float] = {}  # those of another server's time, or of a checkpoint

    def __contains__(self, group_id: object) -> bool:
        """Whether the group is in the weights."""
        return any(group_id in known for known in (self._uncommitted, self._committed, self._returning))

    @property
    def groups(self) -> list[str]:
        """Groups in the weights that a server may have, or have again."""
        return list({**self._returning, **self._committed, **self._uncommitted})

    @property
    def has_delivered(self) -> bool:
        """Whether the loop was given a batch since this rank began, or last loaded a checkpoint."""
        return self.delivered > (self.began or 0)

    # Where it begins

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; the job stays the one it is."""
        self.loaded, self.loaded_epoch = True, int(state.get("epoch", 0))
        self.epoch = max(self.epoch, self.loaded_epoch)
        self.kl = state.get("kl")
        self.running, self.knows_running = state.get("running"), "running" in state
        self.restored = int(state["version"])
        self.begin(self.restored)
        self.branch = 0
        self._returning = dict.fromkeys(state["groups"], time.monotonic())

    def begin(self, version: int) -> None:
        """Go on at this version: the batches below it are in the checkpoint that the weights are from."""
        self.began = self.version = self.committed = self.delivered = version
        self.ends = 0
        self.records, self.deaths = {}, {}
        self._uncommitted, self._committed = {}, {}

    # How it goes on

    def deliver(self, record: BatchRecord) -> None:
        """The training loop is given the batch."""
        self.records[record.k] = record
        self.delivered, self.ends = record.k + 1, 0
        self.epoch = max(self.epoch, record.epoch)

    def end(self) -> None:
        """The training loop is told that the run has ended."""
        self.ends += 1

    def train(self, record: BatchRecord) -> None:
        """The batch is in the weights."""
        if record.k < self.version:
            return
        self.version = record.k + 1
        dead = self.deaths.get(record.k, ())
        self._uncommitted.update((p.group_id, record.k) for p in record.groups if p.group_id not in dead)
        self.running, self.knows_running = record.running, True

    def commit(self, version: int) -> None:
        """The batches below `version` are in a saved checkpoint, and a server was told so."""
        now = time.monotonic()
        self.committed = max(self.committed, version)
        while self._uncommitted and next(iter(self._uncommitted.values())) < version:
            group_id = next(iter(self._uncommitted))
            del self._uncommitted[group_id]
            self._committed.pop(group_id, None)
            self._committed[group_id] = now
        self.deaths = {k: dead for k, dead in self.deaths.items() if k >= version}

    def follow(self, committed: int) -> None:
        """As rank 0 has committed: ranks above it keep of the past what is uncommitted, no more."""
        self.commit(min(committed, self.version))
        self._committed, self._returning = {}, {}
        self.records = {k: record for k, record in self.records.items() if k >= self.delivered - 1}
        self.deaths = {k: dead for k, dead in self.deaths.items() if k in self.records}

    # What servers may have lost

    def seen(self, asked: float, caught_up: bool) -> None:
        """At `asked` the servers were those of all commits. caught_up: all that stood in their logs has been read."""
        _forget_first(self._committed, asked - self._window)
        if caught_up:
            _forget_first(self._returning, asked - RETURN_WINDOW_S)

    def lost(self) -> None:
        """The servers are others: they may lack what was not seen safe, and get it back by a push."""
        now = time.monotonic()
        self._returning.update(dict.fromkeys(self._committed, now))
        self._committed = {}


def _forget_first(stamps: dict[str, float], oldest: float) -> None:
    while stamps and next(iter(stamps.values())) <= oldest:
        del stamps[next(iter(stamps))]
