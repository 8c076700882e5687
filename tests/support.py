"""What tests of the pipeline share: trajectories to push, stages run step by step in this thread, and checks.

`group_all`, `compute_all` and `next_batch` do on any server, fake or real, what worker processes do, so that
a test decides what happens in which order.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

import fakeredis
import numpy as np
import pytest
import redis
from fakeredis.commands_mixins import scripting_mixin

from streamadv.advantage.compute import compute_safely
from streamadv.advantage.prepare import prepare
from streamadv.advantage.worker import publish, run_worker
from streamadv.algorithms.device import choose_device
from streamadv.batch.session import read_hold
from streamadv.errors import NoBatchError
from streamadv.grouping import grouper, housekeeping
from streamadv.grouping.grouper import run_grouper
from streamadv.grouping.groups_log import LoggedGroup, read_log
from streamadv.producer import Producer
from streamadv.producer.tickets import PushResult
from streamadv.run import Run, open_run
from streamadv.run.consumer import ADVANTAGE, GROUPER, Consumer, Entry
from streamadv.run.kept import Numbers, pack_results, unpack_late, unpack_results
from streamadv.run.manifest import RunSettings
from streamadv.status import Status, problems_of, read_shards, read_status
from streamadv.status.audit import audit
from streamadv.status.model import Ledger
from streamadv.status.seen import kept_entries
from streamadv.store.connection import Connection
from streamadv.trainer.microbatch import Batch
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.member_table import packets_problem
from streamadv.trajectory.members import Checked, Members, Reference, references_of
from streamadv.trajectory.packet_encoding import Packet, encode_packets, members_of
from streamadv.trajectory.schema import Trajectory, parse_trajectory

Forward = Callable[[float], None]
T = TypeVar("T")

CPU = choose_device("cpu")


class CompilesOnce(scripting_mixin.LUA_MODULE.LuaRuntime):
    """Lua of an in-process server, which otherwise compiles a script at every call: most of what a push takes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()  # which has read the options before
        self._compiled = cache(self.compile)

    def execute(self, code: bytes | str) -> Any:
        return self._compiled(code)()


class OneClient(Connection):
    """Uses one client in every role, by default that of an empty in-process server. Its owner closes it."""

    def __init__(self, client: redis.Redis | None = None) -> None:
        super().__init__("redis://one-client")
        self._one = client or fakeredis.FakeRedis(server=fakeredis.FakeServer())

    def check(self) -> None:
        self.push.ping()  # fakeredis has no INFO

    def close(self) -> None:
        pass

    def _client(self, role: str, socket_timeout: float, retries: int) -> redis.Redis:
        return self._one


def some_of(values: Iterable[T], every: int) -> list[Any]:
    """Parameters of which `make test` takes one in so many; the others have the marker `release`."""
    return [
        value if number % every == 0 else pytest.param(value, marks=pytest.mark.release)
        for number, value in enumerate(values)
    ]


def deep_problems(run: Run) -> list[str]:
    """The problems that an audit finds; [] is what a quiet run has."""
    return audit(run).problems


def trajectory(
    group_id: str = "g", index: int = 0, size: int = 2, tokens: int = 5, **fields: Any
) -> Trajectory:
    """A usable trajectory of one row, two prompt tokens, reward = index; `fields` replace any of that."""
    row = {
        "input_ids": np.arange(tokens) + 10 * index,
        "response_mask": [0, 0, *[1] * (tokens - 2)],
        "rollout_log_probs": np.linspace(-1, -0.1, tokens),
    }
    record: dict[str, Any] = {
        "group_id": group_id,
        "group_size": size,
        "rollout_index": index,
        "reward": float(index),
        **({} if "rows" in fields else row),
        **fields,
    }
    return parse_trajectory({name: value for name, value in record.items() if value is not ...})


def unscored(group_id: str = "g", index: int = 0, size: int = 2, **fields: Any) -> Trajectory:
    """A usable trajectory whose reward comes later, by a scorer or by `producer.score`."""
    return trajectory(group_id, index, size, reward=..., reward_later=True, **fields)


def ended(group_id: str, index: int, size: int, status: str) -> Trajectory:
    """A failed or aborted rollout."""
    return Trajectory(group_id=group_id, group_size=size, rollout_index=index, status=status)


def packets_of(trajectories: Sequence[Trajectory], limit: int = 1 << 22) -> list[Packet]:
    """The packets in which trajectories of one group are sent."""
    return encode_packets([Checked.of(item) for item in trajectories], limit)


def members_in(trajectories: Sequence[Trajectory], sizes: Sequence[int]) -> Members:
    """Usable trajectories as members. sizes: payload bytes of each."""
    return members_of([Checked.of(item) for item in trajectories], sizes)


def members_problem(members: Members, size: int) -> str | None:
    """What is wrong with the members of one payload of `size` bytes."""
    return packets_problem(members, [size], [len(members)])


