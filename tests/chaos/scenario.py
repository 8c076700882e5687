"""Every stage of a run in one thread, step by step, each of which can die at any point and is started again.

A death here is an exception at the point, and nothing more is sent by whoever died: what the server sees is what a
SIGKILL would leave. It is deterministic and takes a second where processes take minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import pytest

from streamadv.advantage import compute as computing
from streamadv.advantage.prepare import prepare
from streamadv.advantage.worker import publish
from streamadv.algorithms.device import choose_device
from streamadv.errors import GroupEndedError, NoBatchError, StreamadvError, TrajectoryError
from streamadv.grouping import grouper as grouping
from streamadv.grouping.groups_log import read_log
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer
from streamadv.run import Run, heartbeats, open_run
from streamadv.run.consumer import ADVANTAGE, GROUPER, Consumer
from streamadv.run.dead_letters import list_dead, purge, requeue
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection
from streamadv.trainer import loop
from streamadv.trainer.queue import TrainerQueue
from streamadv.trainer.session import Heartbeat
from tests.support import consumer_of, ended, make_overdue, trajectory, unscored

from .checks import Identity
from .victim import SAVE_COMMIT, hooked

SETTINGS: Final = RunSettings(
    shards=2, redundancy=1, scorers=("judge",), max_trajectory_bytes=1 << 16, keep={"trained": 1.0}
)
#: Works on tokens and on the whole batch: results travel in hashes of their own, one entry for each shard.
CHAIN: Final = {"estimator": "gae", "whiten_advantages": True}
MAX_ROUNDS: Final = 400
COMMAND: Final = "command"
EVALUATION: Final = "evaluation"
VALUES: Final = [0.5] * 5


class Killed(BaseException):
    """A process ends here."""


class Stuck(AssertionError):
    """The run did not come to its end."""


class World:
    """All actors of one run on one server."""

    def __init__(self, url: str, run: str, dies: Callable[[str, int], bool]) -> None:
        """`dies(point, n)`: whether whoever comes to `point` as the n-th, counted over all, ends there.

        Points are those of `victim.py`, `mixed <point>` while a packet is refused for one of its members and the other
        is sent alone, and `COMMAND` before every single command.
        """
        self.connection = Connection(url)
        self.run_name = run
        self.dies = dies
        self.reached: dict[str, int] = {}
        self.deaths: list[str] = []
        self.dead = False
        self.planned: set[Identity] = set()
        self.usable: set[Identity] = set()
        self.checkpoint: tuple[list[Identity], dict[str, Any]] | None = None
        self.compositions: dict[int, list[Identity]] = {}  # of each batch when it was delivered first
        self.repaired: set[str] = set()  # dead groups that went back into the run
        self.mixing = False  # a packet is pushed of which one member is there already
        self.settled = False  # no dead letter is left
        self.ended = False
        #: Of tests before this one, whose trainers nobody closed: they neither die here nor are counted.
        self.strangers = frozenset(threading.enumerate()) - {threading.current_thread()}

    def hook(self, point: str) -> None:
        if threading.current_thread() in self.strangers:
            return
        point = f"mixed {point}" if self.mixing else point
        count = self.reached[point] = self.reached.get(point, 0) + 1
        if self.dies(point, count):
            self.deaths.append(point)
            self.dead = True
            raise Killed(point)

    def gate(self) -> None:
        if self.dead and threading.current_thread() not in self.strangers:
            raise Killed
        if threading.current_thread() is threading.main_thread():
            self.hook(COMMAND)

    def play(self) -> None:
        """Step everybody in turn, starting again whoever died, until the trainer has seen the end of the run."""
        with hooked(self.hook, self.gate), pytest.MonkeyPatch.context() as patch:
            # a dead producer is known to be dead at once
            patch.setattr(heartbeats, "PRODUCER_TIMEOUT_S", -1.0)
            patch.setattr(Heartbeat, "start", lambda heartbeat, session: None)  # a thread dies with nobody
            report = threading.excepthook
            patch.setattr(
                threading,
                "excepthook",
                lambda error: None if error.exc_type is Killed else report(error),  # a producer's goodbye
            )
            # Nobody reads why there is no batch yet, and reading the status for it is a quarter of the time.
            patch.setattr(loop, "why_no_batch", lambda run, limits: "")
            actors = [(make, make(self)) for make in ACTORS]
            for _ in range(MAX_ROUNDS):
                for place, (make, actor) in enumerate(actors):
                    try:
                        next(actor)
                    except Killed:
                        self.dead = False  # of its successor
                        actors[place] = (make, make(self))
                if self.ended:
                    break
            else:
                raise Stuck(f"no end after {MAX_ROUNDS} rounds")
            for _, actor in actors:
                with suppress(Killed):
                    actor.close()
        grouping.Housekeeping(open_run(self.connection, self.run_name)).round()


Life = Generator[None, None, None]
Actor = Callable[[World], Life]


def producer(world: World) -> Life:
    """Carries its plan out from the beginning, whatever an earlier life has done of it."""
    with _producer(world) as producer:
        for operation in _plan(world, producer):
            with suppress(GroupEndedError, TrajectoryError):  # done by an earlier life
                operation()
            yield
        while (producer.model_version() or 0) < 2:
            yield
        _whole(world, producer, "stale", model_version=0)
        yield
        producer.finish()
        yield
    while True:
        yield


@contextmanager
def _producer(world: World) -> Iterator[Producer]:
    producer = Producer(world.connection, world.run_name, settings=SETTINGS)
    try:
        yield producer.open()
    finally:
        producer.close()


def _whole(world: World, producer: Producer, group_id: str, values: bool = True, **fields: Any) -> None:
    given: dict[str, Any] = {"values": VALUES, **fields} if values else fields
    members = [trajectory(group_id, index, 2, **given) for index in range(2)]
    _note(world, group_id, 0, 1)
    producer.push(members)


def _note(world: World, group_id: str, *indices: int, usable: bool = True) -> None:
    places = {(group_id, index) for index in indices}
    world.planned |= places
    if usable:
        world.usable |= places


def _plan(world: World, producer: Producer) -> Iterator[Callable[[], object]]:
    values: dict[str, Any] = {"values": VALUES}

    def push(group_id: str, index: int, **fields: Any) -> None:
        _note(world, group_id, index)
        producer.push([trajectory(group_id, index, 2, **values, **fields)])

    def fail() -> None:
        _note(world, "failed", 0)
        _note(world, "failed", 1, 2, usable=False)
        group = producer.begin_group(2, group_id="failed", columns={"image": [[1, 2], [3, 4]]})
        group.touch(3600.0)
        rollouts = list(group)
        rollouts[0].push(
            input_ids=range(5),
            response_mask=[0, 0, 1, 1, 1],
            rollout_log_probs=[-1.0] * 5,
            reward=1.0,
            **values,
        )
        rollouts[1].fail()
        producer.push([ended("failed", 2, 2, "aborted")])

    def cancel() -> None:
        _note(world, "cancelled", 0)
        _note(world, "cancelled", 1, 2, usable=False)
        group = producer.begin_group(2, group_id="cancelled")
        push("cancelled", 0)
        group.cancel(2)

    def expire() -> None:
        push("late", 0)
        make_overdue(open_run(world.connection, world.run_name), "late")

    def judged(group_id: str) -> None:
        _note(world, group_id, 0, 1)
        producer.push([unscored(group_id, index, 2, **values) for index in range(2)])

    def score() -> None:
        judged("judged1")
        producer.score("judged1", 0, 0.5)

    def poison() -> None:
        _whole(world, producer, "poison")
        if "poison" not in world.repaired:
            _write_values(world, "poison", b"xx")

    def mixed() -> None:
        """The packet is refused whole, and its new member sent alone."""
        push("mixed", 0)
        _note(world, "mixed", 1)
        world.mixing = True
        try:
            producer.push([trajectory("mixed", index, 2, **values) for index in range(2)])
        finally:
            world.mixing = False

    def crowded() -> None:
        """One packet with a member more than its group needs: it stays until the packet goes."""
        _note(world, "crowded", 0, 1, 2)
        producer.push([trajectory("crowded", index, 2, **values) for index in range(3)])

    def evaluate() -> None:
        """In the weights it would be an identity that is not usable."""
        _note(world, EVALUATION, 0, 1, usable=False)
        for index in range(2):
            producer.push([trajectory(EVALUATION, index, 2, role="eval")])

    def unscorable() -> None:
        push("unscorable", 0, reward=None)
        push("unscorable", 1)
        push("unscorable", 2)

    for number in range(3):
        yield lambda number=number: _whole(world, producer, f"whole{number}")  # type: ignore[misc]
    yield lambda: push("whole0", 1)  # again
    yield lambda: push("whole1", 2)  # surplus
    yield mixed
    yield crowded
    yield evaluate
    yield fail
    yield cancel
    yield expire
    yield lambda: None
    yield lambda: push("late", 1)
    yield lambda: judged("judged0")
    yield score
    yield lambda: _whole(world, producer, "incomplete", values=False)  # misses a column
    yield unscorable
    yield poison
    for number in range(3, 6):
        yield lambda number=number: _whole(world, producer, f"whole{number}")  # type: ignore[misc]


def _write_values(world: World, group_id: str, values: bytes) -> None:
    """Overwrite the column of a group's packets, wherever they are."""
    run, scripts = open_run(world.connection, world.run_name), world.connection.scripts
    keys = run.keys.shards[run.keys.shard_of(group_id)]
    entries = [fields for stream in (keys.rollouts, keys.groups) for _, fields in scripts.xrange(stream)]
    lines = [fields.get(b"payload", b"") for fields in entries if fields[b"group_id"].decode() == group_id]
    lines += [fields.get(b"payloads", b"") for fields in entries if fields[b"group_id"].decode() == group_id]
    lines += [
        *scripts.hkeys(keys.group(group_id)),
        scripts.hget(keys.dead_group(group_id), "log:payloads") or b"",
    ]
    for line in b"\n".join(lines).splitlines():
        if b"}:payload:" in line:
            scripts.hset(line.partition(b" ")[0], "values", values)


