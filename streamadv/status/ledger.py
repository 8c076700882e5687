"""What a run looks like from outside: the ledger, depths and ages, who is alive; and whether it all adds up.

Each shard is read in one transaction, so its figures belong to one moment and `check` holds while workers run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from ..grouping.groups_log import read_log
from ..grouping.short_groups import loss_of
from ..run import Run
from ..run.consumer import ADVANTAGE, GROUPER
from ..run.heartbeats import PRODUCER_STATE, PRODUCER_TIMEOUT_S
from ..store.keys import ShardKeys
from ..store.replies import as_count, as_mapping, as_texts, as_whole, or_nothing
from . import sizes
from .facts import read_facts

#: Places of the ledger that `queued` sums up.
QUEUED: Final = ("scoring", "rollouts", "open", "grouped")
#: How often a shard is read that cannot be read at one moment, while its figures contradict each other.
READ_AGAIN: Final = 4
#: No server holds as much: somebody has written it, and admission waits for it.
MOST_BYTES: Final = 1 << 50
#: The ledger's counters without a reason.
COUNTERS: Final = (
    *("pushed", "trained", *QUEUED, "in_flight", "duplicates", "groups_open", "groups_logged"),
    *("live_bytes", "dead_bytes", "groups_abandoned", "malformed"),
)
#: As `apply_batch` writes it: batch id, trajectories of the group.
_OWNER: Final = re.compile(r"[0-9]+-[0-9a-f]{12} ([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream and its consumer group."""

    length: int
    pending: int
    lag: int  # entries not yet delivered; -1 = the server cannot tell
    consumers: int
    oldest_age_s: float | None


@dataclass(frozen=True, slots=True)
class ShardState:
    """One shard at one moment."""

    counters: dict[str, int]
    trainer: dict[str, str]
    groups_open: int
    groups_logged: int
    results: int
    in_flight: int  # trajectories of groups that a batch owns
    groups_remembered: int
    garbage: int
    reserved_bytes: int  # for places of open groups
    place_bytes: int  # that a place needs now
    streams: dict[str, StreamState]
    broken: list[str]  # counters that are no numbers

    def count(self, name: str) -> int:
        return self.counters.get(name, 0)

    def by_reason(self, kind: str) -> dict[str, int]:
        """Counters '<kind>:<reason>' by reason."""
        prefix = f"{kind}:"
        return {
            name.removeprefix(prefix): n
            for name, n in sorted(self.counters.items())
            if name.startswith(prefix)
        }

    @property
    def accounted(self) -> int:
        """Everything pushed must be in exactly one of these."""
        ended = sum(self.by_reason("dropped").values()) + sum(self.by_reason("dead").values())
        return self.count("trained") + ended + sum(map(self.count, QUEUED)) + self.count("in_flight")


def read_shard(run: Run, keys: ShardKeys) -> ShardState:
    """One atomic reading of a shard.

    Over maxmemory, where a server refuses transactions, its figures belong to several moments: then it is read again
    while they contradict each other.
    """
    state, atomic = _read_shard(run, keys)
    for _ in range(READ_AGAIN):
        if atomic or not problems_of(state):
            break
        state, atomic = _read_shard(run, keys)
    return state


