"""Groups end once and rightly, whatever order things come in: examples, and a machine against a model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError
from streamadv.grouping import grouper, housekeeping
from streamadv.producer import Producer
from streamadv.producer.tickets import GroupSpec, Ticket
from streamadv.run import Run
from streamadv.run.manifest import RunSettings
from streamadv.run.packets import parse_members
from streamadv.store.connection import Connection
from streamadv.trajectory.schema import Trajectory
from tests.shares import examples
from tests.support import (
    OneClient,
    batches_read,
    consumer_of,
    ended,
    group_all,
    identities,
    join,
    ledger,
    logged,
    make_overdue,
    now_ms,
    payload_keys,
    problems,
    producing,
    references,
    trajectory,
    unscored,
)

from .pushing import push_together, push_without_payloads


def rewards_of(run: Run, group_id: str = "g") -> list[float | None]:
    return [member.reward for member in references(logged(run)[group_id])]


def test_a_group_completes_with_its_first_usable_members(fake: Connection) -> None:
    with producing(fake, "r", {"redundancy": 2}) as producer:
        run = join(fake, "r")
        producer.push([ended("g", 0, 2, "failed"), trajectory("g", 3, 2), trajectory("g", 1, 2)])
        assert group_all(run) == ["complete"]
    (group,) = logged(run).values()
    assert identities(references(group)) == [("g", 1), ("g", 3)]
    assert (group.size, group.outcome) == (2, "complete")
    assert problems(run) == []


@pytest.mark.parametrize(
    ("minimum", "usable", "outcome"),
    [
        (None, 3, "incomplete"),
        (2, 1, "incomplete"),
        (2, 2, "partial"),
        (2, 3, "partial"),
        (1, 0, "incomplete"),
    ],
)
def test_a_group_short_of_members_follows_the_policy(
    fake: Connection, minimum: int | None, usable: int, outcome: str
) -> None:
    with producing(fake, "r", {"partial_min_usable": minimum}) as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", index, 4) for index in range(usable)])
        producer.push([ended("g", index, 4, "aborted") for index in range(usable, 4)])
        assert group_all(run) == [outcome]
    assert len(logged(run)) == (outcome == "partial")
    assert ledger(run)["queued"] == (usable if outcome == "partial" else 0)
    assert problems(run) == []


@pytest.mark.parametrize(
    ("policy", "rewards", "outcome"),
    [
        ({"zero_variance_filter": True}, [0.5, 0.5], "zero_variance"),
        ({"zero_variance_filter": True}, [0.5, 0.6], "complete"),
        ({}, [0.5, 0.5], "complete"),
        ({"difficulty_low": 0.2}, [0.1, 0.3], "difficulty"),
        ({"difficulty_low": 0.2}, [0.1, 0.4], "complete"),
        ({"difficulty_high": 0.9}, [1.0, 0.8], "difficulty"),
        ({"difficulty_high": 0.9}, [1.0, 0.7], "complete"),
        ({"difficulty_low": 0.0}, [0.0, 0.0], "difficulty"),
        ({"difficulty_high": 0.30000000000000004}, [0.1 + 0.2, 0.1 + 0.2], "difficulty"),
    ],
)
def test_filters_look_at_rewards(
    fake: Connection, policy: dict[str, Any], rewards: list[float], outcome: str
) -> None:
    with producing(fake, "r", policy) as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", index, reward=reward) for index, reward in enumerate(rewards)])
        assert group_all(run) == [outcome]
    assert ledger(run)["dropped"] == ({} if outcome == "complete" else {outcome: 2})
    assert problems(run) == []


NAMED = {"zero_variance_filter": True, "filter_by": "correct"}


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"rewards": {"correct": 1.0}}, "zero_variance"),
        ({"metadata": {"correct": 1}}, "zero_variance"),
        ({"metadata": {"correct": True}, "rewards": {"style": 1.0}}, "zero_variance"),
    ],
)
def test_filters_look_at_what_the_run_names(fake: Connection, fields: dict[str, Any], outcome: str) -> None:
    with producing(fake, "r", NAMED) as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", index, reward=float(index), **fields) for index in range(2)])
        assert group_all(run) == [outcome]
        # equal rewards
        producer.push([trajectory("h", n, reward=0.5, rewards={"correct": float(n)}) for n in range(2)])
        assert group_all(run) == ["complete"]
        with pytest.raises(TrajectoryError, match="correct"):
            producer.push([trajectory("i", 0)])
    assert problems(run) == []


def test_filters_look_at_what_a_score_names(fake: Connection) -> None:
    with producing(fake, "r", NAMED) as producer:
        run = join(fake, "r")
        for group_id, named in (("g", {"correct": 1.0}), ("h", {})):
            producer.push([unscored(group_id, index) for index in range(2)])
            group_all(run)
            for index in range(2):
                producer.score(group_id, index, float(index), rewards=named)
        group_all(run)
        assert ledger(run)["dropped"] == {"zero_variance": 2}
        assert [member.reward for member in references(logged(run)["h"])] == [0.0, 1.0]
    assert problems(run) == []


def test_filters_do_not_look_at_baselines(fake: Connection) -> None:
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        run = join(fake, "r")
        members = [trajectory("g", 0, 3, reward=1.0), trajectory("g", 1, 3, reward=1.0)]
        producer.push([*members, trajectory("g", 2, 3, reward=0.0, role="baseline")])
        assert group_all(run) == ["zero_variance"]
        producer.push([trajectory("h", 0, 1, role="baseline")])
        assert group_all(run) == ["no_train_members"]
    assert problems(run) == []


def test_downtime_of_the_grouper_loses_nothing(fake: Connection) -> None:
    """Pushed before the deadline, taken after it: the group completes."""
    with producing(fake, "r", {"group_deadline_s": 0.001}) as producer:
        run = join(fake, "r")
        for index in range(2):
            producer.push([trajectory("g", index)])
        producer.push([trajectory("h", 0)])
        make_overdue(run, "g", now_ms(run))
        make_overdue(run, "h", now_ms(run))
        consumer = consumer_of(run)
        entries = consumer.read(1)
        housekeeping.Housekeeping(run).round()
        assert grouper.take(run, entries) == []
        housekeeping.Housekeeping(run).round()
        assert ledger(run)["dropped"] == {}, "the second packet still waits"
        assert group_all(run, consumer) == ["complete"]
    assert ledger(run)["dropped"] == {"expired": 1}
    assert problems(run) == []


def test_an_expired_group_may_be_trained_in_part(fake: Connection) -> None:
    with producing(fake, "r", {"partial_min_usable": 1}) as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", 1)])
        producer.push([unscored("h", 0), trajectory("h", 1)])
        producer.push([unscored("i", 0)])
        group_all(run)
        for group_id in "ghi":
            make_overdue(run, group_id)
        group_all(run)
    assert {group_id: group.outcome for group_id, group in logged(run).items()} == {
        "g": "partial",
        "h": "partial",
    }
    assert ledger(run)["dropped"] == {"surplus": 1, "expired": 1}
    assert problems(run) == []


def test_scores_may_come_before_or_after_the_grouper(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        assert producer.score("g", 0, 1.0) == "unknown"
        producer.push([unscored("g", index, 3) for index in range(3)])
        assert producer.score("g", 0, 0.1, {"style": 0.1}) == "scored"
        assert group_all(run) == []
        assert producer.score("g", 3, 0.5) == "unknown"
        assert producer.score("g", 0, 0.9) == "duplicate"
        assert producer.score("g", 1, 0.2) == "scored"
        assert producer.score("g", 2, 0.3) == "scored"
        assert producer.score("g", 2, 0.3) == "duplicate"
        group_all(run)
        assert producer.score("g", 2, 0.3) == "ended"
    assert rewards_of(run) == [0.1, 0.2, 0.3]
    assert references(logged(run)["g"])[0].rewards == {"style": 0.1}
    assert problems(run) == []


@pytest.mark.parametrize("taken_first", [False, True])
def test_a_score_cannot_replace_the_reward_that_came_with_the_push(
    fake: Connection, taken_first: bool
) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", 0, reward=1.0)])
        if taken_first:
            group_all(run)
        producer.score("g", 0, 0.0)
        group_all(run)
        assert producer.score("g", 0, 0.0) == "duplicate"
        producer.push([trajectory("g", 1, reward=2.0)])
        group_all(run)
    assert rewards_of(run) == [1.0, 2.0]


@pytest.mark.parametrize("taken_first", [False, True])
def test_a_score_of_none_ends_the_place(fake: Connection, taken_first: bool) -> None:
    with producing(fake, "r", {"partial_min_usable": 1}) as producer:
        run = join(fake, "r")
        producer.push([unscored("g", 0), trajectory("g", 1)])
        if taken_first:
            group_all(run)
        assert producer.score("g", 0, None) == "scored"
        group_all(run)
    assert logged(run)["g"].outcome == "partial"
    assert ledger(run)["dropped"] == {"unscorable": 1}
    assert problems(run) == []


def test_scores_of_one_group_are_applied_together(fake: Connection) -> None:
    """None of them after those that complete it."""
    with producing(fake, "r", {"redundancy": 2}) as producer:
        run = join(fake, "r")
        producer.push([unscored("g", 0, 3)])
        producer.push([unscored("g", index, 3) for index in range(1, 5)])
        group_all(run)
        for index, reward in enumerate((None, 0.1, 0.2)):
            producer.score("g", index, reward)
        group_all(run)
        assert ledger(run)["dropped"] == {"unscorable": 1}
        assert len(payload_keys(run)) == 1
        assert problems(run) == []
        for index, reward in ((3, 0.3), (4, None)):
            producer.score("g", index, reward)
        group_all(run)
    assert rewards_of(run) == [0.1, 0.2, 0.3]
    assert ledger(run)["dropped"] == {"unscorable": 1, "surplus": 1}
    assert problems(run) == []


def test_a_take_that_is_repeated_changes_nothing(fake: Connection) -> None:
    """The reply was lost, or a grouper that was thought dead wakes up."""
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", index) for index in range(2)])
        entries = consumer_of(run).read(10)
        assert grouper.take(run, entries) == ["complete"]
        before = ledger(run)
        assert grouper.take(run, entries) == []
        assert ledger(run) == before
    assert problems(run) == []


@pytest.mark.parametrize(
    "record", [trajectory("g", 0, 1), ended("g", 0, 1, "failed")], ids=["usable", "failed"]
)
def test_a_packet_that_was_lost_is_not_taken_for_the_one_that_has_its_id(
    fake: Connection, record: Trajectory
) -> None:
    """A server whose clock was set back, and that has lost writes, gives ids a second time."""
    with producing(fake, "r") as producer:
        producer.push([record])
        lost = consumer_of(join(fake, "r")).read(10)
    fake.scripts.flushall()
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.push([trajectory("h", 0, 1)])
        stream = run.keys.home.rollouts
        ((_, fields),) = fake.scripts.xrange(stream)  # type: ignore[misc]
        fake.scripts.delete(stream)
        fake.scripts.xadd(stream, fields, id=lost[0].id)
        found = consumer_of(run).read(10)
        assert grouper.take(run, lost) == []
        assert grouper.take(run, found) == ["complete"]
    assert problems(run) == []


def test_garbage_is_swept_once(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        for number in range(100):
            producer.push([trajectory(f"g{number}", 0)])
        for entries in batches_read(consumer_of(run)):
            grouper.take(run, entries)
        for number in range(100):
            make_overdue(run, f"g{number}")
        while housekeeping.expire(run, run.home):
            pass
        assert fake.scripts.llen(run.keys.home.garbage) == 100
        assert [housekeeping.sweep(run.home) for _ in range(3)] == [64, 36, 0]
    assert not [key for key in fake.scripts.keys("*") if b"payload" in key]
    assert problems(run) == []


# A machine against a model

SIZE = 2
IDS = "abcdef"
KINDS = {
    "usable": lambda g, i: trajectory(g, i, SIZE, reward=0.5),
    "unscored": lambda g, i: unscored(g, i, SIZE),
    "unscorable": lambda g, i: trajectory(g, i, SIZE, reward=None),
    "failed": lambda g, i: ended(g, i, SIZE, "failed"),
}


@dataclass
class Group:
    letter: str = ""  # 'c' completed, 'e' expired, '' open
    pushed: set[int] = field(default_factory=set)
    members: dict[int, bool] = field(default_factory=dict)  # taken and usable: has it a reward?
    ended_places: int = 0
    scores: dict[int, bool] = field(default_factory=dict)  # brought by `score`: is it a number?


def packet_of(entry: Any) -> tuple[str, list[int]]:
    """Group and members of a stream entry."""
    members = parse_members(entry.fields[b"members"])
    return entry.fields[b"group_id"].decode(), [member.rollout_index for member in members]


class Pipeline:
    """push, score, cancel, take, expire and crashes in any order: each trajectory is in one place."""

    def __init__(self, minimum: int | None, slots: int) -> None:
        self.minimum = minimum
        self.slots = slots
        self.connection = OneClient()
        self.producer = Producer(
            self.connection, "r", settings=RunSettings(redundancy=slots - SIZE, partial_min_usable=minimum)
        ).open()
        self.run = join(self.connection, "r")
        self.run.home.call("lay_out", [1])
        self.groups: dict[str, Group] = {}
        self.stream: list[tuple[str, dict[int, str]]] = []  # packets: group, index -> kind
        self.waiting: set[tuple[str, int]] = set()  # registered, and not yet seen in a packet
        self.dropped: Counter[str] = Counter()
        self.logged: dict[str, set[int]] = {}
        self.pushed = 0
        self.zombies: list[Any] = []

    def push(self, group_id: str, records: list[tuple[int, str]]) -> None:
        codes = self.producer.push([KINDS[kind](group_id, index) for index, kind in records]).codes
        group = self.groups.setdefault(group_id, Group())
        kinds: dict[tuple[str, int], str] = {}  # of two records of an index only one counts
        for (index, kind), code in zip(records, codes, strict=True):
            if code != "duplicate":
                assert index not in group.pushed
                self._register(group_id, index, kind, code)
                kinds[group_id, index] = kind
        assert {index for index, _ in records} <= group.pushed
        self._read_stream(kinds)

    def push_together(self, groups: dict[str, dict[int, str]], with_payloads: bool) -> None:
        """One call for several groups, as no client repeats it; `with_payloads` False: the server stood still."""
        records = [
            [KINDS[kind](group_id, index) for index, kind in kinds.items()]
            for group_id, kinds in groups.items()
        ]
        call = push_together if with_payloads else push_without_payloads
        for (group_id, kinds), (state, *codes) in zip(
            groups.items(), call(self.run, *records, slots=self.slots), strict=True
        ):
            assert state == "ok"
            group = self.groups.setdefault(group_id, Group())
            for (index, kind), code in zip(kinds.items(), codes, strict=True):
                if code in ("again", "lost"):
                    assert index not in group.pushed
                    assert not group.letter
                    assert code == "again" or (not with_payloads and kind in ("usable", "unscored"))
                elif code == "duplicate":
                    assert index in group.pushed
                else:
                    assert index not in group.pushed
                    self._register(group_id, index, kind, code)
        self._read_stream({(g, index): kind for g, kinds in groups.items() for index, kind in kinds.items()})

    def _read_stream(self, kinds: dict[tuple[str, int], str]) -> None:
        """The packets that have come: each member that was registered in one of them, in ascending order."""
        entries: Any = self.connection.scripts.xrange(self.run.keys.home.rollouts)
        for _, fields in entries[len(self.stream) :]:
            members = parse_members(fields[b"members"])
            assert len({member.kind for member in members}) == 1 or not fields[b"payload"]
            group_id = fields[b"group_id"].decode()
            slots = [member.rollout_index for member in members]
            self.stream.append((group_id, {slot: kinds[group_id, slot] for slot in slots}))
            for slot in slots:
                self.waiting.remove((group_id, slot))
        assert not self.waiting

    def cancel(self, group_id: str) -> None:
        ticket = Ticket(group_id, 0, SIZE, self.slots, 0, None)
        group = self.groups.setdefault(group_id, Group())
        free = [index for index in range(self.slots) if index not in group.pushed]
        steps = self.producer._logic.pushes.cancel(GroupSpec.of(ticket), 1, range(self.slots))
        try:
            (code,) = self.producer._drive(steps).codes
        except TrajectoryError:
            assert not free
            assert not group.letter
            return
        if group.letter:
            assert code == {"c": "surplus", "e": "late"}[group.letter]
        else:
            self._register(group_id, free[-1], "cancelled", code)
            self._read_stream({(group_id, free[-1]): "cancelled"})

    def _register(self, group_id: str, index: int, kind: str, code: str) -> None:
        group = self.groups[group_id]
        group.pushed.add(index)
        self.pushed += 1
        if not group.letter:
            assert code == "pushed"
            self.waiting.add((group_id, index))
            return
        late = {"c": "surplus", "e": "late"}[group.letter]
        assert code == late
        self.dropped[late if kind in ("usable", "unscored") else kind] += 1

    def score(self, group_id: str, index: int, reward: float | None) -> None:
        code = self.producer.score(group_id, index, reward)
        housekeeping.apply_scores(self.run, self.run.home)
        group = self.groups.get(group_id)
        if group is None:
            assert code == "unknown"
        elif group.letter:
            assert code == "ended"
        elif group.members.get(index) or index in group.scores:
            assert code == "duplicate"
        else:
            assert code == "scored"
            group.scores[index] = reward is not None
            if index in group.members:
                if reward is None:
                    del group.members[index]
                    group.ended_places += 1
                    self.dropped["unscorable"] += 1
                else:
                    group.members[index] = True
                self._try_complete(group_id)

    def take(self, count: int, crash: bool) -> None:
        if not self.stream:
            return
        entries = consumer_of(self.run, lease_s=0).read(count)
        assert list(map(packet_of, entries)) == [
            (group_id, [*kinds]) for group_id, kinds in self.stream[: len(entries)]
        ]
        assert entries
        self.zombies.append(entries)
        if crash:  # read and died: the next one finds them pending
            return
        grouper.take(self.run, entries)
        taken, self.stream = self.stream[: len(entries)], self.stream[len(entries) :]
        for group_id, kinds in taken:
            for index, kind in kinds.items():
                self._take_one(group_id, index, kind)

    def take_again(self) -> None:
        """A zombie repeats what others have done since."""
        if not self.zombies:
            return
        entries = self.zombies.pop(0)
        waiting = [(group_id, [*kinds]) for group_id, kinds in self.stream]
        if not any(packet_of(entry) in waiting for entry in entries):
            assert grouper.take(self.run, entries) == []

    def _take_one(self, group_id: str, index: int, kind: str) -> None:
        group = self.groups[group_id]
        if group.letter:
            late = {"c": "surplus", "e": "late"}[group.letter]
            self.dropped[late if kind in ("usable", "unscored") else kind] += 1
            return
        if kind == "unscored" and index in group.scores:
            kind = "usable" if group.scores[index] else "unscorable"
        if kind in ("usable", "unscored"):
            group.members[index] = kind == "usable"
        else:
            group.ended_places += 1
            self.dropped[kind] += 1
        self._try_complete(group_id)

    def _try_complete(self, group_id: str) -> None:
        group = self.groups[group_id]
        usable = sum(group.members.values())
        if usable >= SIZE:
            self._end(group_id, "complete", "c")
        elif usable + group.ended_places >= self.slots:
            self._end(group_id, "partial" if self.minimum and usable >= self.minimum else "incomplete", "c")

    def _end(self, group_id: str, outcome: str, letter: str) -> None:
        group = self.groups[group_id]
        group.letter = letter
        scored = {index for index, has_reward in group.members.items() if has_reward}
        if outcome in ("complete", "partial"):
            self.logged[group_id] = scored
            self.dropped["surplus"] += len(group.members) - len(scored)
        else:
            self.dropped[outcome] += len(group.members)

    def expire(self, group_id: str, watermark: bool) -> None:
        group = self.groups.get(group_id)
        if group is None or group.letter or not group.pushed:
            return
        make_overdue(self.run, group_id, now_ms(self.run) - 1 if watermark else -(10**15))
        if watermark and self.stream:
            make_overdue(self.run, group_id, now_ms(self.run))
        housekeeping.expire(self.run, self.run.home)
        if watermark and self.stream:
            make_overdue(self.run, group_id, now_ms(self.run) + 10**9)
            return
        usable = sum(group.members.values())
        self._end(group_id, "partial" if self.minimum and usable >= self.minimum else "expired", "e")

    def sweep(self) -> None:
        housekeeping.sweep(self.run.home)

    def check(self) -> None:
        found = ledger(self.run)
        assert found["pushed"] == self.pushed
        assert found["dropped"] == {reason: n for reason, n in self.dropped.items() if n}
        open_members = sum(len(g.members) for g in self.groups.values() if not g.letter)
        on_their_way = sum(len(kinds) for _, kinds in self.stream)
        assert found["queued"] == on_their_way + open_members + sum(map(len, self.logged.values()))
        kept = {g: {m.rollout_index for m in references(group)} for g, group in logged(self.run).items()}
        assert kept == self.logged
        assert problems(self.run) == []


def random_step(draw: random.Random, slots: int) -> tuple[Any, ...]:
    group_id, index = draw.choice(IDS), draw.randrange(slots)

    def records(count: int) -> list[tuple[int, str]]:
        kinds = ("usable", "usable", "usable", *KINDS)
        return [(draw.randrange(slots), draw.choice(kinds)) for _ in range(count)]

    together = {group_id: dict(records(3)) for group_id in draw.sample(IDS, 3)}
    steps: list[tuple[Any, ...]] = [
        ("push", group_id, records(draw.randint(1, 3))),
        ("push_together", together, draw.random() < 0.8),
        ("take", draw.choice((1, 3, 9)), draw.random() < 0.2),
        ("take_again",),
        ("cancel", group_id),
        ("score", group_id, index, draw.choice((0.25, None))),
        ("expire", group_id, draw.random() < 0.5),
        ("sweep",),
    ]
    (step,) = draw.choices(steps, weights=(8, 3, 7, 2, 1, 3, 1, 1))
    return step


@settings(max_examples=examples(10), deadline=None)
@given(
    seed=st.integers(0, 2**32), minimum=st.sampled_from([None, 1]), slots=st.sampled_from([SIZE, SIZE + 1])
)
@pytest.mark.slow
def test_each_trajectory_is_in_one_place(seed: int, minimum: int | None, slots: int) -> None:
    draw, pipeline = random.Random(seed), Pipeline(minimum, slots)
    try:
        for _ in range(60):
            name, *arguments = random_step(draw, slots)
            getattr(pipeline, name)(*arguments)
            pipeline.check()
    finally:
        pipeline.producer.close()