def scorer(world: World) -> Life:
    run = open_run(world.connection, world.run_name, SETTINGS)
    judge = Scorer(world.connection, world.run_name, "judge", batch_size=3)
    consumer = consumer_of(run, "judge", lease_s=0.0)
    while True:
        consumer.stop.set()  # a read does not block
        entries = consumer.read(3)
        consumer.stop.clear()  # nobody tells the scorer to end
        if entries:
            judge.work(consumer, entries, lambda trajectories: [1.0 + t.rollout_index for t in trajectories])
        yield


def grouper(world: World) -> Life:
    run = open_run(world.connection, world.run_name, SETTINGS)
    consumer = consumer_of(run, GROUPER, lease_s=0.0)
    while True:
        if entries := consumer.read(3):
            grouping.take(run, entries)
            consumer.done(entries)
        grouping.Housekeeping(run).round()
        consumer.retire()
        yield


def worker(world: World) -> Life:
    run = open_run(world.connection, world.run_name, SETTINGS)
    consumer: Consumer = consumer_of(run, ADVANTAGE, lease_s=0.0)
    cpu = choose_device("cpu")
    while True:
        for entry in consumer.read(1):
            prepared = prepare(run, entry)
            assert prepared is not None, entry
            publish(run, computing.compute_safely(run, prepared, cpu))
            consumer.done([entry])
        yield


