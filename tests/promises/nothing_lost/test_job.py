"""Ranks of a training job: they train the same, whatever the order of their calls and of the server's restarts."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from streamadv.errors import (
    BatchLostError,
    EpochFencedError,
    NoBatchError,
    ServerUnreachableError,
    SettingError,
)
from streamadv.run import Run
from streamadv.run.consumer import ADVANTAGE
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.retry import RETRYABLE
from streamadv.trainer import loop
from streamadv.trainer.collect import Collector
from streamadv.trainer.microbatch import Batch
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    Forward,
    compute_all,
    consumer_of,
    group_all,
    identities,
    ledger,
    problems,
    producing,
    push_groups,
    pushed_run,
    some_of,
    threads,
)

#: Servers with a file are killed and sent back in every test.
pytestmark = [pytest.mark.server, pytest.mark.slow]

LAUNCHER = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
jobs = (f"job{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


class Server:
    """Loses nothing by itself; may be sent back to a moment that was kept."""

    def __init__(self, folder: Path) -> None:
        self._data, self._kept = folder / "data", folder / "kept"
        self._server = EmbeddedServer(self._data, appendfsync="always")
        self._server.start()
        self.connection = Connection(self._server.url)

    def keep(self) -> None:
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._data, self._kept)

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        self._server.kill()
        self._server.start()

    def go_back(self) -> None:
        self._server.kill()
        shutil.rmtree(self._data)
        shutil.copytree(self._kept, self._data)
        self._server.start()

    def close(self) -> None:
        self.connection.close()
        self._server.close()


@pytest.fixture
def server_of_job(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


def ranks_of(run: Run, world_size: int, job: str | None = None, **options: Any) -> list[TrainerQueue]:
    job = job or next(jobs)
    options = {"batch_groups": 2, "commit": "manual", "max_staleness": None, **options}
    return [
        TrainerQueue(run.connection, run.name, rank=rank, world_size=world_size, job=job, **options)
        for rank in range(world_size)
    ]


def ask(queue: TrainerQueue, run: Run, timeout: float = 0) -> Batch | None:
    """The queue's next batch, once the workers have done what there is to do."""
    for _ in range(3):
        try:
            return queue.next_batch(timeout=timeout)
        except NoBatchError:
            group_all(run)
            compute_all(run)
    return queue.next_batch(timeout=timeout)


def given(queue: TrainerQueue, run: Run) -> Batch:
    batch = ask(queue, run)
    assert batch is not None
    return batch


def filled(connection: Connection, name: str, groups: int, *, finish: bool = True, **settings: Any) -> Run:
    """A run with so many groups of two in its log."""
    run = pushed_run(connection, name, groups, settings=settings, finish=finish)
    group_all(run)
    return run


@contextmanager
def computing(run: Run) -> Iterator[None]:
    """Workers at work, whatever happens to the server."""

    # They last: a lease ends by its reader's clock, so a worker reads again what it lost the answer to.
    grouper = consumer_of(run, lease_s=0.5)
    worker = consumer_of(run, ADVANTAGE, lease_s=0.5)

    def work(stop: threading.Event) -> None:
        while not stop.wait(0.02):
            try:
                group_all(run, grouper)
                compute_all(run, worker)
            except RETRYABLE:
                grouper.start_over()
                worker.start_over()

    with threads(work):
        yield


def groups_of(batch: Batch) -> list[str]:
    return sorted({group_id for group_id, _ in identities(batch.references)})


# Any order


