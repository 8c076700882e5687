"""Status: the ledger is checked against what is really there, so that a wrong counter cannot hide."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from streamadv import Prompts
from streamadv.run import Run
from streamadv.run.run import delete_run
from streamadv.status import read_shards, read_status, shard
from streamadv.status.audit import StoredData, audit, walk
from streamadv.status.model import Ledger, Places
from streamadv.store.connection import Connection
from streamadv.store.keys import ShardKeys
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    deep_problems,
    group_all,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    trajectory,
    unscored,
)

COUNTED = (
    "pushed", "trained", "rollouts", "rollouts_packets", "scoring", "scoring_packets", "open", "grouped",
    "in_flight", "groups_open", "groups_logged",
)  # fmt: skip


@pytest.fixture
def busy(fake: Connection) -> Run:
    """A run with something everywhere: stream, scorer, open group, log, named batch, results, garbage."""
    with producing(fake, "r", {"scorers": ("s",), "redundancy": 1}) as producer:
        run = join(fake, "r")
        push_groups(producer, 5, model_version=0)
        producer.push([trajectory("open", 0)])
        producer.push([trajectory("v", 0, 1)])
        assert (
            next_batch(TrainerQueue(fake, "r", batch_groups=2, prefetch=0, commit="each_batch"), run)
            is not None
        )
        producer.push([unscored("scored", 0)])
        producer.push([trajectory("late", 0)])
    return run


def test_the_status_says_where_everything_is(busy: Run) -> None:
    status = read_status(busy)
    assert status.balanced
    assert status.problems == []
    assert status.ledger == Ledger(pushed=14, trained=0, dropped={}, dead={}, queued=10, in_flight=4)
    assert status.places == Places(scoring=1, rollouts=1, open=1, grouped=7)
    assert (status.groups.open, status.groups.logged) == (3, 6)
    assert status.streams["rollouts"].length == 1
    assert status.trainer.batches == 1
    assert status.staleness.max == 0
    assert deep_problems(busy) == []


def test_what_is_trained_on_and_not_committed_is_not_stale(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = TrainerQueue(fake, "r", batch_groups=2, prefetch=0)
        for version in range(3):
            push_groups(producer, 2, prefix=f"v{version}-", model_version=version)
            batch = next_batch(queue, run)
            assert batch is not None
            queue.trained(batch)
        assert read_status(run).staleness.max is None
        push_groups(producer, 2, prefix="now-", model_version=2)
        group_all(run)
        assert read_status(run).staleness.max == 1


@pytest.mark.parametrize("counter", COUNTED)
@pytest.mark.parametrize("by", [1, -1])
def test_a_wrong_counter_is_found_at_once(busy: Run, counter: str, by: int) -> None:
    busy.connection.scripts.hincrby(busy.keys.home.ledger, counter, by)
    assert problems(busy, deep=False) != []
    assert not read_status(busy).balanced


@pytest.mark.parametrize(("one", "two"), [("open", "grouped"), ("rollouts", "open"), ("grouped", "trained")])
def test_two_wrong_counters_that_balance_are_found_by_walking(busy: Run, one: str, two: str) -> None:
    busy.connection.scripts.hincrby(busy.keys.home.ledger, one, -1)
    busy.connection.scripts.hincrby(busy.keys.home.ledger, two, 1)
    assert problems(busy) != []


def test_orphans_and_missing_payloads_are_found(busy: Run) -> None:
    keys, scripts = busy.keys.home, busy.connection.scripts
    scripts.hset(keys.payload("stray"), "header", "x")
    (problem,) = deep_problems(busy)
    assert problem.endswith("payload:stray belongs to nothing (orphan)")
    scripts.delete(keys.payload("stray"))
    scripts.hset(keys.group("stray"), "slots", ".")
    assert "group:stray belongs to nothing" in deep_problems(busy)[0]
    scripts.delete(keys.group("stray"))
    victim = next(key for key in scripts.scan_iter("*:payload:*"))
    scripts.delete(victim)
    assert deep_problems(busy) == [f"shard 0: key {victim.decode()} is referred to and missing"]


def test_differences_of_a_run_at_work_may_be_none(busy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = busy.keys.home
    busy.connection.scripts.set(keys.payload("9-9"), "x")
    assert len(audit(busy).problems) == 1
    walked = walk

    def walk_beside_a_producer(run: Run, keys: ShardKeys) -> StoredData:
        found = walked(run, keys)
        run.connection.scripts.hincrby(keys.ledger, "outcome:complete", 1)
        return found

    monkeypatch.setattr("streamadv.status.audit.walk", walk_beside_a_producer)
    assert "the run was at work meanwhile" in audit(busy).problems[-1]


def test_wrong_bytes_are_found(busy: Run) -> None:
    busy.connection.scripts.hincrby(busy.keys.home.ledger, "live_bytes", 5)
    assert "live_bytes" in deep_problems(busy)[0]


def test_bytes_of_nothing_are_found_at_once(fake: Connection) -> None:
    run = join(fake, "r")
    fake.scripts.hincrby(run.keys.home.ledger, "live_bytes", 5)
    assert problems(run, deep=False) == ["ledger live_bytes is 5, nothing is stored"]


@pytest.mark.parametrize(("rollouts", "is_right"), [(1, False), (2, True), (128, True), (129, False)])
def test_trajectories_fit_into_their_packets(fake: Connection, rollouts: int, is_right: bool) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 2, size=1)
        run = join(fake, "r")
    fake.scripts.hset(run.keys.home.ledger, mapping={"rollouts": rollouts, "pushed": rollouts})
    found = problems(run, deep=False)
    assert found == ([] if is_right else [f"ledger rollouts is {rollouts}, in 2 packets"])


# Packets, by walking


def first_payload(run: Run) -> bytes:
    """The payload of the packet in the rollouts stream."""
    ((_, fields),) = run.connection.scripts.xrange(run.keys.home.rollouts)
    return bytes(fields[b"payload"])


@pytest.mark.parametrize("kind", ["payload", "output"])
def test_a_payload_or_output_that_goes_by_itself_is_no_orphan(busy: Run, kind: str) -> None:
    """What was sent with a script, which has not run yet, or never will."""
    scripts, key = busy.connection.scripts, getattr(busy.keys.home, kind)("sent")
    scripts.hset(key, "header", "x")
    assert deep_problems(busy) == [f"shard 0: key {key} belongs to nothing (orphan)"]
    scripts.pexpire(key, 60_000)
    assert deep_problems(busy) == []


def test_a_payload_in_use_that_goes_by_itself_is_found(busy: Run) -> None:
    key = first_payload(busy)
    busy.connection.scripts.pexpire(key, 60_000)
    (problem,) = deep_problems(busy)
    assert f"key {key.decode()} is referred to and will be gone in " in problem


def test_a_payload_that_belongs_to_two_packets_is_found(busy: Run) -> None:
    keys, scripts = busy.keys.home, busy.connection.scripts
    key = first_payload(busy)
    scripts.rpush(keys.garbage, b"%b %d" % (key, 1))
    assert any(
        f"{key.decode()} belongs to entry" in problem and problem.endswith("and to the garbage list")
        for problem in deep_problems(busy)
    )


def spoil_open_group(run: Run, old: bytes, new: bytes) -> None:
    """Replace a part of the packet in the hash of the group `open`."""
    key, scripts = run.keys.home.group("open"), run.connection.scripts
    ((name, packet),) = (item for item in scripts.hgetall(key).items() if b"}:payload:" in item[0])
    assert packet.count(old) == 1
    scripts.hset(key, name, packet.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b" 1\n0 usable", b" 11\n0 usable", "it has 1 members, its mask 11"),
        (b" 1\n0 usable", b" 0\n0 usable", "its packets count the members [], its slot map [0]"),
        (b"\n0 usable", b"\n1 usable", "its table has the members [0], its text [1]"),
        (b"\n0 usable", b"\n0 useful", "useful 0.0 train\\n', needs 1..64 lines"),
        (b'{"columns"', b'{"column s"', "member table"),
    ],
)
def test_packets_of_open_groups_are_compared_with_their_slot_map(
    busy: Run, old: bytes, new: bytes, text: str
) -> None:
    spoil_open_group(busy, old, new)
    assert any(text in problem for problem in deep_problems(busy)), deep_problems(busy)


def test_entries_whose_table_tells_of_others_are_found(busy: Run) -> None:
    keys, scripts = busy.keys.home, busy.connection.scripts
    ((entry, fields),) = scripts.xrange(keys.rollouts)
    scripts.xdel(keys.rollouts, entry)
    for changed, text in (
        ({b"members": b"1 usable 0.0 train\n"}, "its table has the members [0], its text [1]"),
        ({b"table": b"nonsense"}, "member table"),
        ({b"bytes": b"7"}, "member table: size is more than the payload has"),
    ):
        entry = scripts.xadd(keys.rollouts, {**fields, **changed})
        assert any(text in problem for problem in deep_problems(busy)), deep_problems(busy)
        scripts.xdel(keys.rollouts, entry)


def test_trajectories_that_do_not_count_are_told(fake: Connection) -> None:
    """Their bytes stay with their packet: three of four were pushed, of which the group needs two."""
    with producing(fake, "r", {"redundancy": 1}) as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", index) for index in range(3)])
        group_all(run)
    found = audit(run)
    assert (found.problems, found.payloads, found.uncounted) == ([], 1, 1)
    assert str(found) == "1 payloads stored, with 1 trajectories that do not count"
    assert ledger(run)["dropped"] == {"surplus": 1}


def test_deleting_a_run_leaves_nothing(busy: Run) -> None:
    group_all(busy)
    assert delete_run(busy.connection, busy.name) > 10
    assert busy.connection.scripts.keys("*") in ([], [b"streamadv:runs"])


def test_a_run_made_anew_plays_all_prompts_again(fake: Connection) -> None:
    for _ in range(2):
        with producing(fake, "r") as producer:
            groups = producer.prompts(Prompts(["a", "b", "c"], shuffle=None), size=1)
            assert [prompt for prompt, _ in islice(groups, 2)] == ["a", "b"]
            groups.close()
        delete_run(fake, "r")
        assert fake.scripts.keys("*") in ([], [b"streamadv:runs"])


def test_producers_that_are_silent_are_lost(fake: Connection) -> None:
    with producing(fake, "r"):
        run = join(fake, "r")
        name = next(iter(fake.scripts.hkeys(run.keys.home.producers)))
        assert [p.state for p in read_status(run).producers] == ["open"]
        fake.scripts.hset(run.keys.home.producers, name, "1000 open")
        assert [p.state for p in read_status(run).producers] == ["lost"]


@pytest.mark.parametrize("tokens", [5, 50, 700, 3000])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_status_tells_what_admission_reserves(fake: Connection, tokens: int, count: int) -> None:
    """It reads without scripts what admission computes in one."""
    with producing(fake, "r") as producer:
        push_groups(producer, count, size=4, tokens=tokens)
        run = join(fake, "r")
        group_all(run)
        open_groups = [producer.begin_group(3) for _ in range(2)]
        each = read_status(run).place_bytes
        key = run.keys.home.group(open_groups[-1].group_id)
        head: Any = fake.scripts.hget(key, "head")
        assert head.split(b" ")[2] == str(each).encode()
        assert read_status(run).bytes.reserved == 2 * 3 * each


@pytest.mark.parametrize("name", ["live_bytes", "dead_bytes"])
def test_bytes_that_no_server_holds_are_a_problem(fake: Connection, name: str) -> None:
    """They keep producers waiting for room."""
    run = join(fake, "r")
    fake.scripts.hincrby(run.keys.home.ledger, name, 1 << 60)
    (problem,) = read_status(run).problems
    assert f"{name} is {1 << 60}" in problem


def paths(value: object, above: str = "") -> Iterator[str]:
    """Every key of a JSON object, with those above it."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield f"{above}{name}"
            yield from paths(item, f"{above}{name}.")


