"""The status of a run as objects: what `read_status` returns and `streamadv status --json` prints.

Fields have the names of their JSON keys. Times are in seconds, sizes in bytes, ledgers in trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self

from ..grouping.housekeeping import Loss
from ..messages import seconds_text
from ..run.run import QUEUED, by_reason
from .evaluations import Evaluation
from .prompts import SourceProgress

#: A run in which nothing entered a stream for so long stands still.
QUIET_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """pushed = trained + dropped + dead + queued + in_flight."""

    pushed: int
    trained: int
    dropped: dict[str, int]  # by reason
    dead: dict[str, int]  # by reason
    queued: int
    in_flight: int

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> Self:
        """From the counters of one shard, or of all shards together."""
        return cls(
            pushed=counters.get("pushed", 0),
            trained=counters.get("trained", 0),
            dropped=by_reason(counters, "dropped"),
            dead=by_reason(counters, "dead"),
            queued=sum(counters.get(name, 0) for name in QUEUED),
            in_flight=counters.get("in_flight", 0),
        )

    @property
    def accounted(self) -> int:
        """Everything pushed must be in exactly one of these."""
        return (
            self.trained + sum(self.dropped.values()) + sum(self.dead.values()) + self.queued + self.in_flight
        )


@dataclass(frozen=True, slots=True)
class Places:
    """Where queued trajectories are: with a scorer, in the rollouts stream, in an open group, in the groups log."""

    scoring: int
    rollouts: int
    open: int
    grouped: int


@dataclass(frozen=True, slots=True)
class Lack:
    """What the open groups lack that are due first."""

    groups: int  # that were looked at
    places: int  # slots of these
    rollouts: int
    scores: int
    groups_without_rollouts: int
    groups_without_scores: int
    groups_missing: dict[str, int]  # those that lack "none", "one", "some", "all" of their rollouts
    groups_older: list[int]  # those open for longer than each of `read.OLDER_THAN_S`
    oldest_s: float | None  # since the first of them was opened


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups by where they are and how they ended."""

    open: int
    logged: int
    abandoned: int  # open groups whose producer is lost
    remembered: int  # ended groups whose copies are recognised
    outcomes: dict[str, int]
    short: Loss  # groups dropped because rollouts failed or did not come
    since_batch: dict[str, int]  # outcomes since the last batch was named
    lack: Lack


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of payloads stored, promised to slots of open groups, of dead letters, and of kept groups."""

    live: int
    reserved: int
    dead: int
    kept: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that takes entries of a stream. Dead: silent for too long. One that is told to end is forgotten."""

    name: str
    alive: bool
    silent_s: float
    pending: int  # entries in its hands


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of all shards, with the consumer group that reads it."""

    length: int
    pending: int
    lag: int  # entries not delivered yet
    consumers: int
    oldest_age_s: float | None
    alive: int  # consumers that asked for work lately
    workers: list[Worker]  # by name
    ended: list[str]  # keys of those shards in which it takes no more entries


#: What a trainer does. "none": none has taken the run; "lost": silent for too long; "left": closed its queue; "ended":
#: iteration has ended, and nothing was heard since.
TrainerState = Literal["none", "waits", "trains", "lost", "left", "ended"]


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer session's progress, as the home slot has it."""

    epoch: int
    version: int | None  # None until a trainer took the run
    committed: int
    batches: int  # named and not committed
    finished: bool  # it has ended the run
    state: TrainerState  # of rank 0
    silent_s: float | None  # since rank 0 was heard of; None = never
    world_size: int | None
    ranks_alive: int
    batch: int | None  # that rank 0 got last
    batch_s: float | None  # seconds since then
    job: str  # id of the training job; "" before a trainer took the run

    @property
    def is_alive(self) -> bool:
        return self.state in ("waits", "trains")

    @property
    def in_charge(self) -> str | None:
        """The trainer that has been heard of and is alive, for a message; None without one."""
        if not self.is_alive or self.silent_s is None:
            return None
        return f"its trainer (job {self.job}, heard of {seconds_text(self.silent_s)} ago)"

    @property
    def uncommitted(self) -> int:
        """Batches that are trained on and not committed."""
        return (self.version or 0) - self.committed

    @property
    def untrained(self) -> int:
        """Batches that are named and not trained on."""
        return self.batches - self.uncommitted