def _read_shard(run: Run, keys: ShardKeys) -> tuple[ShardState, bool]:
    streams = {
        name: (keys.scoring(group) if kind == "scoring" else getattr(keys, kind), group)
        for name, (kind, group) in _streams(run).items()
    }

    def read(transaction: bool) -> list[Any]:
        # Plain commands, as whoever may only look should not be able to run scripts.
        pipe: Any = run.connection.scripts.pipeline(transaction=transaction)
        for key in (keys.ledger, keys.trainer, keys.sizes, keys.owners):
            pipe.hgetall(key)
        pipe.zcard(keys.open)
        for key in (keys.groups, keys.results):
            pipe.xlen(key)
        for key in (keys.ended, keys.ended_before):
            pipe.hlen(key)
        pipe.llen(keys.garbage)
        for key, _ in streams.values():
            pipe.xlen(key)
            pipe.xrange(key, count=1)
            pipe.xinfo_groups(key)  # last: where there is no stream it is an error
        found: list[Any] = pipe.execute(raise_on_error=False)
        return found

    try:
        reply, atomic = read(True), True
    except OutOfMemoryError:
        reply, atomic = read(False), False
    reply = list(map(or_nothing, reply))
    now_ms = run.now_ms()
    counters, trainer, known, owners, groups_open, groups_logged, results, ended, ended_before, garbage = (
        reply[:10]
    )
    per_stream = [reply[start : start + 3] for start in range(10, len(reply), 3)]
    places = sizes.reserved(as_texts(known), run.manifest.max_trajectory_bytes)
    numbers = as_texts(counters)
    state = ShardState(
        counters={name: n for name, value in numbers.items() if (n := as_whole(value)) is not None},
        trainer=as_texts(trainer),
        groups_open=groups_open,
        groups_logged=groups_logged,
        results=results,
        in_flight=sum(
            int(match[1]) for owner in as_texts(owners).values() if (match := _OWNER.fullmatch(owner))
        ),
        groups_remembered=ended + ended_before,
        garbage=garbage,
        reserved_bytes=places.total,
        place_bytes=places.each,
        streams={
            name: _stream_state(length, oldest, groups, group, now_ms)
            for (name, (_, group)), (length, oldest, groups) in zip(streams.items(), per_stream, strict=True)
        },
        broken=[name for name in COUNTERS if as_whole(numbers.get(name, "0")) is None],
    )
    return state, atomic


def _streams(run: Run) -> dict[str, tuple[str, str]]:
    """Each stream that has workers: kind of its keys, and their consumer group."""
    scoring = {f"scoring:{name}": ("scoring", name) for name in run.manifest.scorers}
    return {"rollouts": ("rollouts", GROUPER), "work": ("work", ADVANTAGE), **scoring}


def _stream_state(length: int, oldest: Any, groups: Any, group: str, now_ms: int) -> StreamState:
    """groups: the stream's consumer groups."""
    of: dict[str, Any] = next(
        (each for each in map(as_mapping, groups) if each["name"] == group.encode()), {}
    )
    lag = of.get("lag")
    return StreamState(
        length=length,
        pending=of.get("pending", 0),
        lag=(-1 if lag is None else lag) if of else 0,
        consumers=of.get("consumers", 0),
        oldest_age_s=_age_s(oldest[0][0], now_ms) if oldest else None,
    )


def problems_of(state: ShardState) -> list[str]:
    """Where a shard's ledger contradicts itself or the structures it counts; [] when it balances."""
    problems = []
    if state.count("pushed") != state.accounted:
        problems.append(f"pushed is {state.count('pushed')}, accounted for are {state.accounted}")
    scoring = sum(s.length for name, s in state.streams.items() if name.startswith("scoring:"))
    for counter, found, where in (
        ("rollouts", state.streams["rollouts"].length, "entries in the rollouts stream"),
        ("scoring", scoring, "entries in the scorers' streams"),
        ("groups_open", state.groups_open, "open groups"),
        ("groups_logged", state.groups_logged, "entries in the groups log"),
        ("in_flight", state.in_flight, "trajectories of named batches"),
    ):
        if state.count(counter) != found:
            problems.append(f"ledger {counter} is {state.count(counter)}, there are {found} {where}")
    if not state.groups_open and (
        state.count("open") or state.reserved_bytes or state.count("groups_abandoned")
    ):
        problems.append(
            "no group is open, but open trajectories, reserved bytes or abandoned groups are counted"
        )
    logged = state.count("grouped") + state.count("in_flight")
    if bool(logged) != bool(state.groups_logged):
        problems.append(
            f"ledger grouped + in_flight is {logged}, the groups log has {state.groups_logged} entries"
        )
    problems += [f"ledger {name} is no whole number" for name in state.broken]
    problems += [f"ledger {name} is {n}" for name, n in state.counters.items() if n < 0]
    problems += [
        f"ledger {name} is {state.count(name)}, more than a server holds"
        for name in ("live_bytes", "dead_bytes")
        if state.count(name) > MOST_BYTES
    ]
    return problems


