"""The whole pipeline against a model: any order of steps and crashes, one terminal state for each trajectory.

Hypothesis chooses what happens next on a real server: pushes, scores, deliveries that are finished, dropped in
mid-flight or finished twice, batches named and trained on, checkpoints saved and committed or lost. The model is
the trainer's checkpoint: what is in it is trained, once, and the ledger says the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamadv.advantage import poison, prepare, publish
from streamadv.batch.recovery import set_trainer
from streamadv.errors import (
    EpochFencedError,
    GroupEndedError,
    NoBatchError,
    RunEndedError,
    StarvedError,
    TrajectoryError,
)
from streamadv.grouping import grouper, housekeeping
from streamadv.producer import Producer
from streamadv.run.consumer import ADVANTAGE, GROUPER
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer import supply
from streamadv.trainer.microbatch import Batch
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    CPU,
    compute_all,
    consumer_of,
    group_all,
    identities,
    join,
    ledger,
    make_overdue,
    problems,
    trajectory,
    unscored,
)

SIZE = 2
GROUPS = ["a", "b", "c", "w0", "w3", "eval"]
runs = itertools.count()

groups = st.sampled_from(GROUPS)


def role_of(group_id: str) -> str:
    return "eval" if group_id == "eval" else "train"


indices = st.integers(0, SIZE - 1)
fates = st.sampled_from(["finished", "finished twice", "crashed"])


class Lifecycle(RuleBasedStateMachine):
    """One run. `weights` are the identities trained on since the start of the trainer's checkpoints."""

    url: str

    @initialize()
    def start(self) -> None:
        self.name = f"model-{next(runs)}"
        self.connection = Connection(self.url)
        self.producer = Producer(self.connection, self.name).open()
        self.run = join(self.connection, self.name)
        self.fed = 0
        self.weights: list[tuple[str, int]] = []
        self.zombies: list[tuple[TrainerQueue, Batch | None]] = []
        self.batch: Batch | None = None
        self.queue = self.new_queue()
        self.checkpoint: tuple[list[tuple[str, int]], dict[str, Any]] = ([], self.queue.state_dict())
        self.committed: list[tuple[str, int]] = []

    def new_queue(self) -> TrainerQueue:
        return TrainerQueue(
            self.connection, self.name, batch_groups=2, commit="manual", max_staleness=None, prefetch=1
        )

    # Producers

    @rule(count=st.integers(1, 4))
    def feed(self, count: int) -> None:
        """Groups as they should be."""
        for number in range(self.fed, self.fed + count):
            self.producer.push([trajectory(f"w{number}", index, SIZE) for index in range(SIZE)])
        self.fed += count

    @rule(kind=st.sampled_from(["begin", "push", "score", "cancel", "expire", "finish"]), data=st.data())
    def disturb(self, kind: str, data: st.DataObject) -> None:
        """Anything else a producer may do, in any order, also with groups that have ended."""
        group_id, index = data.draw(groups), data.draw(indices)
        if kind == "begin":
            with suppress(GroupEndedError):
                self.producer.begin_group(SIZE, group_id=group_id, role=role_of(group_id), timeout=0)
        elif kind == "push":
            members = data.draw(st.lists(st.tuples(indices, st.booleans()), min_size=1, max_size=3))
            makes = {True: trajectory, False: unscored}
            self.producer.push(
                [
                    makes[has_reward](group_id, place, SIZE, role=role_of(group_id))
                    for place, has_reward in members
                ]
            )
        elif kind == "score":
            self.producer.score(group_id, index, data.draw(st.sampled_from([0.0, 1.0, None])))
        elif kind == "cancel":
            with suppress(GroupEndedError, TrajectoryError):  # ended, or no place left
                self.producer.begin_group(SIZE, group_id=group_id, role=role_of(group_id), timeout=0).cancel(
                    1
                )
        elif kind == "expire":
            make_overdue(self.run, group_id)
            housekeeping.Housekeeping(self.run).round()
        else:
            self.producer.finish()

    # Stages

    def deliver(self, stage: str, count: int) -> list[Any]:
        """To a new consumer every time: what the one before did not finish is reclaimed at once."""
        return consumer_of(self.run, stage, lease_s=0).read(count)

    @rule(fate=fates)
    def group(self, fate: str) -> None:
        entries = self.deliver(GROUPER, 5)
        if entries and fate != "crashed":
            for _ in range(2 if fate == "finished twice" else 1):
                grouper.take(self.run, entries)

    @rule(fate=fates)
    def compute(self, fate: str) -> None:
        entries = self.deliver(ADVANTAGE, 2)
        for entry in entries if fate != "crashed" else []:
            prepared = prepare.prepare_or_discard(self.run, entry)
            if prepared is not None:
                computed = poison.compute_safely(self.run, prepared, CPU)
                for _ in range(2 if fate == "finished twice" else 1):
                    publish.publish(self.run, computed)

    # Trainer

    @rule()
    def train(self) -> None:
        with suppress(NoBatchError):
            self.batch = self.queue.next_batch(timeout=0)
            if self.batch is not None:
                self.weights += identities(self.batch.references)

    @rule(reaches_the_server=st.booleans())
    def save(self, reaches_the_server: bool) -> None:
        """What was delivered last may be in the weights only if the queue was told so."""
        if self.batch is not None and self.batch.id in {
            b.record.id for b in self.queue._sessions.current().batches.values()
        }:
            self.queue.trained(self.batch)
        self.checkpoint = (list(self.weights), self.queue.state_dict())
        if reaches_the_server:
            self.queue.commit(self.checkpoint[1])
            self.committed = self.checkpoint[0]

    @rule()
    def crash(self) -> None:
        self.zombies.append((self.queue, self.batch))
        self.batch = None
        self.queue = self.new_queue()
        self.weights = list(self.checkpoint[0])
        self.queue.load_state_dict(self.checkpoint[1])
        self.committed = self.checkpoint[0]

    @rule()
    def finish_and_open_again(self) -> None:
        """What is queued, and the batch in hand, are there for the next session."""
        self.queue.finish()
        with pytest.raises(RunEndedError):
            self.producer.begin_group(SIZE, timeout=0)
        assert self.queue.next_batch(timeout=0) is None
        self.queue.open()

    @precondition(lambda self: self.zombies)
    @rule()
    def a_zombie_goes_on(self) -> None:
        queue, batch = self.zombies[-1]
        if batch is not None and batch.version >= queue._sessions.current().version:
            with pytest.raises(EpochFencedError):
                queue.trained(batch)
        joined = queue._sessions.current()
        with pytest.raises(EpochFencedError):
            set_trainer(joined.run, joined._settings, joined.progress)
        with suppress(EpochFencedError, NoBatchError):
            queue.next_batch(timeout=0)

    # What always holds

    @invariant()
    def the_ledger_adds_up(self) -> None:
        assert problems(self.run) == []
        assert ledger(self.run)["trained"] == len(self.committed)

    def drained_batch(self) -> Batch | None:
        """The next batch after doing all that can be done; what crashed consumers held is reclaimed at once."""
        for _ in range(3):
            group_all(self.run, consumer_of(self.run, GROUPER, lease_s=0))
            try:
                return self.queue.next_batch(timeout=0)
            except StarvedError:
                return None  # the run has ended, and all of its groups were dropped
            except NoBatchError:
                compute_all(self.run, consumer_of(self.run, ADVANTAGE, lease_s=0))
        raise AssertionError("no batch comes, and the run does not end")

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        for group_id in [*GROUPS, *(f"w{number}" for number in range(self.fed))]:
            make_overdue(self.run, group_id)
        self.producer.finish()
        while (batch := self.drained_batch()) is not None:
            self.weights += identities(batch.references)
        self.queue.commit(self.queue.state_dict())
        found = ledger(self.run)
        assert len(self.weights) == len(set(self.weights)), "trained twice"
        assert "eval" not in {group_id for group_id, _ in self.weights}
        assert found["trained"] == len(self.weights)
        assert found["queued"] == found["in_flight"] == 0
        assert found["pushed"] == found["trained"] + sum(found["dropped"].values())
        housekeeping.Housekeeping(self.run).round()
        assert problems(self.run) == []
        left = {
            key.decode().rpartition("}:")[2] for key in self.connection.scripts.scan_iter(f"*{{{self.name}*")
        }
        assert not {key for key in left if key.startswith(("payload:", "output:", "group:"))}
        self.producer.close()
        self.connection.close()