def test_the_json_has_the_keys_that_scripts_read(busy: Run) -> None:
    json = read_status(busy).to_json()
    stream = (
        "length",
        "pending",
        "lag",
        "consumers",
        "oldest_age_s",
        "alive",
        "workers",
        "ended",
    )
    assert list(paths(json)) == [
        *("run", "shards", "ledger", "ledger.pushed", "ledger.trained", "ledger.dropped", "ledger.dead"),
        *("ledger.queued", "ledger.in_flight", "balanced", "problems"),
        *("places", "places.scoring", "places.rollouts", "places.open", "places.grouped"),
        *("duplicates", "malformed", "groups", "groups.open", "groups.logged", "groups.abandoned"),
        *("groups.remembered", "groups.outcomes", "groups.outcomes.complete", "groups.short"),
        *(f"groups.short.{name}" for name in ("groups", "ended", "trajectories", "usable")),
        *("groups.since_batch", "groups.lack"),
        *(f"groups.lack.{name}" for name in ("groups", "places", "rollouts", "scores")),
        *("groups.lack.groups_without_rollouts", "groups.lack.groups_without_scores"),
        "groups.lack.groups_missing",
        *(f"groups.lack.groups_missing.{extent}" for extent in ("none", "one", "some", "all")),
        *("groups.lack.groups_older", "groups.lack.oldest_s"),
        *(
            "bytes",
            "bytes.live",
            "bytes.reserved",
            "bytes.dead",
            "bytes.kept",
            "place_bytes",
            "garbage",
            "results",
        ),
        "streams",
        *(
            path
            for name in ("rollouts", "work", "scoring:s")
            for path in (f"streams.{name}", *(f"streams.{name}.{field}" for field in stream))
        ),
        *("trainer", "trainer.epoch", "trainer.version", "trainer.committed", "trainer.batches"),
        *(
            f"trainer.{name}"
            for name in (
                "finished",
                "state",
                "silent_s",
                "world_size",
                "ranks_alive",
                "batch",
                "batch_s",
                "job",
            )
        ),
        *("staleness", "staleness.mean", "staleness.max", "producers", "admission", "admission.max_bytes"),
        *(
            f"admission.{name}"
            for name in ("full", "paced", "unarchived", "groups_ahead", "groups_limit", "batch_groups")
        ),
        *("evaluations", "prompts", "server", "server.refuses_writes", "quiet_s", "failing_chain"),
    ]
    assert json["balanced"] is True
    with producing(busy.connection, "r"):
        (producer,) = read_status(busy).to_json()["producers"]
    assert list(producer) == ["name", "state", "silent_s", "rollouts", "turn_s"]


def test_shards_that_are_read_together_are_those_read_alone(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with producing(fake, "r", {"shards": 20}) as producer:
        push_groups(producer, 30)
        run = join(fake, "r")
        group_all(run)
        together = read_shards(run)
        monkeypatch.setattr(shard, "SHARDS_AT_ONCE", 1)
        alone = read_shards(run)
    assert [each.counters for each in together] == [each.counters for each in alone]
    assert [each.groups_logged for each in together] == [each.groups_logged for each in alone]
    assert sum(each.groups_logged for each in together) == 30
    assert read_status(run).balanced
