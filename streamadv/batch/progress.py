"""What a rank knows of its training job, whatever the servers have lost: the only state that outlives a session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .. import clock, tracing
from ..errors import SettingError
from ..grouping.groups_log import LoggedGroup, Pointer
from ..messages import brief
from ..prompts.spec import identity
from .ends import CommitArguments, StoredResult
from .record import BatchRecord, Death, Running


@dataclass(slots=True)
class NamedBatch:
    """Record and dead letters hold whatever a server loses; the rest is true of the servers of one trainer session."""

    record: BatchRecord
    #: Groups that became dead letters since the batch was named, by id.
    dead: dict[str, Death] = field(default_factory=dict)
    #: Whether `name_ahead` has seen to it that all its shards know it, see `record.apply`.
    is_applied: bool = False
    #: Groups by id, as they were read from the log, until the batch is trained.
    groups: dict[str, LoggedGroup] = field(default_factory=dict)
    #: What commit needs of them, once the batch is trained.
    commit_arguments: dict[str, CommitArguments] = field(default_factory=dict)
    #: Entries of the results logs that are its own, as far as they were read: all of them from delivery on. None: an
    #: earlier session may have delivered it, and this one need not read them all.
    results: list[StoredResult] | None = field(default_factory=list)
    #: Metrics of the batch that its kept groups have beside their record.
    figures: dict[str, float] = field(default_factory=dict)
    #: When it was delivered (`tracing.now`).
    delivered_ns: int = 0

    @property
    def living(self) -> list[Pointer]:
        """Its groups that are not dead letters, in the batch's order."""
        return [pointer for pointer in self.record.groups if pointer.group_id not in self.dead]

    def record_spans(self, step: tracing.Step, run: str, since: int) -> None:
        """Spans of a step of the whole batch, which ends now."""
        ids = (pointer.group_id for pointer in self.living)
        tracing.record(step, run, ids, since, k=self.record.k, batch=self.record.id)

    def on_other_servers(self) -> NamedBatch:
        """The part that holds in a session on other servers."""
        return NamedBatch(self.record, self.dead, results=None, delivered_ns=self.delivered_ns)


#: A server may lose writes this recent.
DURABILITY_WINDOW_S: Final = 10.0
#: A group that a server lost is there again when somebody pushes it again: by `resend_window`, or by hand, much later.
RETURN_WINDOW_S: Final = 3600.0
#: Prompts in the weights beyond which those that no server may bring back are forgotten.
TRIES_KEPT: Final = 10_000
#: Format of what `Progress.state` returns: a reader refuses a higher one.
STATE_FORMAT: Final = 1