def push_groups(producer: Producer, count: int, size: int = 2, prefix: str = "g", **fields: Any) -> list[str]:
    """Push `count` whole groups; their ids."""
    ids = [f"{prefix}{number:04d}" for number in range(count)]
    for group_id in ids:
        producer.push([trajectory(group_id, index, size, **fields) for index in range(size)])
    return ids


@contextmanager
def producing(
    connection: Connection | str, run: str, settings: Mapping[str, Any] | None = None
) -> Iterator[Producer]:
    """A producer of a run with these settings."""
    with Producer(connection, run, settings=RunSettings(**(settings or {}))) as producer:
        yield producer


def pushed_run(
    connection: Connection | str,
    name: str,
    groups: int,
    *,
    settings: Mapping[str, Any] | None = None,
    finish: bool = False,
    **options: Any,
) -> Run:
    """A run to which so many whole groups were pushed, see `push_groups`. finish: no more will come."""
    with producing(connection, name, settings) as producer:
        push_groups(producer, groups, **options)
        if finish:
            producer.finish()
    return join(connection, name)


def heartbeat(producer: Producer) -> None:
    """Do now what `producer` does every few seconds."""
    producer._drive(producer._logic.heartbeat())


def payload_keys(run: Run) -> list[bytes]:
    """Payloads that are there, of all runs of the server."""
    return [key for key in run.connection.scripts.keys("*") if b":payload:" in key]


def push_one(producer: Producer, item: Trajectory) -> str:
    result: PushResult = producer.push([item])
    return result.codes[0]


def join(connection: Connection | str, name: str) -> Run:
    connection = Connection(connection) if isinstance(connection, str) else connection
    return open_run(connection, name)


def consumer_of(run: Run, stage: str = GROUPER, name: str | None = None, lease_s: float = 5.0) -> Consumer:
    """A consumer that never blocks."""
    stop = threading.Event()
    stop.set()
    streams = {GROUPER: lambda keys: keys.rollouts, ADVANTAGE: lambda keys: keys.work}
    stream = streams.get(stage, lambda keys: keys.scoring(stage))
    for shard in run.shards:  # fakeredis tells a missing stream by another error than servers do
        shard.call("ensure_group", [stage], stream=stream(shard.keys))
    return Consumer(run, stage, stream, lease_s=lease_s, stop=stop, name=name)


def batches_read(consumer: Consumer, count: int = 128) -> Iterator[Any]:
    """What the consumer reads until every shard had nothing twice (the first try may create the group)."""
    empty = 0
    while empty < 3 * len(consumer.run.shards):
        entries = consumer.read(count)
        empty = 0 if entries else empty + 1
        if entries:
            yield entries


def read_all(consumer: Consumer, count: int) -> list[Entry]:
    """What the consumer reads, `count` entries a time, until a read gives nothing."""
    entries: list[Entry] = []
    while page := consumer.read(count):
        entries += page
    return entries


def ids(entries: Sequence[Entry]) -> list[str]:
    return [entry.id for entry in entries]


def group_all(
    run: Run,
    consumer: Consumer | None = None,
    count: int = 128,
    keeper: housekeeping.Housekeeping | None = None,
) -> list[str]:
    """Do what groupers do until nothing is left to do; outcomes of the groups that ended by their members."""
    consumer = consumer or consumer_of(run)
    outcomes = []
    for entries in batches_read(consumer, count):
        outcomes += grouper.take(run, entries)
        consumer.done(entries)
    (keeper or housekeeping.Housekeeping(run)).round()
    return outcomes


def housekeep(run: Run) -> None:
    """Do once what groupers do every second beside grouping."""
    housekeeping.Housekeeping(run).round()


def fence_of(run: Run) -> str:
    """What the trainer that has the run gives to fenced scripts (`Progress.fence`)."""
    hold = read_hold(run)
    return f"{hold.epoch} {hold.session}"


def compute_all(run: Run, consumer: Consumer | None = None) -> int:
    """Do what advantage workers do until no work is left; entries published."""
    consumer = consumer or consumer_of(run, ADVANTAGE)
    published = 0
    for entries in batches_read(consumer, 1):
        for entry in entries:
            prepared = prepare(run, entry)
            if prepared is not None:
                published += publish(run, compute_safely(run, prepared, CPU))
        consumer.done(entries)
    return published


def ends(queue: TrainerQueue) -> bool:
    """Whether the run is over, as its trainer is told at once."""
    try:
        return queue.next_batch(timeout=0) is None
    except NoBatchError:
        return False


def next_batch(queue: TrainerQueue, run: Run, **options: Any) -> Batch | None:
    """The next batch, None at the end of the run, NoBatchError when there are not enough groups."""
    group_all(run)
    try:
        return queue.next_batch(timeout=0, **options)
    except NoBatchError:
        compute_all(run)
        return queue.next_batch(timeout=0, **options)


