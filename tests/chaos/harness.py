"""A chaos run: all processes of a run, a seeded schedule of faults, and the account at the end.

    python -m tests.chaos.harness --seed 1 --seconds 60 --server always

Faults: SIGKILL at random and at every named point, SIGTERM, SIGSTOP beyond the lease (for a trainer with another
one taking over meanwhile), connections cut in a request, in a reply, or held up, and SIGKILL of the server, with
`everysec` also losing the end of its file; in a cluster and behind Sentinels a replica takes over that lacks recent
writes. Then everything is left alone, has to drain, and is checked.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from streamadv.run import Run, open_run
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from tests.clusters import Cluster, Node, Sentinels, until

from .checks import Identity, problems, registered, total
from .nursery import Nursery
from .producers import GroupPlan, journal_file, plan_group, read_journal
from .proxy import FAULTS, Proxy
from .roles import SCORER
from .setup import Setup
from .trainer import FENCED, LOST, newest_checkpoint, read_deliveries
from .victim import FETCH_PUBLISH, SAVE_COMMIT, script_names

SERVERS: Final = ("memory", "always", "everysec")
GROUPS: Final = ("cluster", "sentinel")
PRODUCERS: Final = 2
DRAIN_S: Final = 180.0  # bounds a hang
TICK_S: Final = 0.05
MAX_PROBLEMS: Final = 5
#: Scripts a role runs; others (new ones) are tried with every role.
SCRIPTS: Final = {
    "producer": {
        "manifest", "register", "server_id", "heartbeat", "begin", "push", "cancel", "score", "touch",
        "withdraw",
    },
    "scorer": {"manifest", "register", "ensure_group", "scored"},
    "grouper": {"manifest", "register", "ensure_group", "take", "tick", "expire", "sweep", "retire"},
    "advantage": {"manifest", "register", "ensure_group", "publish", "discard", "attempt"},
    "trainer": {
        "manifest", "register", "server_id", "take_epoch", "set_trainer", "name_batch", "apply_batch",
        "trained", "commit_session", "commit", "drop_groups",
        "dead_letter_group", "leave_out", "keep_late", "end_run", "settled", "unapply_batch", "unname_batch",
    },
}  # fmt: skip
OPERATORS: Final = {"status", "requeue", "empty_dead"}

logger = logging.getLogger(__name__)


@dataclass
class Report:
    """What happened, and what is wrong."""

    seed: int
    seconds: float
    server: str
    kills_at_points: Counter[str] = field(default_factory=Counter)
    kills_at_random: Counter[str] = field(default_factory=Counter)
    terminated: Counter[str] = field(default_factory=Counter)
    paused: Counter[str] = field(default_factory=Counter)
    connections: Counter[str] = field(default_factory=Counter)
    fenced: int = 0
    batches_lost: int = 0
    server_kills: int = 0
    server_losses: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)
    trajectories: int = 0
    trained: int = 0
    lost: int = 0
    trained_twice: int = 0
    batches: int = 0
    batches_again: int = 0
    drain_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.kills_at_points.total() + self.kills_at_random.total()


class ServerGroup:
    """A cluster, or a master behind Sentinels: a primary is killed, or hangs, and its replica takes over.

    The replica lacks recent writes, up to two seconds of them.
    """

    def __init__(self, kind: str, chance: random.Random) -> None:
        self.kind = kind
        self.can_be_killed = True
        self._chance = chance
        self._group = Cluster() if kind == "cluster" else Sentinels()
        self._group.__enter__()
        self.url = self._group.url
        self._gone: Node | None = None

    def note_size(self) -> None:
        """Nothing of it is on disk."""

    def kill(self) -> bool:
        """The replica takes over; whether anything was lost."""
        primary, replica = self._choose()
        lossy = self._chance.random() < 0.7
        if lossy:
            replica.cut()
            time.sleep(self._chance.uniform(0, 2))
            lossy = replica.behind(primary) > 0
        hangs = self.kind == "cluster" and self._chance.random() < 0.3
        if isinstance(self._group, Cluster):
            primary.pause() if hangs else primary.kill()
            self._group.take_over(replica)
        else:
            self._group.replace(primary, replica)
        until(lambda: replica.info("replication")["role"] == "master", "the replica has taken over")
        replica.mend()
        if hangs:
            primary.go_on()
        else:
            self._gone = primary
        return lossy or hangs

    def _choose(self) -> tuple[Node, Node]:
        if isinstance(self._group, Cluster):
            self._group.wait_until_whole()
            primary = self._chance.choice(self._group.primaries())
            return primary, self._group.replica_of(primary)
        until(lambda: self._group.replica().in_sync, "the replica is in sync")  # type: ignore[union-attr]
        return self._group.master(), self._group.replica()

    def start(self) -> None:
        if self._gone is not None:
            self._group.bring_back(self._gone)
            self._gone = None

    def close(self) -> None:
        self._group.close()


class Server:
    """The server under test, behind a proxy; killed only when it keeps its data."""

    def __init__(self, kind: str, folder: Path, chance: random.Random) -> None:
        self.kind = kind
        self._chance = chance
        self._embedded: EmbeddedServer | None = None
        self._folder = folder / "data"
        self._sizes: list[tuple[float, Path, int]] = []
        if kind in SERVERS:
            durable = kind != "memory"
            self._embedded = EmbeddedServer(
                self._folder if durable else None, appendfsync=kind if durable else "everysec"
            )
            self._embedded.start()
        self.url = kind if self._embedded is None else self._embedded.url

    @property
    def can_be_killed(self) -> bool:
        return self._embedded is not None and self.kind != "memory"

    def note_size(self) -> None:
        """Remember how far its file is, to be able to lose the end of it."""
        now = time.monotonic()
        for file in self._folder.glob("appendonlydir/*.incr.aof"):
            self._sizes.append((now, file, file.stat().st_size))
        self._sizes = [entry for entry in self._sizes if now - entry[0] < 3]

    def kill(self) -> bool:
        """SIGKILL; with `everysec` up to two seconds are lost. Whether something was."""
        assert self._embedded is not None
        self._embedded.kill()
        if self.kind != "everysec":
            return False
        at = time.monotonic() - self._chance.uniform(0, 2)
        earlier = [entry for entry in self._sizes if entry[0] <= at]
        if not earlier or not earlier[-1][1].exists():  # just started, or the file was written anew
            return False
        _, file, size = earlier[-1]
        lost = file.stat().st_size > size
        os.truncate(file, size)
        return lost

    def start(self) -> None:
        assert self._embedded is not None
        self._embedded.start()
        self._sizes.clear()

    def close(self) -> None:
        if self._embedded is not None:
            self._embedded.close()


@dataclass
class Slot:
    """A process that has to be there, whichever life it is in."""

    role: str
    number: int
    pid: int = 0
    lives: int = 0
    done: bool = False
    expected: bool = False  # somebody has ended it
    paused_until: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role}-{self.number}"


class Chaos:
    """One run of the harness."""

    def __init__(self, seed: int, seconds: float, server: str, folder: Path, scale: int) -> None:
        self.scale = scale
        self.chance = random.Random(seed)
        self.folder = folder
        self.report = Report(seed, seconds, server)
        self.slots = [Slot("producer", number) for number in range(PRODUCERS)]
        self.slots += [Slot("grouper", 0), Slot("grouper", 1), Slot("advantage", 0), Slot("advantage", 1)]
        self.slots.append(Slot("trainer", 0))
        self.zombies: list[tuple[int, float]] = []  # paused trainers: pid, when they go on
        self.server_back_at: float | None = None
        self.point_odds = 0.7
        self.settings: dict[str, Any] = {
            "shards": 3 if server == "cluster" else self.chance.choice((1, 2)),
            "max_trajectory_bytes": 1 << 16,
            "group_deadline_s": 6.0,
        }
        if self.chance.random() < 0.5:
            self.settings["scorers"] = [SCORER]
            self.slots.append(Slot("scorer", 0))
        if self.chance.random() < 0.3:
            self.settings["partial_min_usable"] = 1
        chains = (
            {"estimator": "grpo"},
            {"estimator": "gae"},
            {"estimator": "gae", "whiten_advantages": True},
        )
        self.chain = self.chance.choice(chains)

    # Processes

    def start(self, slot: Slot) -> None:
        words = ["role", slot.role, str(self.setup_file), str(slot.number)]
        if self.chance.random() < self.point_odds:
            at = f"{self.chance.choice(points_of(slot.role))}:{self.chance.choice((1, 1, 1, 2, 3, 5, 10))}"
            words = ["--at", at, "--note", str(self.folder / "points"), "--", *words]
        slot.pid = self.nursery.start(words, self.folder / f"{slot.name}.log")
        slot.lives += 1
        slot.expected = False

    def supervise(self) -> None:
        """Start again what has ended, bring back what was paused."""
        ended = dict(self.nursery.ended())
        for slot in self.slots:
            if slot.pid not in ended:
                continue
            status = ended.pop(slot.pid)
            self._judge(slot, status)
            slot.paused_until = 0.0
            last = slot.role == "producer" or (slot.role == "trainer" and self.producers_done)
            if status == 0 and last:
                slot.done, slot.pid = True, 0
            else:
                self.start(slot)
        for pid, status in ended.items():  # former trainers
            self.report.fenced += status == FENCED
            if status not in (0, FENCED, LOST, -signal.SIGKILL):
                self.report.problems.append(f"a fenced trainer ended with status {status}")
            self.zombies = [zombie for zombie in self.zombies if zombie[0] != pid]
        now = time.monotonic()
        for slot in self.slots:
            if slot.paused_until and now >= slot.paused_until:
                slot.paused_until = 0.0
                _signal(slot.pid, signal.SIGCONT)
        for pid, end in self.zombies:
            if now >= end:
                _signal(pid, signal.SIGCONT)
        if self.server_back_at is not None and now >= self.server_back_at:
            self.server.start()
            self.server_back_at = None
        self.server.note_size()

    def _judge(self, slot: Slot, status: int) -> None:
        if slot.role == "trainer" and status in (FENCED, LOST):
            self.report.fenced += status == FENCED
            self.report.batches_lost += status == LOST
        elif status == -signal.SIGTERM and slot.expected:
            pass  # it was told before it could listen
        elif status not in (0, -signal.SIGKILL) or (
            status == 0 and not slot.expected and slot.role in ("scorer", "grouper", "advantage")
        ):
            log = self.folder / f"{slot.name}.log"
            tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
            self.report.problems.append(f"{slot.name} ended with status {status}: {tail[-600:]}")

    @property
    def producers_done(self) -> bool:
        return all(slot.done for slot in self.slots if slot.role == "producer")

    # Faults

    def strike(self) -> None:
        """One fault."""
        living = [slot for slot in self.slots if slot.pid and not slot.paused_until]
        weights = {"kill": 4, "pause": 2, "terminate": 1, "connection": 5, "zombie": 1}
        if self.server.can_be_killed:
            weights["server"] = 2
        fault = self.chance.choices(list(weights), list(weights.values()))[0]
        slot = self.chance.choice(living) if living else None
        if fault == "connection" and self.proxy is not None:
            self.proxy.arm(self.chance.choice(FAULTS))
        elif fault == "server" and self.server_back_at is None:
            self.report.server_kills += 1
            self.report.server_losses += self.server.kill()
            self.server_back_at = time.monotonic() + self.chance.choice((0.0, 0.3, 1.5))
        elif slot is None:
            return
        elif fault == "kill":
            self.report.kills_at_random[slot.role] += 1
            _signal(slot.pid, signal.SIGKILL)
        elif fault == "terminate" and slot.role in ("scorer", "grouper", "advantage"):
            self.report.terminated[slot.role] += 1
            slot.expected = True
            _signal(slot.pid, signal.SIGTERM)
        elif fault == "pause":
            self.report.paused[slot.role] += 1
            slot.paused_until = time.monotonic() + self.setup.lease_s * self.chance.uniform(0.5, 3)
            _signal(slot.pid, signal.SIGSTOP)
        elif fault == "zombie" and slot.role == "trainer":
            self.report.paused["trainer taken over"] += 1
            _signal(slot.pid, signal.SIGSTOP)
            self.zombies.append((slot.pid, time.monotonic() + self.chance.uniform(0.2, 3)))
            self.start(slot)

    # The run

    def play(self) -> Report:
        with ExitStack() as stack:
            self.nursery = stack.enter_context(Nursery())
            kind = self.report.server
            self.server: Server | ServerGroup = (
                ServerGroup(kind, self.chance) if kind in GROUPS else Server(kind, self.folder, self.chance)
            )
            stack.callback(self.server.close)
            self.proxy: Proxy | None = None
            url, address = self.server.url, urlsplit(self.server.url)
            if address.scheme == "redis" and address.hostname:
                self.proxy = stack.enter_context(
                    Proxy(address.hostname, address.port or 6379, self.report.seed)
                )
                url = url.replace(
                    f"{address.hostname}:{address.port or 6379}", f"127.0.0.1:{self.proxy.port}"
                )
            run = f"chaos-{self.report.seed}-{os.getpid()}"
            lossy = kind in ("everysec", *GROUPS)
            self.setup = Setup(
                url,
                run,
                str(self.folder),
                self.report.seed,
                self.settings,
                self.chain,
                scale=self.scale,
                overlap_s=1e9 if lossy else Setup.overlap_s,
            )
            self.setup_file = self.setup.save()
            for slot in self.slots:
                self.start(slot)
            self._rage()
            self._calm()
            drained = self._drain()
            self._check(open_run(Connection(self.server.url), run), drained)
        return self.report

    def _rage(self) -> None:
        end = time.monotonic() + self.report.seconds
        if self.proxy is not None:
            self.proxy.odds = 0.001
        strike_at = time.monotonic() + 1.0
        while time.monotonic() < end:
            self.supervise()
            if time.monotonic() >= strike_at:
                self.strike()
                strike_at = time.monotonic() + self.chance.expovariate(3.0)
            time.sleep(TICK_S)

    def _calm(self) -> None:
        """No more faults: everybody may do his work."""
        self.calm_at = time.monotonic()
        self.point_odds = 0.0
        if self.proxy is not None:
            self.proxy.odds = 0.0
            self.report.connections = self.proxy.faults
        if self.server_back_at is not None:
            self.server.start()
            self.server_back_at = None
        for slot in self.slots:
            slot.paused_until = min(slot.paused_until, time.monotonic())
        self.zombies = [(pid, time.monotonic()) for pid, _ in self.zombies]
        self.setup.stop_file.touch()

    def _drain(self) -> bool:
        run: Run | None = None
        end = time.monotonic() + DRAIN_S
        while time.monotonic() < end:
            self.supervise()
            if all(slot.done for slot in self.slots if slot.role in ("producer", "trainer")):
                run = run or open_run(Connection(self.server.url), self.setup.run)
                state = read_status(run)
                unfinished = state.ledger.queued or state.ledger.in_flight
                if not (unfinished or state.garbage):
                    return True
                for slot in self.slots:
                    if slot.role == "trainer" and unfinished:
                        self.report.problems.append("the trainer saw the end of the run before it was empty")
                        if len(self.report.problems) > MAX_PROBLEMS:
                            return False
                        slot.done = False
                        self.start(slot)
            time.sleep(TICK_S)
        run = run or open_run(Connection(self.server.url), self.setup.run)
        waiting = [slot.name for slot in self.slots if not slot.done and slot.role in ("producer", "trainer")]
        self.report.problems.append(
            f"not drained after {DRAIN_S:g} s: {', '.join(waiting)} not done; {json.dumps(read_status(run).to_json())}"
        )
        return False

    def _check(self, run: Run, drained: bool) -> None:
        report = self.report
        points = self.folder / "points"
        report.kills_at_points = Counter(points.read_text().split()) if points.exists() else Counter()
        plans = self._plans()
        required = {place for plan in plans for place in plan.required}
        optional = {place for plan in plans for place in plan.optional}
        usable = {place for plan in plans for place in plan.usable}
        checkpoint = newest_checkpoint(self.folder) or {"weights": []}
        weights: list[Identity] = [(group_id, index) for group_id, index in checkpoint["weights"]]
        report.ledger = total(run)
        report.trajectories = len(required)
        report.trained = len(weights)
        report.lost = len(required - registered(run) - set(weights))
        report.trained_twice = len(weights) - len(set(weights))
        report.drain_s = round(time.monotonic() - self.calm_at, 1)
        deliveries = read_deliveries(self.folder)
        if drained:
            report.problems += problems(
                run,
                required,
                weights,
                optional=optional,
                usable=usable,
                delivered=[each for _, _, members in deliveries for each in members],
                server_lost=report.server_losses > 0,
            )
        first: dict[int, list[Identity]] = {}
        for _, version, members in deliveries:
            report.batches += 1
            report.batches_again += version in first
            if first.setdefault(version, members) != members and not report.server_losses:
                report.problems.append(f"batch {version} came again with other members")

    def _plans(self) -> list[GroupPlan]:
        return [
            plan_group(self.report.seed, number, n, self.scale)
            for number in range(PRODUCERS)
            for n in read_journal(journal_file(self.folder, number))[0]
        ]


def points_of(role: str) -> list[str]:
    """Where a process of this role can be killed."""
    known = set().union(*SCRIPTS.values()) | OPERATORS
    names = sorted(SCRIPTS[role] | (set(script_names()) - known))
    found = [f"{when}:{name}" for name in names for when in ("before", "after")]
    return found + {"advantage": [FETCH_PUBLISH], "trainer": [SAVE_COMMIT]}.get(role, [])


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def run_chaos(seed: int, seconds: float, server: str, folder: Path | None = None, scale: int = 1) -> Report:
    """One chaos run. `server`: memory, always, everysec, cluster, sentinel, or the URL of one (which is not killed).

    scale: groups have so many times more members.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamadv-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        return Chaos(seed, seconds, server, folder, scale).play()


def main() -> int:
    parser = argparse.ArgumentParser(description="chaos run of all processes")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("STREAMADV_CHAOS_SEED", "1")))
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("STREAMADV_CHAOS_SECONDS", "30"))
    )
    parser.add_argument("--server", default="memory", help=f"{', '.join((*SERVERS, *GROUPS))}, or a URL")
    parser.add_argument("--folder", type=Path, help="keep journals and logs here")
    parser.add_argument("--scale", type=int, default=1, help="so many times more members a group")
    arguments = parser.parse_args()
    report = run_chaos(arguments.seed, arguments.seconds, arguments.server, arguments.folder, arguments.scale)
    print(json.dumps(vars(report), indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