class Script:
    """A job whose ranks average gradients: nobody has trained on batch k before all have it. Every call is a step.

    A rank's weights are the groups it was trained on; a checkpoint holds those of every rank with rank 0's state.
    """

    def __init__(self, server: Server, run: Run, world_size: int, draw: random.Random) -> None:
        self.server, self.run, self.draw = server, run, draw
        self.names: dict[int, str] = {}  # batch -> its id, as any rank has seen it
        self.weights: list[list[str]] = [[]]
        self.saved: tuple[list[str], dict[str, Any] | None] = ([], None)
        self.restarts = 0
        self.start(world_size)

    def start(self, world_size: int) -> None:
        self.ranks = ranks_of(self.run, world_size, prefetch=self.draw.choice([0, 1]))
        self.weights = [list(self.saved[0]) for _ in self.ranks]
        self.todo = [["load", "next"] if self.saved[1] is not None else ["next"] for _ in self.ranks]
        self.current: list[Batch | None] = [None] * world_size
        self.steps = [0] * world_size  # batches trained
        self.names = {}
        self.over = [False] * world_size
        self.waited = 0

    def step(self) -> None:
        """A call of some rank that may make one."""
        behind = min(self.steps)
        able = [
            rank
            for rank, todo in enumerate(self.todo)
            if not self.over[rank]
            and (todo[0] != "trained" or self._all_have(rank))
            and self.steps[rank] <= behind + 1
        ]
        rank = self.draw.choice(able)
        queue, call = self.ranks[rank], self.todo[rank][0]
        if call == "load":
            assert self.saved[1] is not None
            queue.load_state_dict(json.loads(json.dumps(self.saved[1])))
        elif call == "next":
            if not self._next(rank):
                return
        elif call == "trained":
            batch = self.current[rank]
            assert batch is not None
            queue.trained(batch)
            self.steps[rank] += 1
        elif call == "save":
            state = queue.state_dict()
            if rank == 0:
                self.saved = (list(self.weights[0]), state)
        else:
            queue.commit(self.saved[1] if rank == 0 and self.saved[1] is not None else queue.state_dict())
        self.todo[rank].pop(0)
        if not self.todo[rank]:
            more = ["save", "commit"] if self.steps[rank] % 2 == 0 else []
            self.todo[rank] = [*more, "next"]

    def _all_have(self, rank: int) -> bool:
        """Whether gradients can be averaged: everybody has this rank's batch."""
        mine = self.current[rank]
        assert mine is not None
        return all(each is not None and each.version >= mine.version for each in self.current)

    def _next(self, rank: int) -> bool:
        queue = self.ranks[rank]
        try:
            batch = queue.next_batch(timeout=0)
        except NoBatchError:
            group_all(self.run)
            compute_all(self.run)
            self.waited += 1
            return False
        self.waited = 0
        if batch is None:
            self.over[rank] = True
        else:
            assert self.names.setdefault(batch.version, batch.id) == batch.id, "ranks train different batches"
            self.weights[rank] += groups_of(batch)
            self.current[rank] = batch
            self.todo[rank].insert(1, "trained")
        return True

    def go(self, lossy: bool) -> None:
        kept = False
        while not all(self.over):
            if self.restarts and self.draw.random() < 0.3:
                self.restarts -= 1
                if lossy and kept:
                    self.server.go_back()
                    kept = False
                else:
                    self.server.restart()
            if lossy and not kept and self.draw.random() < 0.3:
                self.server.keep()
                kept, since = True, self.saved
            elif lossy and kept and self.saved is not since:
                kept = False  # a checkpoint takes longer than a server may lose; see the tests below
            self.step()
            assert lossy or self.waited < 40 * len(self.ranks), "ranks wait for each other"
            if self.waited >= 40 * len(
                self.ranks
            ):  # gradients' averaging times out, and the job starts again
                self.start(len(self.ranks))


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("seed", some_of(range(6), 3))
def test_any_order_of_calls_and_restarts(server_of_job: Server, run: str, seed: int, lossy: bool) -> None:
    draw = random.Random(f"{seed}/{lossy}")
    joined = filled(server_of_job.connection, run, 13, shards=draw.choice([1, 2]))
    script = Script(server_of_job, joined, draw.choice([2, 3]), draw)
    script.restarts = 8
    try:
        script.go(lossy)
    except BatchLostError:
        assert lossy
        script.start(2)
        script.go(lossy)
    ranks = script.ranks
    ranks[0].commit(ranks[0].state_dict())
    assert all(weights == script.weights[0] for weights in script.weights)
    assert len(script.weights[0]) == len(set(script.weights[0])) == 13
    counted = ledger(joined)
    assert (counted["trained"], counted["dropped"], counted["queued"], counted["in_flight"]) == (26, {}, 0, 0)
    assert problems(joined) == []


# One order each


def train(ranks: Sequence[TrainerQueue], run: Run) -> Batch:
    """One step on every rank; rank 0's batch."""
    batches = [given(queue, run) for queue in ranks]
    assert len({batch.id for batch in batches}) == 1
    for queue, batch in zip(ranks, batches, strict=True):
        queue.trained(batch)
    return batches[0]


def save(queue: TrainerQueue) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(queue.state_dict()))
    queue.commit(state)
    return state


def begun_and_pushed(run: Run, count: int, prefix: str) -> None:
    """Groups that were begun at the trainer's version, as rollout engines do."""
    with producing(run.connection, run.name) as producer:
        for number in range(count):
            group = producer.begin_group(1, group_id=f"{prefix}{number}")
            group.push([{"rollout_index": 0, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}])
    group_all(run)