def read_status(run: Run) -> dict[str, Any]:
    """The whole run as JSON: what `streamadv status --json` prints."""
    shards = [read_shard(run, keys) for keys in run.keys.shards]
    problems = [
        f"shard {number}: {problem}" for number, state in enumerate(shards) for problem in problems_of(state)
    ]
    facts = read_facts(run, shards, _streams(run))
    lineage = as_texts(run.connection.scripts.hgetall(run.keys.home.lineage))
    streams: dict[str, dict[str, Any]] = {}
    for name in shards[0].streams:
        states = [state.streams[name] for state in shards]
        ages = [state.oldest_age_s for state in states if state.oldest_age_s is not None]
        streams[name] = {
            "length": sum(state.length for state in states),
            "pending": sum(state.pending for state in states),
            "lag": sum(max(0, state.lag) for state in states),
            "consumers": sum(state.consumers for state in states),
            "oldest_age_s": max(ages, default=None),
            "alive": facts["alive"][name],
        }
    total = Counter[str]()
    for state in shards:
        total.update(state.counters)
    return {
        "run": run.name,
        "shards": len(shards),
        "ledger": ledger_of(total),
        "balanced": not problems,
        "problems": problems,
        "places": {name: total[name] for name in QUEUED},
        "duplicates": total["duplicates"],
        "malformed": total["malformed"],
        "groups": {
            "open": sum(state.groups_open for state in shards),
            "logged": sum(state.groups_logged for state in shards),
            "abandoned": total["groups_abandoned"],
            "remembered": sum(state.groups_remembered for state in shards),
            "outcomes": _reasons(total, "outcome"),
            "short": loss_of(total)._asdict(),  # dropped since rollouts failed or did not come
            "since_batch": facts["since_batch"],
            "lack": facts["lack"],
        },
        "bytes": {
            "live": total["live_bytes"],
            "reserved": sum(state.reserved_bytes for state in shards),
            "dead": total["dead_bytes"],
        },
        "place_bytes": max(state.place_bytes for state in shards),  # that an admitted rollout reserves
        "garbage": sum(state.garbage for state in shards),
        "results": sum(state.results for state in shards),
        "streams": streams,
        "trainer": {
            "epoch": as_count(lineage.get("epoch")),
            "version": as_count(lineage.get("version")) if "version" in lineage else None,
            "committed": as_count(lineage.get("committed")),
            "batches": run.connection.scripts.hlen(run.keys.home.batches),
        },
        "staleness": staleness_of(run, as_count(lineage.get("version"))),
        "producers": _producers(run, facts["now_ms"]),
        "admission": facts["admission"],
        "server": facts["server"],
        "quiet_s": facts["quiet_s"],
    }


def ledger_of(total: Mapping[str, int]) -> dict[str, Any]:
    """The ledger, in trajectories: pushed = trained + dropped + dead + queued + in_flight."""
    return {
        "pushed": total.get("pushed", 0),
        "trained": total.get("trained", 0),
        "dropped": _reasons(total, "dropped"),
        "dead": _reasons(total, "dead"),
        "queued": sum(total.get(name, 0) for name in QUEUED),
        "in_flight": total.get("in_flight", 0),
    }


def staleness_of(run: Run, version: int) -> dict[str, float | None]:
    """Staleness the next batch would see, over the groups named or waiting at the head of each log."""
    values = [
        age
        for shard in range(len(run.keys.salts))
        for group in read_log(run, shard, "0-0", 64)
        for member in group.members
        if (age := member.staleness(version)) is not None
    ]
    return {"mean": sum(values) / len(values) if values else None, "max": max(values, default=None)}


def _producers(run: Run, now_ms: int) -> list[dict[str, Any]]:
    """One look cannot tell by change who is alive, as the trainer does: it compares times of the server."""
    entries = as_texts(run.connection.scripts.hgetall(run.keys.home.producers))
    found = []
    for name, value in sorted(entries.items()):
        if not PRODUCER_STATE.fullmatch(value):
            continue  # rank 0 removes it
        seen, state, *_ = value.split(" ")
        if state == "gone":
            continue
        silent_s = max(0, now_ms - int(seen)) / 1000
        if state == "open" and silent_s > PRODUCER_TIMEOUT_S:
            state = "lost"
        found.append({"name": name, "state": state, "silent_s": round(silent_s, 1)})
    return found


def _reasons(total: Mapping[str, int], kind: str) -> dict[str, int]:
    prefix = f"{kind}:"
    return {
        name.removeprefix(prefix): n for name, n in sorted(total.items()) if name.startswith(prefix) and n
    }


def _age_s(entry: bytes, now_ms: int) -> float:
    return max(0, now_ms - int(entry.partition(b"-")[0])) / 1000