def trainer(world: World) -> Life:
    """Saves every second batch; the weights are the list of what it was trained on."""
    queue = TrainerQueue(
        world.connection,
        world.run_name,
        batch_groups=2,
        max_staleness=None,
        drop_after=1,
        chain=CHAIN,
        pushed=("values",),
        late={"ref_log_probs": lambda micro_batch: -micro_batch.input_ids.float()},  # it is kept
        commit="manual",
        settings=SETTINGS,
    )
    weights: list[Identity] = []
    if world.checkpoint is not None:
        weights = list(world.checkpoint[0])
        queue.load_state_dict(world.checkpoint[1])
    while True:
        try:
            batch = queue.next_batch(timeout=0)
        except NoBatchError:
            yield
            continue
        if batch is not None:
            members = [(each.group_id, each.rollout_index) for each in batch.references]
            assert world.compositions.setdefault(batch.version, members) == members
            weights += members
            queue.trained(batch)
        if batch is None or batch.version % 2:
            state = queue.state_dict()
            world.checkpoint = (list(weights), state)
            world.hook(SAVE_COMMIT)
            queue.commit(state)
        if batch is None and world.settled:
            queue.finish()
            world.ended = True
        yield


def operator(world: World) -> Life:
    """Repairs what can be repaired of the dead letters and puts them back, once; then gives them up."""
    run = open_run(world.connection, world.run_name, SETTINGS)
    while True:
        for dead in list(list_dead(run)):
            with suppress(StreamadvError):  # done by an earlier life
                if dead.group_id in world.repaired:
                    purge(run, dead.group_id)
                    continue
                _write_values(world, dead.group_id, np.array(2 * VALUES, np.float32).tobytes())
                requeue(run, dead.group_id)
            world.repaired.add(dead.group_id)
        repaired = "incomplete" in world.repaired or _was_dropped(run, "incomplete")
        world.settled = repaired and not list(list_dead(run))
        yield


def _was_dropped(run: Run, group_id: str) -> bool:
    """Whether a group has ended and is not in the log: a checkpoint was loaded from before it was begun."""
    shard = run.shard_of(group_id)
    if not run.connection.scripts.hexists(shard.keys.ended, group_id):
        return False
    return all(group.group_id != group_id for group in read_log(run, shard.index, "0-0", 1000))


ACTORS: Final[tuple[Actor, ...]] = (producer, scorer, grouper, worker, trainer, operator)