class ReadingAhead(Lifecycle):
    """A trainer that holds up to three batches and marks them itself; only then are they in the weights."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.in_hand: list[Batch] = []

    def new_queue(self) -> TrainerQueue:
        return TrainerQueue(
            *(self.connection, self.name),
            **{
                "batch_groups": 2,
                "commit": "manual",
                "max_staleness": None,
                "prefetch": 2,
                "mark": "explicit",
            },  # type: ignore[arg-type]
        )

    @rule()
    def train(self) -> None:
        with suppress(NoBatchError):
            batch = self.queue.next_batch(timeout=0)
            self.in_hand += [batch] if batch is not None else []

    @precondition(lambda self: self.in_hand)
    @rule()
    def mark(self) -> None:
        batch = self.in_hand.pop(0)
        self.weights += identities(batch.references)
        self.queue.trained(batch)

    @rule()
    def crash(self) -> None:
        self.batch = self.in_hand[0] if self.in_hand else None  # the zombie's
        super().crash()
        self.in_hand = []

    def drained_batch(self) -> Batch | None:
        while self.in_hand:
            self.mark()
        batch = super().drained_batch()
        if batch is not None:
            self.queue.trained(batch)
        return batch


@pytest.fixture(scope="module")
def model_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", [Lifecycle, ReadingAhead])
def test_any_order_of_steps_and_crashes(
    model_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, machine: type[Lifecycle]
) -> None:
    # Nobody reads why there is no batch yet, and reading the status for it takes most of a step.
    monkeypatch.setattr(supply, "why_no_batch", lambda run, limits: "")
    Lifecycle.url = model_server.url
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
