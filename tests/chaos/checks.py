"""What must hold of a run when everything is quiet: nothing lost, nothing twice, nothing left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from streamadv.run import Run
from streamadv.status import problems_of, read_shards
from streamadv.status.audit import walk
from streamadv.status.model import Ledger
from streamadv.store.keys import EntryKeys
from tests.support import deep_problems

Identity = tuple[str, int]

#: Keys that outlast a drained run; streams among them must be empty.
LASTING: Final = (
    "ledger", "sizes", "evals", "admission", "ended", "ended_before", "trainer", "session", "producers", "kept",
)  # fmt: skip
STREAMS: Final = ("rollouts", "groups", "work", "results", "scoring:")


def registered(run: Run) -> set[Identity]:
    """Places that were ever pushed, by the tombstones: nothing else remembers a trajectory for good."""
    found = set()
    for keys in run.keys.shards:
        for key in (keys.ended, keys.ended_before):
            tombstones: Any = run.connection.scripts.hgetall(key)
            for group_id, text in tombstones.items():
                bitmap = text.decode()[1:]
                found |= {(group_id.decode(), index) for index, bit in enumerate(bitmap) if bit == "1"}
    return found


def total(run: Run) -> dict[str, Any]:
    """The ledger of all shards."""
    counters = run.counters()
    return {**asdict(Ledger.of(counters)), "counters": dict(counters)}


def leftovers(run: Run) -> list[str]:
    """Keys that a drained run should not have."""
    found = []
    scripts = run.connection.scripts
    for number, keys in enumerate(run.keys.shards):
        kept = walk(run, keys).kept
        prefix = keys.void.removesuffix("void")
        for key in sorted(key.decode() for key in scripts.scan_iter(match=f"{prefix}*", count=256)):
            name = key.removeprefix(prefix)
            if name.startswith(STREAMS) and scripts.type(key) == b"stream":
                if length := scripts.xlen(key):
                    found.append(f"shard {number}: stream {name} has {length} entries")
            elif (
                name not in LASTING and key not in kept and scripts.pttl(key) < 0
            ):  # attempts go by themselves
                found.append(f"shard {number}: key {name} is left behind")
    if not scripts.exists(EntryKeys(run.name).manifest):
        found.append("the manifest is gone")
    return found


def problems(
    run: Run,
    planned: Iterable[Identity],
    weights: Iterable[Identity],
    *,
    optional: Iterable[Identity] = (),
    usable: Iterable[Identity] | None = None,
    delivered: Iterable[Identity] = (),
    server_lost: bool = False,
) -> list[str]:
    """Everything wrong with a drained run; [] is what a test wants.

    planned: places that producers filled. optional: places they may have filled. weights: what the last
    checkpoint was trained on, in order. usable: planned places with a trajectory. delivered: what any trainer
    was given, an older one too. server_lost: the server came back without its recent writes, so it may know
    less than the checkpoint.
    """
    planned, weights = set(planned), list(weights)
    found = []
    for number, shard in enumerate(read_shards(run)):
        found += [f"shard {number}: {text}" for text in problems_of(shard)]
    found += deep_problems(run)
    found += leftovers(run)
    ledger = total(run)
    counters: Mapping[str, int] = ledger["counters"]
    twice = {identity: n for identity, n in Counter(weights).items() if n > 1}
    if twice:
        found.append(f"{len(twice)} trajectories are in the weights more than once: {sorted(twice)[:4]}")
    for name in ("queued", "in_flight"):
        if ledger[name]:
            found.append(f"{ledger[name]} trajectories are still {name}")
    for name in ("live_bytes", "reserved_bytes", "dead_bytes", "groups_open", "groups_logged"):
        if counters.get(name, 0):
            found.append(f"ledger {name} is {counters[name]} after draining")
    there = registered(run)
    if lost := planned - there - (set(weights) if server_lost else set()):
        found.append(f"{len(lost)} planned trajectories were never registered: {sorted(lost)[:4]}")
    if unknown := there - planned - set(optional):
        found.append(f"{len(unknown)} registered places nobody filled: {sorted(unknown)[:4]}")
    if ledger["pushed"] != len(there):
        found.append(f"ledger pushed is {ledger['pushed']}, the tombstones know of {len(there)}")
    if unknown := set(weights) - set(planned if usable is None else usable):
        found.append(f"{len(unknown)} trajectories in the weights were not pushed: {sorted(unknown)[:4]}")
    trained, most = ledger["trained"], len(weights)
    if server_lost:
        # A group trained on in part that comes back whole counts as trained: the job knows groups only. And a server
        # that has forgotten the newer trainer takes the commit of an older one.
        may_count = {group_id for group_id, _ in (*weights, *delivered)}
        most += sum(
            group_id in may_count for group_id, _ in set(planned if usable is None else usable) - set(weights)
        )
    if trained > most or (trained < len(weights) and not server_lost):
        found.append(f"ledger trained is {trained}, the checkpoint has {len(weights)}")
    return found