@dataclass(frozen=True, slots=True)
class Staleness:
    """Staleness that the next batch would see."""

    mean: float | None
    max: int | None


@dataclass(frozen=True, slots=True)
class ProducerState:
    """One producer of the run."""

    name: str
    state: str  # open, serves (a gateway that the run does not wait for), finished, or lost (silent for too long)
    silent_s: float
    rollouts: int | None = None  # of a gateway: open ones that it plays
    turn_s: int | None = None  # since the last turn of the one of these that has been silent for longest

    @property
    def is_alive(self) -> bool:
        """Whether it is heard of, and has neither finished nor gone."""
        return self.state in ("open", "serves")


@dataclass(frozen=True, slots=True)
class Admission:
    """Which shards refuse another group of the usual size, and why."""

    max_bytes: int
    full: list[int]  # shards without room
    paced: list[int]  # shards with their share of the groups that may be ahead of the trainer
    unarchived: list[int]  # shards whose kept groups fill keep_bytes, and which have to wait for the archive
    groups_ahead: int
    groups_limit: int | None
    batch_groups: int | None


@dataclass(frozen=True, slots=True)
class Server:
    """What the server says of itself. Figures that it does not tell are None, and left out of the JSON."""

    refuses_writes: str | None  # its reason
    used_memory: int | None = None
    maxmemory: int | None = None
    total_system_memory: int | None = None
    min_slaves_good_slaves: int | None = None
    maxmemory_policy: str | None = None
    aof_enabled: int | None = None  # 1 = it writes an append-only file

    @property
    def evicts(self) -> str | None:
        """What to do about a server that deletes data when its memory is full; None if it does not."""
        if not self.maxmemory or self.maxmemory_policy in (None, "noeviction"):
            return None
        return (
            f"deletes keys when its memory is full (maxmemory-policy {self.maxmemory_policy}): "
            "CONFIG SET maxmemory-policy noeviction"
        )

    @property
    def forgets(self) -> str | None:
        """What to do about a server whose restart loses everything; None if it does not."""
        if self.aof_enabled != 0:
            return None
        return "keeps nothing on disk (appendonly no), a restart loses the run: CONFIG SET appendonly yes"

    def to_json(self) -> dict[str, Any]:
        figures = asdict(self).items()
        return {name: value for name, value in figures if value is not None or name == "refuses_writes"}


@dataclass(frozen=True, slots=True)
class Status:
    """A run at (nearly) one moment."""

    run: str
    shards: int
    ledger: Ledger
    problems: list[str]
    places: Places
    duplicates: int
    malformed: int
    groups: Groups
    bytes: Bytes
    place_bytes: int  # that admission reserves for one more rollout
    garbage: int
    results: int
    streams: dict[str, Stream]
    trainer: Trainer
    staleness: Staleness
    producers: list[ProducerState]
    admission: Admission
    evaluations: list[Evaluation]  # the newest of each data source
    prompts: list[SourceProgress]
    server: Server
    quiet_s: float | None  # since something entered a stream; None = never
    failing_chain: str | None  # why the chain of a work item fails, as a worker has noted

    @property
    def balanced(self) -> bool:
        """Whether the ledger agrees with itself and with what it counts."""
        return not self.problems

    @property
    def is_quiet(self) -> bool:
        """Whether nothing entered a stream for a while."""
        return self.quiet_s is None or self.quiet_s >= QUIET_S

    @property
    def groups_waiting(self) -> int:
        """Groups that are in no batch yet, estimated from their trajectories."""
        logged = self.places.grouped + self.ledger.in_flight
        return int(self.groups.logged * self.places.grouped / max(1, logged) + 0.5)

    @property
    def starves(self) -> bool:
        """Whether a trainer that asks for a batch now has to wait for groups."""
        return self.trainer.untrained <= 0 and self.groups_waiting < (self.admission.batch_groups or 1)

    def to_json(self) -> dict[str, Any]:
        """What `streamadv status --json` prints; keys in the order of the fields."""
        json = asdict(self)
        head = {name: json[name] for name in ("run", "shards", "ledger")}
        return {**head, "balanced": self.balanced, **json, "server": self.server.to_json()}
