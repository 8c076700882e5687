"""For `status --check --deep`: whether a quiet run stores what its ledger says. Also deletes a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from ..messages import one_line
from ..run import Run
from ..store.connection import Connection
from ..store.keys import RUNS, EntryKeys, ShardKeys, check_run_name
from .stored import PAGE, StoredData, counts_at, walk


class Audit(NamedTuple):
    """What a walk over everything stored has found."""

    problems: list[str]
    payloads: int
    uncounted: int  # trajectories that count for no group and stay until their packet goes

    def __str__(self) -> str:
        text = f"{self.payloads} payloads stored"
        return f"{text}, with {self.uncounted} trajectories that do not count" if self.uncounted else text


def audit(run: Run) -> Audit:
    """Differences between the ledger and what is stored, packets that nobody can read, and orphaned keys."""
    problems, payloads, uncounted = [], 0, 0
    before = run.counters()
    for number, keys in enumerate(run.keys.shards):
        stored = walk(run, keys)
        texts = (*_wrong_counters(run, keys, stored), *stored.problems, *_stray_keys(run, keys, stored))
        problems += [one_line(f"shard {number}: {text}") for text in texts]
        payloads += len(stored.payloads) + len(stored.dead) + len(stored.kept)
        uncounted += stored.uncounted
    if problems and run.counters() != before:
        problems.append(
            "the run was at work meanwhile, these may be no differences: look again while it is quiet"
        )
    return Audit(problems, payloads, uncounted)


def _wrong_counters(run: Run, keys: ShardKeys, stored: StoredData) -> Iterator[str]:
    unfilled = {
        name.removeprefix("u"): count
        for name, count in counts_at(run, keys.sizes).items()
        if name.startswith("u")
    }
    if unfilled != stored.unfilled:
        yield f"unfilled slots by bytes are {unfilled}, found {dict(stored.unfilled)}"
    ledger = counts_at(run, keys.ledger)
    for name, found in (
        *(
            (name, stored.trajectories[name])
            for name in ("rollouts", "scoring", "open", "grouped", "in_flight")
        ),
        *((f"{name}_packets", stored.packets[name]) for name in ("rollouts", "scoring")),
        ("live_bytes", sum(stored.payloads.values()) + sum(stored.outputs.values())),
        ("groups_abandoned", stored.abandoned),
        ("groups_eval", stored.evaluations),
        ("dead_bytes", sum(stored.dead.values())),
        ("kept_bytes", stored.kept_bytes),
    ):
        if ledger[name] != found:
            yield f"ledger {name} is {ledger[name]}, found {found}"


def _stray_keys(run: Run, keys: ShardKeys, stored: StoredData) -> Iterator[str]:
    groups = (*map(keys.group, stored.open_groups), *map(keys.dead_group, stored.dead_groups))
    expected = {*stored.references, *groups}
    prefixes = (keys.payload(""), keys.output(""), keys.group(""), keys.dead_group(""))
    shard_keys = {
        key.decode(errors="backslashreplace")
        for key in run.connection.scripts.scan_iter(match=f"{keys.void.removesuffix('void')}*", count=PAGE)
    }
    strays = [key for key in sorted(shard_keys - expected) if key.startswith(prefixes)]
    for key, lives_ms in zip(strays, _times_to_live(run, strays), strict=True):
        # What its script has not seen yet, or never will, goes by itself.
        if lives_ms == NO_END or not key.startswith((keys.payload(""), keys.output(""))):
            yield f"key {key} belongs to nothing (orphan)"
    for key in sorted(stored.references.keys() - shard_keys):
        yield f"key {key} is referred to and missing"
    kept = sorted(stored.references.keys() & shard_keys)
    for key, lives_ms in zip(kept, _times_to_live(run, kept), strict=True):
        if lives_ms != NO_END:
            yield f"key {key} is referred to and will be gone in {lives_ms} ms"


#: Reply of PTTL for a key that does not expire.
NO_END: Final = -1


def _times_to_live(run: Run, keys: Sequence[str]) -> Iterator[int]:
    """Milliseconds until each key is gone."""
    for start in range(0, len(keys), PAGE):
        pipe: Any = run.connection.scripts.pipeline(transaction=False)
        for key in keys[start : start + PAGE]:
            pipe.pttl(key)
        yield from pipe.execute()


def delete_run(connection: Connection, name: str) -> int:
    """Delete everything stored of a run, whether its manifest can be read or not: it looks at every key of the server.

    Returns the number of keys. Stop its processes first.
    """
    scripts, count = connection.scripts, 0
    keys = scripts.scan_iter(match=f"{{{check_run_name(name)}:*", count=PAGE)
    while page := list(islice(keys, PAGE)):
        pipe: Any = scripts.pipeline(transaction=False)
        for key in page:
            pipe.unlink(key)
        count += sum(pipe.execute())
    count += scripts.unlink(EntryKeys(name).manifest)
    scripts.hdel(RUNS, name)
    return count
