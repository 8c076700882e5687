"""`streamadv bench scaling`: what a trajectory costs each process, on one to three primaries, and what follows.

Processes share the cores of one machine here, so rates say little and processor time says much. A process's cost is
taken to be a number per trajectory and one per token, found from the shortest and the longest trajectories on one
primary; everything else that is measured checks it.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from streamadv.errors import ProcessEndedError
from streamadv.run import find_run, open_run
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.waiting import Blocked, Wait

from .cluster import cluster
from .crew import STALL_S, Crew, Window, middle
from .lines import TOKENS, Line
from .pipeline import stages

KIND: Final = "grpo+kl"
PRIMARIES: Final = (1, 2, 3)
#: Ranks among which payloads are divided to tell what only rank 0 does from what every rank does a part of.
RANKS: Final = 8
#: Trajectory lengths: the model comes from the first and the last, the middle one checks it.
SHORT, MIDDLE, LONG = TOKENS
#: Tokens per second that are predicted for.
RATES: Final = (1e6, 1e8, 1e10)
#: Of a core: what a planned process may use, so that it catches up after a pause.
UTILISATION: Final = 0.7

#: Heading and key of each column of the measured table, microseconds of processor time per trajectory.
COLUMNS: Final = {
    "traj/s": "per_second",
    "predicted": "predicted_per_second",
    "producer": "producer",
    "server": "server",
    "grouper": "grouper",
    "advantage": "advantage",
    "trainer": "trainer",
    "all": "all",
    "pred. all": "predicted_all",
    "KB in": "kilobytes_in",
    "KB out": "kilobytes_out",
}
PARTS: Final = ("producer", "server", "grouper", "advantage", "trainer")


@dataclass(frozen=True, slots=True)
class Linear:
    """A number per trajectory and a number per token."""

    each: float
    per_token: float

    @classmethod
    def through(cls, short: float, long: float) -> Linear:
        """The line through the measurements at SHORT and LONG tokens."""
        per_token = max(0.0, (long - short) / (LONG - SHORT))
        return cls(short - per_token * SHORT, per_token)

    def __call__(self, tokens: int) -> float:
        return self.each + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """What a trajectory costs: microseconds by process, and bytes through the servers."""

    microseconds: Mapping[str, Linear]
    naming: float  # microseconds of the trainer that rank 0 alone spends
    bytes_in: Linear
    bytes_out: Linear

    def rate(self, tokens: int, cores: int) -> float:
        """Trajectories per second of one process of each kind on so many cores: the busiest or all of them decide."""
        spent = [cost(tokens) for cost in self.microseconds.values()]
        return 1e6 / max(*spent, sum(spent) / cores)

    def plan(self, tokens_per_second: float, tokens: int) -> dict[str, Any]:
        """Processes of each kind for so many tokens per second, each using UTILISATION of a core."""
        trajectories = tokens_per_second / tokens
        load = {part: trajectories * cost(tokens) / 1e6 for part, cost in self.microseconds.items()}
        reading = load["trainer"] - trajectories * self.naming / 1e6
        needed = {
            part: math.ceil(cores / UTILISATION) for part, cores in (load | {"trainer": reading}).items()
        }
        return {
            "tokens_per_second": tokens_per_second,
            "trajectories_per_second": trajectories,
            "shards": needed.pop("server"),
            **{part: max(1, count) for part, count in needed.items()},
            "runs": max(1, math.ceil(trajectories * self.naming / 1e6 / UTILISATION)),
            "gigabits_in": trajectories * self.bytes_in(tokens) * 8 / 1e9,
            "gigabits_out": trajectories * self.bytes_out(tokens) * 8 / 1e9,
        }


def measure_scaling(seconds: float, repeat: int, binary: str | None) -> Iterator[dict[str, Any]]:
    """The measured lines, each with what was predicted for it, as soon as the model is there; then the plans."""
    records: dict[str, dict[str, Any]] = {}
    for name, line, primaries in _lines():
        with cluster(primaries, binary) as (url, servers), _crew(line, url, servers) as crew:
            records[name] = _record(name, line, primaries, _windows(crew, seconds, repeat))
            if primaries == max(PRIMARIES):
                records |= _with_company(crew, url, line, primaries, seconds, repeat)
    costs = _costs(
        records["1 primary, short"], records["1 primary, long"], records[f"1 primary, {RANKS} ranks"]
    )
    cores = os.cpu_count() or 1
    for record in records.values():
        if record["ranks"] == 1:
            record["predicted_per_second"] = costs.rate(record["tokens"], cores)
            record["predicted_all"] = sum(cost(record["tokens"]) for cost in costs.microseconds.values())
        yield record
    yield {
        "name": "model",
        "naming": costs.naming,
        "microseconds": {part: [cost.each, cost.per_token] for part, cost in costs.microseconds.items()},
        "bytes_in": [costs.bytes_in.each, costs.bytes_in.per_token],
        "bytes_out": [costs.bytes_out.each, costs.bytes_out.per_token],
        "plans": [costs.plan(rate, MIDDLE) for rate in RATES],
    }


def _lines() -> Iterator[tuple[str, Line, int]]:
    def line(tokens: int, world_size: int = 1) -> Line:
        return Line(KIND, tokens, f"bench-{secrets.token_hex(6)}", world_size=world_size)

    for name, tokens in {"short": SHORT, "middle": MIDDLE, "long": LONG}.items():
        yield f"1 primary, {name}", line(tokens), 1
    yield f"1 primary, {RANKS} ranks", line(SHORT, RANKS), 1
    for primaries in PRIMARIES[1:]:
        yield f"{primaries} primaries, middle", line(MIDDLE), primaries


@contextmanager
def _crew(line: Line, url: str, servers: Sequence[str]) -> Iterator[Crew]:
    """The pipeline on a new run with a shard for each server."""
    with Connection(url) as connection:
        open_run(connection, line.run, RunSettings(shards=len(servers)))
    with Crew(stages(line), url, "producer", run=line.run, servers=servers) as crew:
        crew.wait_until_ready()
        yield crew


def _windows(crew: Crew, seconds: float, repeat: int) -> Window:
    return middle([crew.measure(seconds, seconds / 2) for _ in range(repeat)])


def _with_company(
    crew: Crew, url: str, line: Line, primaries: int, seconds: float, repeat: int
) -> dict[str, dict[str, Any]]:
    """Workers join the run, and die in it."""
    second = {f"{stage} 2": stages(line)[stage] for stage in ("grouper", "advantage")}
    for name, command in second.items():
        crew.add(name, command)
    _wait_for_consumers(url, line.run, 2 * primaries)
    joined = f"{primaries} primaries, 2 workers each"
    records = {joined: _record(joined, line, primaries, _windows(crew, seconds, repeat))}
    for name in second:
        crew.kill(name)
    left = f"{primaries} primaries, 1 killed each"
    return records | {left: _record(left, line, primaries, _windows(crew, seconds, repeat))}


def _wait_for_consumers(url: str, run: str, count: int) -> None:
    """Until both stages have so many, each counted in every shard."""
    wait = Wait(Blocked("bench", "waiting for workers", run), timeout=STALL_S, base=0.1, cap=0.5)
    with Connection(url) as connection:
        while True:
            streams = read_status(find_run(connection, run)).streams
            if min(streams["rollouts"].consumers, streams["work"].consumers) >= count:
                return
            if wait.expired:
                raise ProcessEndedError(f"a worker has not joined run {run} in {STALL_S:g} s: see its log")
            wait.pause()


def _record(name: str, line: Line, primaries: int, window: Window) -> dict[str, Any]:
    spent = dict.fromkeys(PARTS, 0.0)
    for process, seconds in window.cpu.items():
        spent[process.partition(" ")[0]] += 1e6 * seconds
    return {
        "name": name,
        "chain": line.kind,
        "tokens": line.tokens,
        "primaries": primaries,
        "ranks": line.world_size,
        "per_second": window.per_second,
        **spent,
        "all": sum(spent.values()),
        "kilobytes_in": window.network["in"] / 1e3,
        "kilobytes_out": window.network["out"] / 1e3,
    }


def _costs(short: Mapping[str, Any], long: Mapping[str, Any], ranks: Mapping[str, Any]) -> Costs:
    def line(key: str, unit: float = 1.0) -> Linear:
        return Linear.through(unit * short[key], unit * long[key])

    # The trainer is naming + reading; with RANKS ranks rank 0 is naming + reading / RANKS.
    naming = (RANKS * ranks["trainer"] - short["trainer"]) / (RANKS - 1)
    return Costs(
        {part: line(part) for part in PARTS},
        max(0.0, naming),
        line("kilobytes_in", 1e3),
        line("kilobytes_out", 1e3),
    )