def delivered_batch(queue: TrainerQueue, run: Run, **options: Any) -> Batch:
    """`next_batch`, where there is one."""
    batch = next_batch(queue, run, **options)
    assert batch is not None
    return batch


def problems(run: Run, deep: bool = True) -> list[str]:
    """Contradictions between the ledger and everything stored; [] is what a test wants."""
    shallow = [problem for shard in read_shards(run) for problem in problems_of(shard)]
    return shallow + (deep_problems(run) if deep else [])


def ledger(run: Run) -> dict[str, Any]:
    """The ledger of all shards: of the whole status it is the cheap part, and tests read it after every step."""
    return asdict(Ledger.of(run.counters()))


def empty_status() -> Status:
    """The status of a run in which nothing happened, for `dataclasses.replace`."""
    return read_status(join(OneClient(), "empty"))


def make_overdue(run: Run, group_id: str, deadline_ms: int = -(10**15)) -> None:
    """Move an open group's deadline, before all that was pushed."""
    keys = run.keys.shards[run.keys.shard_of(group_id)]
    run.connection.scripts.zadd(keys.open, {group_id: deadline_ms}, xx=True)


def now_ms(run: Run) -> int:
    """By the clock that deadlines have, of the home shard."""
    ms: int = run.home.call("tick")
    return ms


def logged(run: Run) -> dict[str, LoggedGroup]:
    """The groups of the groups logs."""
    return {
        group.group_id: group
        for shard in range(len(run.keys.shards))
        for group in read_log(run, shard, "0-0", 1000)
    }


def references(group: LoggedGroup) -> list[Reference]:
    """The members of a group one by one."""
    owners = [(group.group_id, group.data_source)] * len(group.members)
    return references_of(group.members, owners)


def identities(items: Sequence[Any]) -> list[tuple[str, int]]:
    """Identity of references or trajectories."""
    return [(item.group_id, item.rollout_index) for item in items]


@contextmanager
def threads(*targets: Callable[[threading.Event], object]) -> Iterator[threading.Event]:
    """Run each target(stop) in a thread; on leaving they are stopped, and an error in one is raised."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def body(target: Callable[[threading.Event], object]) -> None:
        try:
            target(stop)
        except BaseException as error:  # raised below, in the test's thread
            errors.append(error)

    running = [threading.Thread(target=body, args=(target,), daemon=True) for target in targets]
    for thread in running:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in running:
            thread.join(120)
    frames = sys._current_frames()
    alive = ["".join(traceback.format_stack(frames[t.ident or 0])) for t in running if t.is_alive()]
    assert not alive, "\n".join(alive)
    if errors:
        raise errors[0]


@contextmanager
def working(run: Run, *others: Callable[[threading.Event], object], **options: Any) -> Iterator[None]:
    """A grouper, an advantage worker and others at work in `threads`. options: of the first two."""
    with threads(
        lambda stop: run_grouper(run, stop, **options),
        lambda stop: run_worker(run, stop, device="cpu", **options),
        *others,
    ):
        yield


def change_results(run: Run, group_id: str, name: str, number: int) -> None:
    """Change a bit of a number of a result of a kept group."""
    _change_kept(run, group_id, b"results", lambda raw: _changed(unpack_results(raw), name, number))


def change_late(run: Run, group_id: str, name: str, number: int) -> None:
    """Change a bit of a late column of a kept group, of its first rollout."""

    def change(raw: bytes) -> bytes:
        members = {index: pack_results(made) for index, made in unpack_late(raw).items()}
        members[0] = _changed(unpack_late(raw)[0], name, number)
        return b"".join(b"%d %d\n" % (index, len(made)) + made for index, made in members.items())

    _change_kept(run, group_id, b"late", change)


def _changed(results: list[Numbers], name: str, number: int) -> bytes:
    changed = {each.name: each.values.copy() for each in results}
    changed[name].view(f"u{changed[name].itemsize}")[number] ^= 1
    return pack_results([each._replace(values=changed[each.name]) for each in results])


def _change_kept(run: Run, group_id: str, field: bytes, change: Callable[[bytes], bytes]) -> None:
    shard = run.shard_of(group_id)
    for entry in kept_entries(shard):
        if entry.fields[b"group_id"] == group_id.encode():
            run.connection.scripts.xdel(shard.keys.kept, entry.id)
            run.connection.scripts.xadd(shard.keys.kept, {**entry.fields, field: change(entry.fields[field])})


@contextmanager
def holding(client: redis.Redis) -> Iterator[None]:
    """The server answers no script meanwhile."""
    client.client_pause(60_000, all=False)
    try:
        yield
    finally:
        client.client_unpause()


def has_been_asked(client: redis.Redis) -> bool:
    """Whether somebody waits for an answer that is held."""
    return any("b" in each["flags"] for each in client.client_list())
