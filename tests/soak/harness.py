"""A soak: a run with thousands of small batches, and whether anything of it grows.

    python -m tests.soak.harness --minutes 10

Sizes (elements in the server's keys, clients, memory of server and processes, bytes of a scrape and of the trainer's
state) and costs (server time of each script, seconds of a scrape) are sampled all the time. After a warm-up the first
samples are compared with the last: what has grown by more than `ALLOWED` is a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import redis

from benchmarks.children import Child, Message, stop_all
from streamadv.run import Run, open_run
from streamadv.status import problems_of, read_shards, read_status
from streamadv.store import scripts
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer

from .roles import settings

ROLES: Final = ("grouper", "producer", "passing", "trainer")
SAMPLE_S: Final = 1.0
START_S: Final = 60.0
STALL_S: Final = 60.0
#: Share of the samples that belong to the warm-up, and of the rest that are compared at each end.
WARM_UP, END = 0.3, 0.3
#: Ended groups remembered per shard: so few that a short run's warm-up reaches it, and less than what may grow.
DEDUPE_GROUPS: Final = 20
SLOWLOG: Final = 4096  # entries; what a script calls is in it as well
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Growth(NamedTuple):
    """How much more the end of a run may show than its beginning: a share of that, and an amount."""

    share: float
    amount: float


#: By the first word of a series' name.
ALLOWED: Final[Mapping[str, Growth]] = {
    "elements": Growth(0.1, 100),  # in all keys of one family, which work under way makes rise and fall
    "keys": Growth(0.1, 100),
    "clients": Growth(0.0, 4),
    "memory": Growth(0.05, 4 << 20),  # bytes, of the server's data and each process
    "scrape_bytes": Growth(0.05, 512),
    "state_bytes": Growth(0.5, 4096),
}
#: Costs: judged in long runs only.
ALLOWED_COSTS: Final[Mapping[str, Growth]] = {"script_us": Growth(0.5, 20), "scrape_s": Growth(0.5, 0.02)}


@dataclass
class Report:
    """What was watched, and what of it has grown."""

    seconds: float
    batches: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)
    # series -> its level at first, at last
    drift: dict[str, tuple[float, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """A table for people."""
        yield f"{self.batches} batches in {self.seconds:.0f} s, ledger {json.dumps(self.ledger)}"
        yield f"{'':34}{'at first':>14}{'at last':>14}"
        for name, (first, last) in sorted(self.drift.items()):
            yield f"{name:34}{first:14.6g}{last:14.6g}"
        yield from self.problems or ["nothing grows"]


class Soak:
    """One run."""

    def __init__(self, seconds: float, folder: Path, least_batches: int, costs: bool) -> None:
        self.report = Report(seconds)
        self.series: dict[str, list[float]] = defaultdict(list)
        self._folder = folder
        self._least_batches = least_batches
        self._costs = costs
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._children: dict[str, Child] = {}
        self._scripts = {scripts.load(name).sha: name for name in scripts.files()}

    def play(self) -> Report:
        """Run it and judge."""
        with ExitStack() as stack:
            server = stack.enter_context(EmbeddedServer())
            stack.callback(stop_all, self._children.values())
            self._client = redis.Redis.from_url(server.url, decode_responses=True)
            stack.callback(self._client.close)
            self._client.config_set("slowlog-max-len", SLOWLOG)
            self._client.config_set("slowlog-log-slower-than", 0)
            name = f"soak-{os.getpid()}"
            run = open_run(Connection(server.url), name, settings(DEDUPE_GROUPS))
            stack.callback(run.connection.close)
            self._server_pid = server.pid
            self._start(server.url, name)
            self._watch()
            self._judge(run)
        return self.report

    def _start(self, url: str, run: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STREAMADV_LOG_LEVEL": "info"}
        commands = {role: ["-m", "tests.soak.roles", role, url, run] for role in ROLES}
        commands["advantage"] = ["-m", "streamadv", "worker", "advantage", "--redis", url, "--run", run]
        for name, command in commands.items():
            log = self._folder / f"{name}.log"
            child = Child(name, command, environment=environment, log=log, inbox=self._inbox)
            self._children[name] = child
            child.start()

    def _watch(self) -> None:
        """Sample until the time is over and enough batches were trained."""
        self._hear(START_S)
        started = self._heard = time.monotonic()
        begun = self.report.batches
        while (
            time.monotonic() < started + self.report.seconds
            or self.report.batches < begun + self._least_batches
        ):
            self._sample()
            self._hear(SAMPLE_S)
            for name, child in self._children.items():
                if child.exit_status is not None:
                    self.report.problems.append(f"{name} ended: {child.log_tail()}")
                    return
            if time.monotonic() > self._heard + STALL_S:
                self.report.problems.append(f"no batch for {STALL_S:g} s")
                return
        self.report.seconds = time.monotonic() - started

    def _hear(self, seconds: float) -> None:
        """Take in what the trainer says for so long; the first time until it says something."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                _, message = self._inbox.get(timeout=left)
            except Empty:
                return
            self._heard = time.monotonic()
            for rank, size in enumerate(message["states"]):
                self.series[f"state_bytes rank {rank}"].append(size)
            first = not self.report.batches
            self.report.batches = message["batches"]
            if first:
                return

    def _sample(self) -> None:
        info = self._client.info()
        self.series["clients"].append(info["connected_clients"])
        self.series["keys"].append(self._client.dbsize())
        self.series["memory server"].append(info["used_memory"])
        for name, child in self._children.items():
            pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
            self.series[f"memory {name}"].append(pages * PAGE)
        for family, count in self._elements().items():
            self.series[f"elements {family}"].append(count)
        self._scrape()
        costs: dict[str, list[int]] = defaultdict(list)
        for entry in self._client.slowlog_get(SLOWLOG):
            command, sha, *_ = [*entry["command"].decode(errors="replace").split(" "), ""]
            if command == "EVALSHA" and sha in self._scripts:
                costs[self._scripts[sha]].append(entry["duration"])
        for script, durations in costs.items():
            self.series[f"script_us {script}"].append(statistics.median(durations))

    def _elements(self) -> dict[str, int]:
        """Elements of all keys, by family: what stands behind the hash tag, up to the next colon."""
        counts: dict[str, int] = defaultdict(int)
        for key in self._client.scan_iter(count=1000):
            family = key.rpartition("}:")[2].partition(":")[0]
            counts[family] += _size(self._client, key)
        return counts

    def _scrape(self) -> None:
        log = (self._folder / "grouper.log").read_text()
        if not (ports := re.findall(r"metrics on port (\d+)", log)):
            return
        begin = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/metrics", timeout=30) as answer:
            body = answer.read()
        self.series["scrape_s"].append(time.perf_counter() - begin)
        self.series["scrape_bytes"].append(len(body))

    def _judge(self, run: Run) -> None:
        report = self.report
        report.ledger = asdict(read_status(run).ledger)
        for shard in read_shards(run):
            report.problems += problems_of(shard)
        allowed = {**ALLOWED, **(ALLOWED_COSTS if self._costs else {})}
        for name, values in self.series.items():
            kept = values[int(len(values) * WARM_UP) :]
            some = max(1, int(len(kept) * END))
            kind = name.partition(" ")[0]
            # A cost at its lowest is what it takes; the rest is what else the machine does.
            level: Callable[[Sequence[float]], float] = _low if kind in ALLOWED_COSTS else statistics.median
            first, last = level(kept[:some]), level(kept[-some:])
            report.drift[name] = first, last
            growth = allowed.get(kind)
            if growth is not None and last > first * (1 + growth.share) + growth.amount:
                report.problems.append(f"{name} grows: {first:.6g} at first, {last:.6g} at last")


def _low(values: Sequence[float]) -> float:
    """The lower decile."""
    return sorted(values)[len(values) // 10]


def _size(client: Any, key: str) -> int:
    """Elements of a key; 0 if it is gone by now."""
    counts = {"hash": client.hlen, "zset": client.zcard, "stream": client.xlen, "list": client.llen}
    count = counts.get(client.type(key), lambda _: 1)
    try:
        return int(count(key))
    except redis.ResponseError:  # another type by now
        return 0


def run_soak(
    seconds: float, folder: Path | None = None, *, least_batches: int = 0, costs: bool = False
) -> Report:
    """One soak of so many seconds, longer until so many batches were trained. costs: judge times as well."""
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamadv-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        return Soak(seconds, folder, least_batches, costs).play()


def main() -> int:
    parser = argparse.ArgumentParser(description="many small batches, and whether anything grows")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--batches", type=int, default=0, help="go on until so many were trained")
    parser.add_argument("--folder", type=Path, help="keep logs here")
    arguments = parser.parse_args()
    report = run_soak(60 * arguments.minutes, arguments.folder, least_batches=arguments.batches, costs=True)
    print("\n".join(report.lines()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