class Progress:
    """Where one rank stands: the only state kept when a trainer session (`session.py`) is replaced.

    Invariant: the weights have the batches below `version`, a saved checkpoint has those below `committed`, and the
    training loop has got those below `delivered`: committed <= version <= delivered. Those in hand are
    delivered and not in the weights: one at most, unless the loop reads ahead and marks batches itself.

    `batches`: on rank 0 every named batch from `committed` on, without a gap, and while a commit goes on those below it
    that are yet to be deleted; on other ranks those in hand, the one delivered last and the next one, once it is found.

    The id of every group in the weights that a server may still have, or have again, is here: it is uncommitted, or it
    was committed and the same servers have not been seen `window` seconds later, or RETURN_WINDOW_S later if servers
    were replaced since its batch was named.
    """

    def __init__(self, window: float = DURABILITY_WINDOW_S, world_size: int = 1) -> None:
        """world_size: ranks of the job, as this rank was told."""
        self._window = window
        self.world_size = world_size
        # The trainer session: '' and 0 before there is one.
        self.job = ""  # id
        self.session = ""  # id
        self.epoch = 0  # fencing epoch last known
        self.committed_before = 0  # how much the run had committed when it began
        # The branch, which begins with the session and again with each load_state_dict.
        self.branch = 0  # epoch in which it began; 0 = not yet
        self.begins_branch = False  # until the run is settled, however often it has to be taken
        self.began: int | None = None  # version at which it began; None = after the last commit
        # The checkpoint that was loaded, if one was.
        self.loaded = False
        self.loaded_epoch = 0  # in which it was saved
        self.restored: int | None = None  # its version
        self.claimed = 0  # above rank 0: the branch that belongs to the last load_state_dict
        # How far the training loop is.
        self.version = self.committed = self.delivered = 0
        self.batches: dict[int, NamedBatch] = {}
        #: On rank 0: ids of batches that it has named and taken back, whatever another rank has done with them.
        self.taken_back: list[str] = []
        self.delivered_at: float | None = None  # when the training loop got its last batch
        self.ends = 0  # how often iteration has ended before batch `delivered`: a push opens the run again
        # What one batch hands on to the next, see `selection.py`.
        self.kl: Mapping[str, float] | None = None  # coefficients after the last batches
        self.running: Running | None = None  # reward moments of all batches below `version`
        self.knows_running = False
        # What producers hear.
        # Newest version of which they know where its weights lie: '<version> <URI>', '' = none.
        self.weights = ""
        self.finished = False  # whether the trainer has ended the run
        # Ids of the groups in the weights; instead of a prompt's group the prompt (`spec.identity`).
        self.tries: dict[str, str] = {}  # of those the group
        #: In no saved checkpoint: group -> its batch, in the order of the batches.
        self.uncommitted: dict[str, int] = {}
        self._committed: dict[str, float] = {}  # group -> when, in that order
        self._returning: dict[str, float] = {}  # those of another server's time, or of a checkpoint
        self._named_elsewhere = 0  # batches below it were named on servers that were replaced
        #: What the run had of its prompts at the last checkpoint, by name: see `prompts.py`.
        self.prompts: dict[str, Any] = {}
        self.groups_saved: list[str] = []  # as `groups` was then
        self.has_prompts = False  # whether some are in the weights, of which `groups` may have forgotten all
        self.is_set_back = False  # to a checkpoint older than what the run had committed
        self.set_back_at = -math.inf  # when prompts were
        # The branch, and the sets of prompts there were as it began.
        self.sets_of_branch: tuple[int, set[str]] = (0, set())

    @property
    def fence(self) -> str:
        """What fenced scripts take: epoch and session."""
        return f"{self.epoch} {self.session}"

    def __contains__(self, group_id: object) -> bool:
        """Whether the group is in the weights, or another try of its prompt."""
        known = identity(str(group_id))
        # Another try of a prompt may come much later than servers return what they lost.
        is_tried = known in self.tries
        return is_tried or known in self.uncommitted or known in self._committed or known in self._returning

    def has_committed(self, known: str) -> bool:
        """Whether what is trained on once (`spec.identity`) is in a saved checkpoint, as far as this is remembered."""
        return known not in self.uncommitted and (known in self._committed or known in self._returning)

    @property
    def groups(self) -> list[str]:
        """Groups in the weights that a server may have, or have again."""
        known = {**self._returning, **self._committed, **self.uncommitted}
        return [self.tries.get(each, each) for each in known]

    @property
    def has_delivered(self) -> bool:
        """Whether the training loop has got a batch since this rank began, or last loaded a checkpoint."""
        return self.delivered > (self.began or 0)

    # Where it begins

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; the job stays the one it is."""
        self.loaded, self.loaded_epoch = True, int(state.get("epoch", 0))
        self.epoch = max(self.epoch, self.loaded_epoch)
        self.kl = state.get("kl")
        self.running, self.knows_running = state.get("running"), "running" in state
        self.weights, self.finished = str(state.get("weights", "")), False
        self.restored, self.has_prompts = int(state["version"]), "prompts" in state
        self.begin(self.restored)
        self.branch = 0
        self._returning = dict.fromkeys(map(self._known_as, state["groups"]), clock.now())
        self.prompts, self.groups_saved = dict(state.get("prompts", {})), list(state["groups"])
        self.is_set_back = False

    @staticmethod
    def beginning(run: str) -> dict[str, Any]:
        """The state of a job that has trained nothing yet."""
        return {"run": run, "version": 0, "groups": [], "kl": {}, "running": None}

    def state(self, run: str) -> dict[str, Any]:
        """What belongs into a checkpoint, for `load`."""
        state: dict[str, Any] = {
            "format": STATE_FORMAT,
            "run": run,
            "epoch": self.epoch,
            "version": self.version,
            "groups": self.groups,
            "kl": self.kl or {},
        }
        if self.prompts:
            state["prompts"] = dict(self.prompts)
        if self.weights:
            state["weights"] = self.weights
        return {**state, "running": self.running} if self.knows_running else state

    def begin(self, version: int) -> None:
        """Go on at this version: the batches below it are in the checkpoint that the weights are from."""
        self.began = self.version = self.committed = self.delivered = version
        self.ends = 0
        self.batches = {}
        self.uncommitted, self._committed, self.tries = {}, {}, {}
        self._named_elsewhere = 0

    # How it goes on

    def batch(self, record: BatchRecord) -> NamedBatch:
        """The named batch with this record. A record that replaces a lost one makes a new `NamedBatch`."""
        batch = self.batches.get(record.k)
        if batch is None or batch.record.id != record.id:
            batch = self.batches[record.k] = NamedBatch(record)
        return batch

    @property
    def running_named(self) -> Running | None:
        """Moments of the rewards of all named batches: the next one goes on from them."""
        last = max(self.batches, default=-1)
        return self.batches[last].record.running if last >= self.version else self.running

    def deliver(self, record: BatchRecord) -> None:
        """The training loop gets the batch."""
        self.batch(record)
        self.delivered, self.ends = record.k + 1, 0
        self.delivered_at = clock.now()
        self.epoch = max(self.epoch, record.epoch)

    def publish_weights(self, version: int, uri: str) -> None:
        """The weights of a version lie there."""
        if version >= weights_version(self.weights):
            self.weights = f"{version} {uri}"

    def train(self, record: BatchRecord) -> None:
        """The batch is in the weights: the first one that was not."""
        for pointer in self.batch(record).living:
            self.uncommitted[self._known_as(pointer.group_id)] = record.k
        self.running, self.knows_running = record.running, True
        self.version = record.k + 1  # last: an interrupt before it is repeated

    def commit(self, version: int) -> None:
        """The batches below `version` are in a saved checkpoint, and the run says so."""
        now = clock.now()
        self.committed = max(self.committed, version)
        while self.uncommitted and next(iter(self.uncommitted.values())) < version:
            group_id = next(iter(self.uncommitted))
            groups = (
                self._returning if self.uncommitted[group_id] < self._named_elsewhere else self._committed
            )
            groups.pop(group_id, None)
            groups[group_id] = now
            del self.uncommitted[group_id]

    def note_deleted(self, record: BatchRecord) -> None:
        """Servers have deleted the groups of a committed batch only now: from now on they may lose that."""
        now = clock.now()
        for known in (identity(pointer.group_id) for pointer in record.groups):
            for groups in (self._committed, self._returning):
                if groups.pop(known, None) is not None:
                    groups[known] = now

    def follow(self, committed: int) -> None:
        """Do on a rank above 0 what rank 0 has committed: such a rank keeps only what is uncommitted."""
        self.commit(min(committed, self.version))
        self._committed, self._returning = {}, {}
        first = min(self.version, self.delivered - 1)
        self.batches = {k: batch for k, batch in self.batches.items() if k >= first}

    # What servers may have lost

    def _known_as(self, group_id: str) -> str:
        known = identity(group_id)
        if known != group_id:
            self.tries[known], self.has_prompts = group_id, True
        return known

    def servers_confirmed(self, asked: float, caught_up: bool) -> None:
        """The servers that the commits were sent to still answered at `asked` (`clock.now()`).

        Forgets groups that these servers can no longer lose. caught_up: all groups in their logs were read.
        """
        returned = asked - RETURN_WINDOW_S if caught_up else -math.inf
        for stamps, oldest in ((self._committed, asked - self._window), (self._returning, returned)):
            while stamps and next(iter(stamps.values())) <= oldest:
                del stamps[next(iter(stamps))]
        if len(self.tries) > TRIES_KEPT:
            known = {*self.uncommitted, *self._committed, *self._returning}
            self.tries = {prompt: group for prompt, group in self.tries.items() if prompt in known}

    def servers_replaced(self) -> None:
        """Other servers answer, which may lack recent commits and groups: producers may push those groups again."""
        self._named_elsewhere = max(self.batches, default=-1) + 1
        now = clock.now()
        self._returning.update(dict.fromkeys(self._committed, now))
        self._committed = {}


def weights_version(text: str) -> int:
    """The version in '<version> <URI>'; -1 for anything else."""
    version, _, uri = text.partition(" ")
    return int(version) if uri and version.isdecimal() else -1


def check_state(state: Mapping[str, Any], run: str) -> None:
    """Raise SettingError unless `state` is what `state_dict` of a queue of this run returned."""
    if not isinstance(state, Mapping):
        raise SettingError(f"state is {brief(state)}: give what state_dict() returned")
    missing = {"run", "version", "groups"} - state.keys()
    if missing:
        raise SettingError(f"state has no {sorted(missing)[0]!r}: give what state_dict() returned")
    version, number = state["version"], state.get("format", STATE_FORMAT)
    if type(number) is not int or not 0 <= number <= STATE_FORMAT:
        raise SettingError(
            f"state has format {brief(number)}, this release reads up to {STATE_FORMAT}: use the release that "
            "has written it, or a later one"
        )
    if type(version) is not int or version < 0:
        raise SettingError(f"version of the state is {brief(version)}: give what state_dict() returned")
    groups = state["groups"]
    if not (isinstance(groups, list) and all(isinstance(group_id, str) for group_id in groups)):
        raise SettingError("groups of the state are no list of ids: give what state_dict() returned")
    if state["run"] != run:
        raise SettingError(
            f"state is of run {state['run']!r}, this queue reads {run!r}: load the state of a checkpoint of this run, "
            "or none where the run begins with those weights"
        )