@pytest.mark.parametrize("lost", ["nothing", "later work", "the loading"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_of_a_resumed_job_survive_a_restart_of_the_server(
    server_of_job: Server, run: str, lost: str, world_size: int
) -> None:
    joined = filled(server_of_job.connection, run, 8)
    first = ranks_of(joined, 1)
    train(first, joined)
    state = save(first[0])
    train(first, joined)
    if lost == "the loading":
        begun_and_pushed(joined, 2, "old")  # at version 2, which is rolled back
        server_of_job.keep()
    ranks = ranks_of(joined, world_size)
    for queue in ranks:
        queue.load_state_dict(state)
    if lost != "the loading":
        begun_and_pushed(joined, 2, "new")
        train(ranks, joined)
        begun_and_pushed(joined, 4, "newer")
    if lost == "later work":
        server_of_job.keep()
        train(ranks, joined)
    (server_of_job.restart if lost == "nothing" else server_of_job.go_back)()
    trained = []
    while (batch := ask(ranks[0], joined)) is not None:
        trained += groups_of(batch)
        for queue in ranks[1:]:
            assert given(queue, joined).id == batch.id
        ranks[0].trained(batch)
    dropped = ledger(joined)["dropped"]
    if lost == "the loading":
        assert dropped == {"rolled_back": 2}
    else:
        assert dropped == {}
        assert {f"newer{number}" for number in range(4)} <= set(trained)
    ranks[0].commit(ranks[0].state_dict())
    assert problems(joined) == []


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_rank_that_asks_before_rank_0_after_a_restart(
    server_of_job: Server, run: str, prefetch: int
) -> None:
    """Rank 0 may be waiting for it: it has batch 2, or has trained on batch 1."""
    joined = filled(server_of_job.connection, run, 12)
    ranks = ranks_of(joined, 2, prefetch=prefetch)
    train(ranks, joined)
    for _ in range(2):  # the second time rank 0 has taken a new epoch
        mine = given(ranks[0], joined)
        server_of_job.restart()
        theirs = given(ranks[1], joined)
        assert (theirs.version, theirs.id) == (mine.version, mine.id)
        server_of_job.restart()
        if prefetch:
            theirs = given(ranks[1], joined)  # rank 0 has not said that it has trained
            assert theirs.version == mine.version + 1
        else:
            with pytest.raises(NoBatchError):
                ranks[1].next_batch(timeout=0)
        server_of_job.restart()
        ranks[0].trained(mine)
        mine = given(ranks[0], joined)
        if not prefetch:
            theirs = given(ranks[1], joined)
        assert (theirs.version, theirs.id) == (mine.version, mine.id)
        for queue, batch in zip(ranks, (mine, theirs), strict=True):
            queue.trained(batch)
    train(ranks, joined)
    save(ranks[0])
    assert (ledger(joined)["trained"], problems(joined)) == (24, [])


def test_a_rank_leaves_out_what_it_cannot_read(server_of_job: Server, run: str) -> None:
    """Also when rank 0 has taken another epoch since."""
    joined = filled(server_of_job.connection, run, 4)
    leader, _ = ranks = ranks_of(joined, 2)
    train(ranks, joined)
    server_of_job.restart()
    mine = given(leader, joined)
    assert leader.epoch == 2
    scripts: Any = joined.connection.scripts
    for _, fields in scripts.xrange(joined.keys.home.groups):
        scripts.delete(*(line.split(b" ")[0] for line in fields[b"payloads"].split(b"\n")))
    theirs = given(ranks[1], joined)
    assert (theirs.id, theirs.delivered) == (mine.id, [])
    for queue, batch in zip(ranks, (mine, theirs), strict=True):
        queue.trained(batch)
    save(leader)
    assert ledger(joined)["dead"] == {"undecodable": 2}
    kept = "is referred to and missing"  # rank 0 had read its group before, which is kept
    assert [each for each in problems(joined) if not each.endswith(kept)] == []


def test_ranks_that_an_older_job_left_over_are_fenced(server_of_job: Server, run: str) -> None:
    joined = filled(server_of_job.connection, run, 8)
    older = ranks_of(joined, 2)
    train(older, joined)
    newer = ranks_of(joined, 1)
    train(newer, joined)
    with pytest.raises(EpochFencedError):
        older[1].next_batch(timeout=0)
    server_of_job.restart()
    for queue in (older[1], older[0]):
        with pytest.raises(EpochFencedError):
            queue.next_batch(timeout=0)
    train(newer, joined)


def test_the_newer_job_has_the_run_though_the_server_forgot_it(server_of_job: Server, run: str) -> None:
    """Whoever comes back first, and though the older one takes the very epoch that was forgotten."""
    joined = filled(server_of_job.connection, run, 8)
    older = ranks_of(joined, 2)
    train(older, joined)
    server_of_job.keep()
    newer = ranks_of(joined, 2)
    (batch, *_) = [given(queue, joined) for queue in newer]
    server_of_job.go_back()
    train(older, joined)
    assert older[0].epoch == newer[0].epoch
    with pytest.raises(
        NoBatchError, match=r"the server has lost what job \S+ has written: waiting for its rank 0"
    ):
        newer[1].next_batch(timeout=0)
    newer[0].trained(batch)
    newer[1].trained(batch)
    train(newer, joined)
    for queue in older:
        with pytest.raises(EpochFencedError):
            queue.next_batch(timeout=0)


def test_a_batch_whose_naming_was_lost_reaches_the_other_ranks_as_it_was(
    server_of_job: Server, run: str
) -> None:
    joined = filled(server_of_job.connection, run, 6)
    ranks = ranks_of(joined, 2, prefetch=0)
    train(ranks, joined)
    server_of_job.keep()
    mine = given(ranks[0], joined)
    server_of_job.go_back()
    with pytest.raises(NoBatchError):
        ask(ranks[1], joined)
    ranks[0].trained(mine)
    theirs = given(ranks[1], joined)
    assert (theirs.id, groups_of(theirs)) == (mine.id, groups_of(mine))


@pytest.mark.parametrize(
    ("mark", "commit", "knows_epoch"),
    [
        *(("auto", "manual", False), ("auto", "each_batch", False)),
        *(("explicit", "manual", False), ("explicit", "each_batch", False), ("explicit", "manual", True)),
    ],
)
def test_a_rank_is_told_of_a_batch_that_is_named_again_with_other_groups(
    server_of_job: Server, run: str, mark: Any, commit: Any, knows_epoch: bool
) -> None:
    """It has the batch, the server loses the naming and a group, and rank 0 has trained and committed another one.

    knows_epoch: by a record that rank 0 has written between two reads of this rank.
    """
    server, connection = server_of_job, server_of_job.connection
    joined = filled(connection, run, 1, finish=False)
    leader, other = ranks_of(joined, 2, prefetch=0, mark=mark, commit=commit)
    with pytest.raises(NoBatchError):
        leader.next_batch(timeout=0)  # takes the run
    server.keep()
    with producing(connection, run) as producer:
        push_groups(producer, 1, prefix="lost")
    group_all(joined)
    with pytest.raises(NoBatchError):
        leader.next_batch(timeout=0)  # names the batch
    compute_all(joined)
    mine = given(other, joined)
    server.go_back()
    with producing(connection, run) as producer:
        push_groups(producer, 1, prefix="new")
    theirs = given(leader, joined)
    assert (mine.version, groups_of(mine)) == (0, ["g0000", "lost0000"])
    assert (theirs.version, groups_of(theirs)) == (0, ["g0000", "new0000"])
    leader.trained(theirs)
    leader.commit(leader.state_dict())
    if knows_epoch:
        other._progress.epoch = leader.epoch
    for call in (lambda: other.trained(mine), lambda: other.next_batch(timeout=0)):
        with pytest.raises(BatchLostError, match="batch 0, and rank 0 names it again"):
            call()


def test_a_rank_trusts_no_server_that_has_gone_back(server_of_job: Server, run: str) -> None:
    joined = filled(server_of_job.connection, run, 6)
    ranks = ranks_of(joined, 2)
    train(ranks, joined)
    server_of_job.keep()
    server_of_job.restart()
    train(ranks, joined)
    server_of_job.go_back()
    with pytest.raises(
        NoBatchError, match="the server has lost recent writes: waiting for rank 0 to repeat them"
    ):
        ranks[1].next_batch(timeout=0)
    train(ranks, joined)


def test_what_was_begun_after_the_loading_stays_though_the_server_forgot_that(
    server_of_job: Server, run: str
) -> None:
    joined = filled(server_of_job.connection, run, 6)
    (first,) = ranks_of(joined, 1)
    train([first], joined)
    state = save(first)
    train([first], joined)
    server_of_job.keep()
    (queue,) = ranks_of(joined, 1)
    queue.load_state_dict(state)
    rollout = {"rollout_index": 0, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}
    with producing(joined.connection, run) as producer:
        group = producer.begin_group(1, group_id="new")
        server_of_job.go_back()
        group.push([rollout])
    seen = []
    while (batch := ask(queue, joined)) is not None:
        seen += groups_of(batch)
        queue.trained(batch)
    assert "new" in seen
    assert ledger(joined)["dropped"] == {}


@pytest.mark.parametrize("lost", ["nothing", "the end"])
def test_the_end_reaches_the_other_ranks_though_the_server_restarts(
    server_of_job: Server, run: str, lost: str
) -> None:
    """Rank 0 has left its loop, and saves what it trained."""
    joined = filled(server_of_job.connection, run, 4)
    ranks = ranks_of(joined, 2)
    for _ in range(2):
        train(ranks, joined)
    server_of_job.keep()
    assert ask(ranks[0], joined) is None
    (server_of_job.restart if lost == "nothing" else server_of_job.go_back)()
    save(ranks[0])
    assert ask(ranks[1], joined) is None
    assert (ledger(joined)["trained"], problems(joined)) == (8, [])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("restarts", [False, True])
def test_every_rank_goes_on_with_a_run_that_is_opened_again(
    server_of_job: Server, run: str, order: list[int], restarts: bool
) -> None:
    """Also one that asks before rank 0 has: the end that it was told is over."""
    joined = filled(server_of_job.connection, run, 2)
    ranks = ranks_of(joined, 2)
    train(ranks, joined)
    for number in range(2):
        assert [ask(queue, joined) for queue in ranks] == [None, None]
        if restarts:
            server_of_job.restart()
        save(ranks[0])
        with pytest.raises(NoBatchError, match=r"rank 0 has not named batch|waiting for rank 0|no new group"):
            ranks[1].next_batch(timeout=0)
        assert [ask(queue, joined) for queue in ranks] == [None, None]
        with producing(joined.connection, run) as producer:
            push_groups(producer, 2, prefix=f"late{number}-")
            producer.finish()
        group_all(joined)
        with suppress(NoBatchError):
            assert ranks[order[0]].next_batch(timeout=0) is not None
        train(ranks, joined)
    save(ranks[0])
    assert [ask(queue, joined) for queue in ranks] == [None, None]
    assert (ledger(joined)["trained"], problems(joined)) == (12, [])


def test_a_rank_says_what_it_waits_for(server_of_job: Server, run: str) -> None:
    joined = filled(server_of_job.connection, run, 8)
    first, second = ranks_of(joined, 2, "first"), ranks_of(joined, 2, "second")
    with pytest.raises(
        NoBatchError, match=r"\(run \S+, rank 1\): no trainer has the run: waiting for rank 0 of job "
    ):
        first[1].next_batch(timeout=0)
    train(first, joined)
    state = save(first[0])
    with pytest.raises(NoBatchError, match="job first has the run: waiting for rank 0 of job second"):
        second[1].next_batch(timeout=0)
    second[1].load_state_dict(state)
    train(second[:1], joined)
    with pytest.raises(NoBatchError, match="rank 0 has not loaded a state: waiting for its load_state_dict"):
        second[1].next_batch(timeout=0)
    second[0].load_state_dict({**state, "version": 0, "groups": []})
    with pytest.raises(NoBatchError, match="goes on from version 0, the state loaded here has 1"):
        second[1].next_batch(timeout=0)
    second[0].load_state_dict(state)
    train(second, joined)
    second[0].load_state_dict(state)
    with pytest.raises(
        NoBatchError, match="gone back to version 1: waiting for load_state_dict on this rank"
    ):
        second[1].next_batch(timeout=0)
    second[1].load_state_dict(state)
    train(second, joined)


@pytest.mark.parametrize("waits_for", ["rank 0", "the server"])
def test_a_queue_that_is_closed_waits_for_nobody(server_of_job: Server, run: str, waits_for: str) -> None:
    joined = filled(server_of_job.connection, run, 2)
    ranks = ranks_of(joined, 2)
    rank = 1 if waits_for == "rank 0" else 0
    if rank == 0:
        assert ranks[0].epoch
        server_of_job.kill()
    ranks[rank].close()
    state = {"run": run, "version": 0, "groups": []}
    for call in (ranks[rank].next_batch, lambda: ranks[rank].commit(state)):
        with pytest.raises(ServerUnreachableError, match="this queue is closed"):
            call()


def test_a_job_that_goes_back_and_forth(server_of_job: Server, run: str) -> None:
    """Checkpoints older and newer than the server; the ranks load them one after another, in either order."""
    joined = filled(server_of_job.connection, run, 12)
    ranks = ranks_of(joined, 3)
    states, lineage = [], []
    for _ in range(3):
        lineage.append(groups_of(train(ranks, joined)))
        states.append(json.loads(json.dumps(ranks[0].state_dict())))
    ranks[0].commit(states[0])
    for order in ([2, 1, 0], [0, 1, 2]):
        for rank in order:
            ranks[rank].load_state_dict(states[0])
        assert [groups_of(train(ranks, joined)) for _ in range(2)] == lineage[1:]
    server_of_job.keep()
    branch = ranks_of(joined, 2)
    for queue in reversed(branch):
        queue.load_state_dict(states[0])
    for _ in range(3):
        train(branch, joined)
    server_of_job.go_back()
    again = ranks_of(joined, 1)
    again[0].load_state_dict(states[2])
    seen = [*itertools.chain(*lineage)]
    while (batch := ask(again[0], joined)) is not None:
        seen += groups_of(batch)
    save(again[0])
    assert len(seen) == len(set(seen)) == 12
    assert (ledger(joined)["trained"], ledger(joined)["dropped"]) == (24, {})
    assert problems(joined) == []


def test_what_another_branch_has_trained_is_not_counted_for_this_one(server_of_job: Server, run: str) -> None:
    """A checkpoint from before a branch that somebody began at an older one, with the same batch numbers."""
    joined = filled(server_of_job.connection, run, 12)
    (first,) = ranks_of(joined, 1)
    train([first], joined)
    old = save(first)
    weights = [groups_of(train([first], joined)) for _ in range(2)]
    new = save(first)
    (branch,) = ranks_of(joined, 1)
    branch.load_state_dict(old)
    for _ in range(2):
        train([branch], joined)
    assert ledger(joined)["trained"] == 12
    (last,) = ranks_of(joined, 1)
    last.load_state_dict(new)
    seen = [*itertools.chain(*weights)]
    assert ledger(joined)["trained"] == 12, "the branch's batches are in no checkpoint"
    while (batch := ask(last, joined)) is not None:
        seen += groups_of(batch)
    save(last)
    assert len(seen) == len(set(seen)) == 10
    assert ledger(joined)["trained"] == 24
    assert problems(joined) == []


@pytest.mark.parametrize("first", ["trained", "commit", "state_dict", "next_batch"])
@pytest.mark.parametrize("mode", ["manual", "each_batch"])
def test_a_commit_is_repeated_whatever_the_job_does_first(
    server_of_job: Server, run: str, forward: Forward, first: str, mode: str
) -> None:
    """A step is longer than a server takes to have its writes safe, but is restarted before it has."""
    joined = filled(server_of_job.connection, run, 10)
    (queue,) = ranks_of(joined, 1, prefetch=0, commit=mode)
    assert queue.epoch
    server_of_job.keep()
    weights = groups_of(train([queue], joined))
    save(queue)
    batch = given(queue, joined)
    forward(100)
    server_of_job.go_back()
    state = queue.state_dict()
    assert set(weights) <= set(state["groups"])
    if first in ("trained", "commit"):
        if first == "trained":
            queue.trained(batch)
            weights += groups_of(batch)
        for _ in range(2):
            save(queue)
            forward(100)
    if first == "state_dict":
        (queue,) = ranks_of(joined, 1, prefetch=0, commit=mode)
        queue.load_state_dict(state)
    elif first != "trained":
        weights += groups_of(batch)
    while (again := ask(queue, joined)) is not None:
        weights += groups_of(again)
    save(queue)
    assert len(weights) == len(set(weights)) == 10
    assert ledger(joined)["trained"] == 20
    assert problems(joined) == []


def test_a_state_names_what_the_server_may_lose_and_no_more(server_of_job: Server, run: str) -> None:
    joined = filled(server_of_job.connection, run, 8)
    sizes = {}
    for window in (0, 3600):
        (queue,) = ranks_of(joined, 1, durability_window=window)
        for _ in range(2):
            train([queue], joined)
            save(queue)
        if window == 0:
            sizes["before it is seen safe"] = len(queue.state_dict()["groups"])
            with pytest.raises(NoBatchError):
                queue.next_batch(timeout=0, max_groups=100)
        sizes[str(window)] = len(queue.state_dict()["groups"])
    assert sizes == {"before it is seen safe": 2, "0": 0, "3600": 4}


def test_other_ranks_keep_nothing_of_what_rank_0_has_committed(server_of_job: Server, run: str) -> None:
    joined = filled(server_of_job.connection, run, 40)
    ranks = ranks_of(joined, 2, batch_groups=1)
    states = []
    for _ in range(40):
        train(ranks, joined)
        save(ranks[0])
        states.append(ranks[1].state_dict())
    assert max(len(state["groups"]) for state in states) <= 1
    assert len(json.dumps(states[-1])) < 300
    assert states[-1]["version"] == 40
    again = ranks_of(joined, 2, batch_groups=1)
    again[1].load_state_dict(states[-1])
    again[0].load_state_dict(states[-1])
    assert [ask(queue, joined) for queue in again] == [None, None]
    assert ledger(joined)["trained"] == 80


def test_a_rank_hands_out_what_it_has_read_though_the_server_loses_the_record(
    server_of_job: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = filled(server_of_job.connection, run, 1)
    ranks = ranks_of(joined, 2, batch_groups=1)
    first = ask(ranks[0], joined)
    collect = Collector.collect

    def collected(reader: Collector) -> Any:
        batch = collect(reader)
        if batch is not None:
            joined.connection.scripts.delete(joined.keys.home.batches)
        return batch

    monkeypatch.setattr(Collector, "collect", collected)
    second = ask(ranks[1], joined)
    assert first is not None
    assert second is not None
    assert groups_of(second) == groups_of(first)


@pytest.mark.parametrize("lost", ["nothing", "the burial"])
def test_dead_groups_hold_nobody_up(server_of_job: Server, run: str, lost: str) -> None:
    """Groups that are trained and not committed count as done, but those that died are not there at all."""
    joined = filled(server_of_job.connection, run, 4, finish=False)
    (queue,) = ranks_of(joined, 1, batch_groups=4, max_staleness=0)
    scripts: Any = joined.connection.scripts
    for _, fields in scripts.xrange(joined.keys.home.groups, count=2):
        scripts.delete(*(line.split(b" ")[0] for line in fields[b"payloads"].split(b"\n")))
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(joined)
    server_of_job.keep()
    batch = given(queue, joined)
    assert batch.num_trajectories == 4
    (server_of_job.restart if lost == "nothing" else server_of_job.go_back)()
    queue.trained(batch)
    server_of_job.restart()
    state = queue.state_dict()
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    with producing(joined.connection, run) as producer:
        for number in range(4):
            producer.begin_group(1, group_id=f"more{number}", timeout=0)
        with pytest.raises(Exception, match="max_staleness"):
            producer.begin_group(1, timeout=0)
    queue.commit(state)
    assert (ledger(joined)["trained"], ledger(joined)["dead"]) == (4, {"undecodable": 4})
    assert problems(joined, deep=False) == []


def test_moments_go_back_with_the_checkpoint(server_of_job: Server, run: str) -> None:
    """Batches that are taken apart, and named again with others, count once."""
    chain = {"estimator": "grpo", "reward": {"mean": "running", "std": "running"}}

    def count(batch: Batch) -> float:
        record: Any = joined.connection.scripts.hget(joined.keys.home.batches, batch.version)
        return float(json.loads(record)["running"]["count"])

    joined = filled(server_of_job.connection, run, 10)
    (first,) = ranks_of(joined, 1, chain=chain)
    train([first], joined)
    state = save(first)
    for _ in range(2):
        train([first], joined)
    save(first)
    (second,) = ranks_of(joined, 1, chain=chain)
    second.load_state_dict(state)
    assert count(given(second, joined)) == 8, "batches 1 and 2 were committed: their groups are gone"
    scripts: Any = joined.connection.scripts
    newest = scripts.xrevrange(joined.keys.home.groups, count=1)[0][0]
    scripts.xdel(joined.keys.home.groups, newest)
    (third,) = ranks_of(joined, 1, chain=chain)
    third.load_state_dict(state)
    assert [count(given(third, joined)) for _ in range(2)] == [8, 10]


def test_new_groups_are_progress(
    server_of_job: Server, run: str, monkeypatch: pytest.MonkeyPatch, forward: Callable[[float], None]
) -> None:
    """On any rank: as long as they come, there is something to wait for."""
    joined = filled(server_of_job.connection, run, 0, finish=False)
    ranks = ranks_of(joined, 2, batch_groups=7)
    pushed = iter(range(7))
    wait, timeout = loop.wait_for_news, 0.3

    def push(*arguments: Any) -> None:
        """Every wait brings a group, and lasts longer than anybody is patient."""
        for number in itertools.islice(pushed, 1):
            begun_and_pushed(joined, 1, f"group{number}-")
        compute_all(joined)
        wait(*arguments)
        forward(2 * timeout)

    for queue in ranks:
        assert queue.epoch
    monkeypatch.setattr(loop, "wait_for_news", push)
    assert ranks[0].next_batch(timeout=timeout) is not None


# Where the job's id comes from


def test_a_launcher_says_which_job_it_is(
    server_of_job: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = filled(server_of_job.connection, run, 12)

    def ranks() -> list[TrainerQueue]:
        options: Any = {"batch_groups": 2, "commit": "manual", "world_size": 2}
        return [TrainerQueue(joined.connection, run, rank=rank, **options) for rank in range(2)]

    for environment in (
        {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "17"},
        {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"},
    ):
        for name in LAUNCHER:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        started = ranks()
        with pytest.raises(NoBatchError, match="waiting for rank 0 of job"):
            started[1].next_batch(timeout=0)  # though a job of the same launcher has the run
        train(started, joined)
        save(started[0])
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SettingError, match=r"job is not given on rank 1 of 2: pass the same job="):
        ranks()[1].next_batch(timeout=0)
    with pytest.raises(SettingError, match="job is 'a b'"):
        ranks_of(joined, 2, "a b")


def test_queues_of_one_process_after_one_another_are_different_jobs(
    server_of_job: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    joined = filled(server_of_job.connection, run, 8)
    options: Any = {"batch_groups": 2, "commit": "manual", "world_size": 2}
    for _ in range(2):
        ranks = [TrainerQueue(joined.connection, run, rank=rank, **options) for rank in range(2)]
        with pytest.raises(NoBatchError, match="waiting for rank 0"):
            ranks[1].next_batch(timeout=0)
        train(ranks, joined)
        train(ranks, joined)


RANK = """
    import sys
    import torch, torch.distributed
    from streamadv.batch import leader
    from streamadv.trainer.queue import TrainerQueue

    leader.SETTLE_S = 0.0  # a run whose server was replaced ends at once, as in tests of one process
    url, run, store, backend, rank = sys.argv[1:]
    rank = int(rank)
    torch.distributed.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=2)
    queue = TrainerQueue(url, run, rank=rank, world_size=2, batch_groups=2, commit="manual", max_staleness=None)

    def say(what):
        print(what, flush=True)

    while (batch := queue.next_batch()) is not None:
        say(f"{batch.version} {batch.id}")
        if batch.version == 1 and rank == 0:
            say("wait")
        if backend == "gloo":
            torch.distributed.all_reduce(torch.ones(1))
        queue.trained(batch)
        if batch.version == 0 and rank == 1:
            say("wait")
            sys.stdin.readline()
    say("over")
    """


@pytest.mark.parametrize("backend", ["gloo", pytest.param("cuda:gloo", marks=pytest.mark.release)])
@pytest.mark.processes
def test_ranks_of_a_process_group(server_of_job: Server, run: str, tmp_path: Path, backend: str) -> None:
    """They share an id by its store: nothing is broadcast, so a backend without CPU will do as well.

    The server restarts while rank 0 has a batch and waits for the others, who have not asked for it yet.
    """
    joined = filled(server_of_job.connection, run, 6)
    program = textwrap.dedent(RANK)
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    words = [joined.connection.url, run, str(tmp_path / "store"), backend]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words, str(rank)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said: list[list[str]] = [[], []]

    def listen(rank: int, until: str) -> None:
        stdout = processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            said[rank].append(line.strip())
            if said[rank][-1] == until:
                return
        raise AssertionError(f"rank {rank} has ended: {said}")

    try:
        with computing(joined):
            listen(1, "wait")
            listen(0, "wait")
            server_of_job.restart()
            stdin = processes[1].stdin
            assert stdin is not None
            stdin.write("go\n")
            stdin.flush()
            for rank in range(2):
                listen(rank, "over")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    batches = [[line for line in lines if line[0].isdigit()] for lines in said]
    assert batches[0] == batches[1]
    assert len(batches[0]) == 3
