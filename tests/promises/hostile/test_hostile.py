"""Garbage in every stream and hash of a run: healthy groups arrive, garbage is removed with a reason, nobody stops."""

from __future__ import annotations

import json
import logging
import queue as queue_module
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamadv.cli import main
from streamadv.errors import GroupEndedError, StreamadvError
from streamadv.grouping.housekeeping import Housekeeping
from streamadv.grouping.scorer import Scorer
from streamadv.grouping.scoring_streams import UnscoredTrajectory
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.run.consumer import GROUPER, PENDING_PAGE
from streamadv.run.dead_letters import list_dead, list_malformed, purge, requeue, show_dead
from streamadv.status import read_status
from streamadv.status.causes import reasons_of
from streamadv.status.exported import samples
from streamadv.store.connection import Connection
from streamadv.store.keys import RUNS, EntryKeys
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    compute_all,
    consumer_of,
    deep_problems,
    delivered_batch,
    group_all,
    identities,
    join,
    ledger,
    make_overdue,
    next_batch,
    now_ms,
    problems,
    producing,
    push_groups,
    pushed_run,
    threads,
    trajectory,
    unscored,
    working,
)

JUNK: list[dict[Any, Any]] = [
    {"junk": "1"},
    {b"\xff\xfe": b"\x00\x80"},
    {"group_id": "g0000"},
    {"group_id": b"\xff", "index": "0"},
    {"work": "{"},
    {"work": "[" * 5000},
    {"batch": "0-abc", "header": "{}", "output": "", "output_bytes": "x"},
    {"batch": b"\xff", "header": b"\xff", "output": b"\xff", "output_bytes": "1"},
]


def packet(**changes: Any) -> dict[str, Any]:
    """A packet of the rollouts stream that looks right, but for what it speaks of."""
    fields = {"group_id": "g0000", "payload": "{r:0:0}:payload:none", "bytes": 99, "epoch": 0}
    return {**fields, "members": "0 usable 1.0 train\n", "table": "", **changes}


PACKETS: list[dict[str, Any]] = [
    packet(),
    packet(members="-1 usable 1.0 train\n"),
    packet(members="9999 usable 1.0 train\n"),
    packet(members="99999999999999999999 usable 1.0 train\n"),
    packet(members="true usable 1.0 train\n"),
    packet(members="0 exploded 1.0 train\n"),
    packet(members="0 usable nan train\n"),
    packet(members="0 usable 1e999 train\n"),
    packet(members="0 usable 1-2 train\n"),
    packet(members="0 usable 1.0 \x00\n"),
    packet(members="0 usable 1.0 train\n0 usable 1.0 train\n"),
    packet(members="1 usable 1.0 train\n0 usable 1.0 train\n"),
    packet(members="0 usable 1.0 train"),
    packet(members=""),
    packet(members="".join(f"{index} usable 1.0 train\n" for index in range(65))),
    packet(members=b"\xff"),
    packet(bytes=-5),
    packet(bytes="1e3"),
    packet(bytes=1 << 40),
    packet(bytes=0),
    packet(payload=""),
    packet(payload="", bytes=0),
    packet(payload="{r:0:0}:ledger"),
    packet(payload="other"),
    packet(epoch="x"),
    packet(epoch=-1),
    packet(group_id="no such group"),
    packet(group_id="a" * 100_000),
    packet(group_id="\ud800".encode("utf-8", "surrogatepass")),
    packet(members="1 usable 1.0 train\n", table=b"[" * 10_000),
]


def inject(run: Run, stream: Callable[[Any], str], entries: list[dict[Any, Any]]) -> int:
    for keys in run.keys.shards:
        for fields in entries:
            run.connection.scripts.xadd(stream(keys), fields)
    return len(entries) * len(run.keys.shards)


def halves(trajectories: Sequence[UnscoredTrajectory]) -> list[float]:
    return [0.5 * trajectory.rollout_index for trajectory in trajectories]


@pytest.mark.parametrize("shards", [1, 2])
def test_garbage_in_every_stream_while_everything_runs(redis_url: str, shards: int) -> None:
    """The stages run as they do in processes of their own; every healthy group is trained on."""
    healthy = {f"g{number:04d}" for number in range(12)}
    with producing(Connection(redis_url), "r", {"shards": shards, "scorers": ["judge"]}) as producer:
        run = join(redis_url, "r")
        places: dict[str, Callable[[Any], str]] = {
            "rollouts": lambda keys: keys.rollouts,
            "scoring": lambda keys: keys.scoring("judge"),
            "groups": lambda keys: keys.groups,
            "work": lambda keys: keys.work,
            "results": lambda keys: keys.results,
        }
        sent: Counter[str] = Counter()

        def garbage() -> None:
            for place, stream in places.items():
                sent[place] += inject(
                    run, stream, JUNK + (PACKETS if place in ("rollouts", "scoring") else [])
                )

        garbage()
        judge = Scorer(redis_url, "r", "judge")
        queue = TrainerQueue(
            redis_url, "r", batch_groups=4, chain={"estimator": "reinforce"}, commit="each_batch"
        )
        trained: set[str] = set()
        with working(run, lambda stop: judge.run(halves, stop)):
            for number, group_id in enumerate(sorted(healthy)):
                make = unscored if number % 2 else trajectory
                producer.push([make(group_id, index, 2) for index in range(2)])
                if number in (3, 8):
                    garbage()
            producer.finish()
            for batch in queue:
                trained |= {reference.group_id for reference in batch.references}
            drained = threading.Event()
            while run.connection.scripts.xlen(run.keys.shards[shards - 1].work) and not drained.wait(0.05):
                pass
        assert trained == healthy
    counts = ledger(run)
    assert counts["trained"] == 24
    assert (counts["pushed"], counts["dead"], counts["dropped"]) == (24, {}, {})
    removed = read_status(run).malformed
    assert removed >= sent["rollouts"] + sent["scoring"] + sent["groups"]
    # Forged packets that look right are counted as they move between the streams, and not when they are removed.
    assert [p for p in problems(run) if "ledger rollouts" not in p and "ledger scoring" not in p] == []
    dead = list(list_dead(run))
    assert {item.group_id.partition("/")[0] for item in dead} >= {
        "rollouts",
        "scoring:judge",
        "groups",
        "results",
    }
    assert all("\n" not in item.detail and item.detail for item in dead)


@pytest.mark.parametrize(
    "change",
    [{"slots": "many"}, {"head": ""}, {"head": "train 2 x 1 0 0 "}, {"head": "train 2 9 1 0 x "}],
    ids=str,
)
def test_a_producer_is_told_of_a_group_that_somebody_wrote_into(
    redis_url: str, run: str, change: dict[str, str]
) -> None:
    connection = Connection(redis_url)
    with producing(connection, run) as producer:
        group = producer.begin_group(2, group_id="g")
        joined = join(connection, run)
        connection.scripts.hset(joined.keys.home.group("g"), mapping=change)
        with pytest.raises(GroupEndedError, match="group g is not what was opened"):
            group.push([{"rollout_index": 0, "input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}])
        with pytest.raises(GroupEndedError, match="group g is not what was opened"):
            producer.begin_group(2, group_id="g")
    assert ledger(joined)["pushed"] == 0
    assert not [key for key in connection.scripts.keys("*") if b":payload:" in key]


@pytest.fixture
def logged(redis_url: str, run: str) -> Run:
    """A run with four groups in the log."""
    joined = pushed_run(redis_url, run, 4, finish=True)
    group_all(joined)
    return joined


def payload_of(run: Run, group_id: str) -> str:
    for _, fields in run.connection.scripts.xrange(run.keys.home.groups):
        if fields[b"group_id"].decode() == group_id:
            return str(fields[b"payloads"].decode().split(" ")[0])
    raise AssertionError(group_id)


def header_with(run: Run, key: str, **changes: Any) -> str:
    text: Any = run.connection.scripts.hget(key, "header")
    return json.dumps({**json.loads(text), **changes})


SPOILT: dict[str, Callable[[Run, str], object]] = {
    "gone": lambda run, key: run.connection.scripts.delete(key),
    "a string": lambda run, key: [run.connection.scripts.delete(key), run.connection.scripts.set(key, "x")],
    "a list": lambda run, key: [run.connection.scripts.delete(key), run.connection.scripts.rpush(key, "x")],
    "no header": lambda run, key: run.connection.scripts.hdel(key, "header"),
    "truncated header": lambda run, key: run.connection.scripts.hset(key, "header", b'{"group_id": "g'),
    "deep header": lambda run, key: run.connection.scripts.hset(key, "header", b"[" * 100_000),
    "binary header": lambda run, key: run.connection.scripts.hset(key, "header", b"\xff\x00\xfe"),
    "no column": lambda run, key: run.connection.scripts.hdel(key, "input_ids"),
    "short column": lambda run, key: run.connection.scripts.hset(key, "input_ids", b"123"),
    "long column": lambda run, key: run.connection.scripts.hset(key, "input_ids", bytes(100_000)),
    "a mask of sevens": lambda run, key: run.connection.scripts.hset(key, "response_mask", b"\x07" * 10),
    "another mask": lambda run, key: run.connection.scripts.hset(key, "response_mask", b"\x01" * 10),
    "NaN": lambda run, key: run.connection.scripts.hset(key, "rollout_log_probs", b"\xff" * 40),
    "a header of three members": lambda run, key: run.connection.scripts.hset(
        key, "header", header_with(run, key, members=[{}] * 3)
    ),
    "a header without a size": lambda run, key: run.connection.scripts.hset(
        key, "header", header_with(run, key, group_size=None)
    ),
    "agents of other rows": lambda run, key: run.connection.scripts.hset(
        key, "header", header_with(run, key, members=[{"agents": ["a", "b"]}, {}])
    ),
}


@pytest.mark.parametrize("chain", ["grpo", {"estimator": "reinforce"}], ids=["grpo", "reinforce"])
@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_payload_is_a_dead_letter_with_a_reason(logged: Run, what: str, chain: Any) -> None:
    """Workers of GRPO read no columns, so there the trainer finds it."""
    SPOILT[what](logged, payload_of(logged, "g0002"))
    queue = TrainerQueue(logged.connection, logged.name, batch_groups=4, chain=chain, commit="each_batch")
    batch = delivered_batch(queue, logged)
    assert {each.group_id for each in batch.references} == {"g0000", "g0001", "g0003"}
    assert queue.next_batch(timeout=0) is None
    assert (ledger(logged)["trained"], ledger(logged)["dead"]) == (6, {"undecodable": 2})
    assert problems(logged, deep=False) == []
    (dead,) = list_dead(logged)
    assert (dead.group_id, dead.reason, dead.trajectories) == ("g0002", "undecodable", 2)
    assert dead.detail


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_payload_stops_none_of_several_ranks(logged: Run, what: str) -> None:
    """The rank that has the packet leaves its trajectories out."""
    SPOILT[what](logged, payload_of(logged, "g0002"))
    options: Any = {"world_size": 2, "job": "first", "batch_groups": 4, "commit": "each_batch"}
    first, second = (TrainerQueue(logged.connection, logged.name, rank=rank, **options) for rank in range(2))
    parts = [next_batch(queue, logged) for queue in (first, second)]
    assert all(part is not None for part in parts)
    trained = sorted(
        (item.reference.group_id, item.reference.rollout_index)
        for part in parts
        if part is not None
        for item in part.delivered
    )
    healthy = {(f"g{number:04d}", index) for number in range(4) for index in range(2)} - {
        ("g0002", 0),
        ("g0002", 1),
    }
    assert trained == sorted(healthy)
    assert first.next_batch(timeout=0) is None
    assert second.next_batch(timeout=0) is None
    assert (ledger(logged)["trained"], ledger(logged)["dead"]) == (6, {"undecodable": 2})
    assert problems(logged, deep=False) == []
    (dead,) = list_dead(logged)
    assert (dead.group_id, dead.trajectories, dead.emptied) == ("g0002", 2, True)
    assert dead.detail.startswith("rollout 0: ")


def test_a_foreign_field_of_a_payload_is_left_alone(logged: Run) -> None:
    logged.connection.scripts.hset(
        payload_of(logged, "g0002"), mapping={b"\xff\xfe": b"x", "junk": b"y" * 1000}
    )
    batch = delivered_batch(
        TrainerQueue(logged.connection, logged.name, batch_groups=4, commit="each_batch"), logged
    )
    assert batch.num_trajectories == 8


def test_copies_of_genuine_entries_change_nothing(redis_url: str, run: str) -> None:
    """Each hand-off happens once: copies are removed, and no group is trained on twice."""
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 4, finish=True)
    keys, scripts = joined.keys.home, connection.scripts

    def copy(stream: str) -> None:
        for _, fields in scripts.xrange(stream):
            scripts.xadd(stream, fields)

    copy(keys.rollouts)
    group_all(joined)
    assert read_status(joined).malformed == 4
    queue = TrainerQueue(
        connection, run, batch_groups=4, chain={"estimator": "reinforce"}, commit="each_batch"
    )
    with pytest.raises(StreamadvError, match="no new group"):
        queue.next_batch(timeout=0)
    copy(keys.work)
    compute_all(joined)
    copy(keys.results)
    seen: Counter[str] = Counter()
    for batch in queue:
        seen.update(reference.group_id for reference in batch.references)
        compute_all(joined)
    assert seen == {f"g{number:04d}": 2 for number in range(4)}
    assert ledger(joined)["trained"] == 8
    assert problems(joined) == []


@pytest.mark.parametrize(
    "change",
    [
        {"slots": "many"},
        {"slots": ".p?"},
        {"head": "train 3"},
        {"head": "train -1 9 1 0 0 "},
        {"head": "train 0 9 1 0 0 "},
        {"head": "train 3 x 1 0 0 "},
        {"head": f"train 3 9 {'9' * 400} 0 0 "},
        {"head": "train 3 9 1 x 0 "},
        {"head": "train 3 9 1 0 x "},
    ],
    ids=str,
)
def test_a_group_whose_hash_is_broken_ends(redis_url: str, run: str, change: dict[str, str]) -> None:
    connection = Connection(redis_url)
    with producing(connection, run) as producer:
        producer.push([trajectory("broken", 0, 3)])
        joined = join(connection, run)
        group_all(joined)
        connection.scripts.hset(joined.keys.home.group("broken"), mapping=change)
        make_overdue(joined, "broken")
        producer.push([trajectory("whole", index, 2) for index in range(2)])
        group_all(joined)
        producer.finish()
    batch = delivered_batch(TrainerQueue(connection, run, batch_groups=4, commit="each_batch"), joined)
    assert {each.group_id for each in batch.references} == {"whole"}
    counts = ledger(joined)
    assert counts["dead"] == {"malformed": 1}
    assert (counts["pushed"], counts["queued"]) == (3, 0)
    assert [p for p in problems(joined, deep=False) if "reserved" not in p] == []


def test_a_packet_that_somebody_wrote_over_costs_no_other(redis_url: str, run: str) -> None:
    connection = Connection(redis_url)
    with producing(connection, run) as producer:
        for index in range(2):
            producer.push([trajectory("g", index, 3)])
        joined = join(connection, run)
        group_all(joined)
        group: dict[bytes, bytes] = connection.scripts.hgetall(joined.keys.home.group("g"))  # type: ignore[assignment]
        first = next(field for field, text in group.items() if b"\n0 usable " in text)
        connection.scripts.hset(joined.keys.home.group("g"), mapping={first: b"junk", b"junk": b"1"})
        producer.push([trajectory("g", 2, 3)])
        assert group_all(joined) == ["complete"]
        producer.finish()
    batch = delivered_batch(TrainerQueue(connection, run, batch_groups=4, commit="each_batch"), joined)
    assert identities(batch.references) == [("g", 1), ("g", 2)]


def test_garbage_in_hashes_sets_and_lists(logged: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields and members that nobody of the run wrote, in every key of a run that is not a stream."""
    keys, scripts = logged.keys.home, logged.connection.scripts
    hashes = [
        keys.applied,
        keys.owners,
        keys.ledger,
        keys.trainer,
        keys.ended,
        keys.ended_before,
        keys.attempts,
    ]
    for key in [*hashes, keys.session, keys.batches, keys.producers]:
        for value in (b"junk", b"\xff\x00", b"1 2", b"{}"):
            scripts.hset(key, b"junk " + value, value)
            scripts.hset(key, value, value)
    scripts.hset(keys.batches, "7", b'{"k": 7}')
    scripts.zadd(keys.open, {"nobody": 0, b"\xff": 1, "later": 1e18})
    scripts.hset(keys.group("nobody"), "junk", "1")
    scripts.rpush(keys.garbage, b"junk", b"\xff 12", f"{keys.ledger} 5", b"x -1")
    scripts.zadd(keys.dead, {b"\xff": 1, "nothing": 2, "odd": 3})
    scripts.hset(keys.dead_group("odd"), mapping={"reason": "x", "detail": "y", "count": "z", "bytes": "-"})
    scripts.hset(keys.attempts, "g0001", "many")
    group_all(logged)
    queue = TrainerQueue(logged.connection, logged.name, batch_groups=4, commit="each_batch")
    batch = delivered_batch(queue, logged)
    assert batch.num_trajectories == 8
    assert queue.next_batch(timeout=0) is None
    assert ledger(logged)["trained"] == 8
    assert scripts.zcard(keys.open) == scripts.llen(keys.garbage) == scripts.hlen(keys.batches) == 0
    assert scripts.exists(keys.ledger)
    assert not scripts.exists(keys.group("nobody"))
    assert problems(logged, deep=False) == []
    capsys.readouterr()
    where = ["--redis", logged.connection.url, "--run", logged.name]
    for command in (
        ["status", "--check"],
        ["status", "--json"],
        ["dead", "list"],
        ["dead", "list", "--json"],
    ):
        assert main([*command, *where]) == 0
    assert "removed" not in capsys.readouterr().err


def test_items_of_lists_that_are_no_text_are_removed(redis_url: str, run: str) -> None:
    """They look like items: a slot of a group, a payload and its bytes."""
    with Connection(redis_url) as connection:
        joined = join(connection, run)
        keys, scripts = joined.keys.home, connection.scripts
        scripts.rpush(keys.scored, b"0 \xff")
        scripts.rpush(keys.garbage, keys.payload("").encode() + b"\xff 12")
        Housekeeping(joined).round()
        assert scripts.llen(keys.scored) == scripts.llen(keys.garbage) == 0
        assert {note.detail for _, note in list_malformed(joined.home, 0)} == {
            "no slot of a group",
            "no payload and its bytes",
        }


def test_ever_so_many_foreign_items_are_removed_beside_the_work(redis_url: str, run: str) -> None:
    """Scores and producers are looked at by groupers, which have packets to take meanwhile."""
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        keys, scripts = joined.keys.home, joined.connection.scripts
        producer.push([unscored("g", index, 2) for index in range(2)])
        group_all(joined)
        scripts.rpush(keys.scored, *(f"junk {number}" for number in range(1500)))
        scripts.hset(keys.producers, mapping={f"junk{number}": "junk" for number in range(1500)})
        assert [producer.score("g", index, float(index)) for index in range(2)] == ["scored", "scored"]
        housekeeping, left = Housekeeping(joined), list[tuple[int, int]]()
        while not left or any(left[-1]):
            housekeeping.round()
            left.append((scripts.llen(keys.scored), scripts.hlen(keys.producers) - 1))
        assert left == [(1502 - 1024, 500), (0, 0)]
        assert scripts.xlen(keys.groups) == 1


def test_what_is_noted_of_a_removed_item_is_bounded(redis_url: str, run: str) -> None:
    joined = join(redis_url, run)
    keys, scripts = joined.keys.home, joined.connection.scripts
    scripts.zadd(keys.open, {b"\xff" * 1_000_000: 1})
    scripts.rpush(keys.scored, b"x" * 1_000_000)
    scripts.hset(keys.producers, b"p" * 1_000_000, b"y" * 1_000_000)
    scripts.xadd(keys.rollouts, {b"f" * 1_000_000: b"z" * 1_000_000})
    group_all(joined)
    notes = scripts.xrange(keys.malformed)
    assert len(notes) == 4
    assert all(sum(map(len, fields.values())) < 4000 for _, fields in notes)
    assert all(len(dead.group_id) <= 400 for dead in list_dead(joined))


def test_removed_items_are_shown_and_purged_and_cannot_be_requeued(
    logged: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    logged.connection.scripts.xadd(logged.keys.home.rollouts, {"junk": "1"})
    group_all(logged)
    (item,) = list_dead(logged)
    assert item.group_id.startswith("rollouts/")
    assert (item.reason, item.trajectories, item.detail) == ("malformed", 0, "group_id is missing")
    assert "junk" in show_dead(logged, item.group_id).text
    with pytest.raises(StreamadvError, match="is no group"):
        requeue(logged, item.group_id)
    where = ["--redis", logged.connection.url, "--run", logged.name]
    assert main(["dead", "requeue", "--all", *where]) == 0
    purge(logged, item.group_id)
    assert list(list_dead(logged)) == []
    assert read_status(logged).malformed == 1
    assert problems(logged) == []


CODES = "\x1b[31m\x1b]0;title\x07\r\n  ledger balanced\u202e\u2028\x9b2J"


def test_what_others_wrote_cannot_move_the_cursor_or_forge_a_line(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Producer names, fields of the ledger and the manifest, group ids, data sources, runs."""
    with Producer(redis_url, run, name=f"me{CODES}") as producer:
        joined = join(redis_url, run)
        keys, scripts = joined.keys.home, joined.connection.scripts
        scripts.hset(keys.producers, f"you{CODES}", "1000 open")
        for field in ("pushed", "dropped:", "dead:", "outcome:", "scoring:"):
            scripts.hincrby(keys.ledger, f"{field}{CODES}", 7)
        scripts.hset(EntryKeys(run).manifest, f"column.{CODES}", "x")
        scripts.hset(EntryKeys(run).manifest, "dead_bytes", CODES)
        scripts.hset(RUNS, CODES, "1")
        scripts.hset(RUNS, b"\xff" + CODES.encode(), CODES)
        scripts.zadd(keys.open, {f"late{CODES}": 1})
        scripts.xadd(keys.rollouts, {"group_id": CODES})
        scripts.xadd(keys.groups, {"group_id": CODES, "data_source": CODES})
        push_groups(producer, 1, data_source=f"d{CODES}")
        capsys.readouterr()
        for words in (
            ["status"],
            ["status", "--check", "--deep"],
            ["status", "--json"],
            ["dead", "list"],
            ["dead", "list", "--json"],
            ["dead", "show", CODES],
            ["dead", "purge", CODES],
            ["runs", "show"],
            ["runs", "list"],
            ["runs", "list", "--json"],
        ):
            main([*words, "--redis", redis_url, "--run", run])
            group_all(joined)
            told = capsys.readouterr()
            for text in (told.out, told.err):
                assert [char for char in text if not char.isprintable() and char != "\n"] == [], words
            assert "\n  ledger balanced" not in told.out, words


NAMES: dict[Any, Any] = {
    b"\xff\xfe": b"1",
    "": "1",
    "a b": "1",
    "x" * 10_000: "1",
    "gone": "1700000000000",
    "when": "soon",
    "late": "9" * 40,
    "../..": b"\xff",
}


def test_bad_names_on_the_list_of_runs(redis_url: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    joined = join(redis_url, run)
    joined.connection.scripts.hset(RUNS, mapping=NAMES)
    assert main(["runs", "list", "--redis", redis_url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(NAMES) + 1
    assert [line for line in lines if line.split()[0] == run]
    assert main(["runs", "list", "--json", "--redis", redis_url]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["run"] for each in found if each["problem"] is None] == [run]


@pytest.mark.parametrize("place", ["open", "dead"])
def test_members_that_are_no_text_are_named_by_the_deep_check(
    redis_url: str, run: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = join(redis_url, run)
    joined.connection.scripts.zadd(getattr(joined.keys.home, place), {b"\xff\xfe": 1e15})
    where = ["--redis", redis_url, "--run", run]
    assert main(["status", "--check", "--deep", *where]) == 1
    assert f"{place} has the member" in capsys.readouterr().out
    assert main(["runs", "delete", *where]) == 0


LAST_IDS = ["18446744073709551615-18446744073709551615", "18446744073709551615-18446744073709551613"]
#: An entry with more fields than Lua can unpack.
MANY_FIELDS: dict[Any, Any] = {f"f{number}": "x" for number in range(4100)}


@pytest.mark.parametrize("last_id", LAST_IDS, ids=["the last", "two before it"])
@pytest.mark.parametrize("place", ["rollouts", "scoring:judge"])
def test_a_stream_that_has_had_its_last_id_is_emptied_and_waits_for_an_operator(
    redis_url: str, run: str, place: str, last_id: str
) -> None:
    """What was acknowledged is trained on; pushes wait, and go on once the empty stream is deleted."""
    with producing(redis_url, run, {"scorers": ["judge"]}) as producer:
        joined = join(redis_url, run)
        keys, scripts = joined.keys.home, joined.connection.scripts
        stream = keys.rollouts if place == "rollouts" else keys.scoring("judge")
        scripts.xadd(stream, MANY_FIELDS)
        push_groups(producer, 2, prefix="early")
        producer.push([unscored("waits", index, 2) for index in range(2)])
        scripts.xadd(stream, {"junk": "1"}, id=last_id)
        reasons: list[str] = []

        def operate(stop: threading.Event) -> None:
            while not stop.wait(0.05) and not reasons:
                said = {reason.name: reason.line(run) for reason in reasons_of(read_status(joined))}
                if stream in said.get("stream_end", "") and not scripts.xlen(stream):
                    reasons.append(said["stream_end"])
                    scripts.delete(stream)

        judge = Scorer(redis_url, run, "judge")
        trained: set[str] = set()
        queue = TrainerQueue(redis_url, run, batch_groups=4, commit="each_batch")
        with working(joined, lambda stop: judge.run(halves, stop), operate):
            for number in range(6):
                make = unscored if number % 2 else trajectory
                records = [make(f"late{number}", index, 2) for index in range(2)]
                assert set(producer.push(records).codes) <= {"pushed", "duplicate"}
            producer.finish()
            for batch in queue:
                trained |= {reference.group_id for reference in batch.references}
    assert trained == {"early0000", "early0001", "waits", *(f"late{number}" for number in range(6))}
    assert ledger(joined)["trained"] == 18
    assert problems(joined) == []
    assert read_status(joined).malformed == 2
    assert len(reasons) == 1
    assert "redis-cli DEL" in reasons[0]


def test_groupers_empty_a_stream_that_takes_no_more_though_packets_of_ended_groups_are_to_join_it(
    redis_url: str, run: str
) -> None:
    with producing(redis_url, run, {"scorers": ["judge"]}) as producer:
        producer.push([unscored("over", index, 2) for index in range(2)])
        joined = join(redis_url, run)
        keys, scripts = joined.keys.home, joined.connection.scripts
        push_groups(producer, 3)
        make_overdue(joined, "over")
        group_all(joined)
        scripts.xadd(keys.rollouts, {"junk": "1"}, id=LAST_IDS[0])
        producer.push([unscored("waits", 0, 2)])
        scripts.delete(keys.group("waits"))
        group_all(joined)
        assert scripts.xlen(keys.rollouts) == 0
        assert scripts.xlen(keys.scoring("judge")) == 1
        assert scripts.xlen(keys.groups) == 3
        scripts.delete(keys.rollouts)
        group_all(joined)
        assert scripts.xlen(keys.scoring("judge")) == 0


def test_a_push_to_a_stream_that_takes_no_more_is_refused_with_the_name_of_the_stream(
    redis_url: str, run: str
) -> None:
    with producing(redis_url, run, {"redundancy": 1}) as producer:
        group = producer.begin_group(2, group_id="g")
        joined = join(redis_url, run)
        keys = joined.keys.home
        joined.connection.scripts.xadd(keys.rollouts, {"junk": "1"}, id=LAST_IDS[0])
        said: queue_module.Queue[str] = queue_module.Queue()
        handler = logging.Handler()
        handler.emit = lambda record: said.put(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("streamadv").addHandler(handler)
        try:
            with threads(lambda stop: group.cancel(1)):
                while "[stream_end]" not in (text := said.get(timeout=30)):
                    pass
                assert f"{keys.rollouts} takes no more entries" in text
                group_all(joined)
                joined.connection.scripts.delete(keys.rollouts)
        finally:
            logging.getLogger("streamadv").removeHandler(handler)
    assert ledger(joined)["pushed"] == 1


@pytest.mark.parametrize("ms", [2**64 - 1, 2**53, 4 * 10**12], ids=["last", "2^53", "in a hundred years"])
def test_ids_ahead_of_every_clock_neither_stop_a_stream_nor_hide_that_nothing_moves(
    redis_url: str, run: str, ms: int
) -> None:
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        joined.connection.scripts.xadd(joined.keys.home.rollouts, {"junk": "1"}, id=f"{ms}-0")
        push_groups(producer, 2)
        status = read_status(joined)
        assert [reason.name for reason in reasons_of(status)] == ["no_grouper"]
        assert status.quiet_s is None
        group_all(joined)
        producer.finish()
        assert delivered_batch(TrainerQueue(redis_url, run, batch_groups=2), joined).num_trajectories == 4


def test_a_page_of_entries_may_end_with_the_last_id(redis_url: str, run: str) -> None:
    """Of what is pending at a consumer, and of what `status --check --deep` reads."""
    joined = join(redis_url, run)
    scripts, stream = joined.connection.scripts, joined.keys.home.rollouts
    group_all(joined)
    pipe = scripts.pipeline(transaction=False)
    for number in range(PENDING_PAGE - 1):
        pipe.xadd(stream, {"junk": "1"}, id=f"1-{number + 1}")
    pipe.xadd(stream, {"junk": "1"}, id=LAST_IDS[0])
    pipe.execute()
    assert len(deep_problems(joined)) >= PENDING_PAGE
    scripts.xreadgroup(GROUPER, "dead", {stream: ">"}, PENDING_PAGE)
    consumer = consumer_of(joined, lease_s=0.0)
    while scripts.xlen(stream):  # the first look at what is pending begins its lease
        group_all(joined, consumer)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize(
    "names",
    [
        ["pushed", "rollouts", "open", "grouped", "groups_open", "groups_logged", "in_flight", "trained"],
        ["outcome:complete", "dropped:surplus", "dropped:late", "duplicates", "malformed", "dead:malformed"],
        ["shards"],
    ],
    ids=lambda names: names[0],
)
def test_counters_at_the_end_of_their_range_stop_nobody(
    redis_url: str, run: str, value: int, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with producing(redis_url, run) as producer:
        push_groups(producer, 1, prefix="early")
        joined = join(redis_url, run)
        for name in names:
            there = int(joined.connection.scripts.hget(joined.keys.home.ledger, name) or 0)  # type: ignore[arg-type]
            joined.connection.scripts.hincrby(
                joined.keys.home.ledger, name, value - there if value > 0 else value
            )
        push_groups(producer, 3)
        push_groups(producer, 1)
        joined.connection.scripts.xadd(joined.keys.home.rollouts, {"junk": "1"})
        queue = TrainerQueue(redis_url, run, batch_groups=4, commit="each_batch")
        batch = delivered_batch(queue, joined)
        assert {each.group_id for each in batch.references} == {"early0000", "g0000", "g0001", "g0002"}
        queue.trained(batch)
        queue.commit(queue.state_dict())
    capsys.readouterr()
    code = main(["status", "--check", "--redis", redis_url, "--run", run])
    assert code == (0 if names == ["shards"] else 1)
    assert joined.connection.scripts.xlen(joined.keys.home.groups) == 0


def test_names_that_a_producer_writes_into_the_ledger_are_counted_as_other(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures, labels and what is stored of a batch stay as many as they were, however many names there are."""
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        keys, scripts = joined.keys.home, joined.connection.scripts
        push_groups(producer, 2)
        group_all(joined)

        def figures() -> dict[tuple[str, ...], float]:
            return {(name, *labels): value for name, labels, value in samples(read_status(joined))}

        before = figures()
        pipe = scripts.pipeline(transaction=False)
        for number in range(2000):
            for kind in ("dropped", "dead", "outcome", "other", f"x{number}"):
                pipe.hincrby(keys.ledger, f"{kind}:{number}{'x' * 100}", 1)
            pipe.hincrby(keys.ledger, f"negative{number}", -1)
        pipe.execute()
        named = {
            ("dropped_trajectories_total", "other"): 2000,
            ("dead_trajectories", "other"): 2000,
        }
        after = figures()
        assert {name: after[name] for name in after.keys() - before.keys()} == named
        assert read_status(joined).problems == ["shard 0: pushed is 4, accounted for are 4004"]
        assert not [name for name in joined.counters() if "xxx" in name or "negative" in name]
        queue = TrainerQueue(redis_url, run, batch_groups=2)
        assert delivered_batch(queue, joined).num_trajectories == 4
        noted = scripts.hget(keys.trainer, "ended_before_batch")
        assert noted == b"complete=2"
    capsys.readouterr()
    assert main(["status", "--json", "--redis", redis_url, "--run", run]) == 0
    assert len(capsys.readouterr().out) < 10_000


def test_a_run_has_no_more_scorers_than_a_shard_has_streams_for(redis_url: str, run: str) -> None:
    """A producer may write this setting if nobody has given it."""
    joined = join(redis_url, run)
    names = [f"s{number}" for number in range(1000)]
    joined.connection.scripts.hsetnx(EntryKeys(run).manifest, "scorers", json.dumps(names))
    joined.refresh()
    assert joined.manifest.scorers == ()
    assert [line for line in joined.manifest.ignored if "scorers" in line]


def test_sizes_that_nobody_can_have_pushed_keep_nobody_out(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        push_groups(producer, 8)
        joined = join(redis_url, run)
        forged = {"h99999": 10**6, "u" + "9" * 300: 1, "h" + "9" * 300: 1}
        joined.connection.scripts.hset(joined.keys.home.sizes, mapping=forged)
        assert len(producer.begin_group(2, timeout=0)) == 2


@pytest.mark.parametrize("shards", [1, 2])
def test_foreign_groups_with_far_deadlines_do_not_keep_a_run_from_ending(
    redis_url: str, run: str, shards: int
) -> None:
    with producing(redis_url, run, {"shards": shards}) as producer:
        push_groups(producer, 4)
        producer.finish()
        joined = join(redis_url, run)
        scripts = joined.connection.scripts
        for keys in joined.keys.shards:
            for number, fields in enumerate(({"junk": "1"}, {"0": "p"}, {"usable": "1", "score:0": "{}"})):
                scripts.zadd(keys.open, {f"far{number}": 1e18})
                scripts.hset(keys.group(f"far{number}"), mapping=fields)
            scripts.zadd(keys.open, {"text": 1e18, "none": float("inf")})
            scripts.set(keys.group("text"), "x")
        queue = TrainerQueue(redis_url, run, batch_groups=4, commit="each_batch")
        assert next_batch(queue, joined) is not None
        group_all(joined)
        assert next_batch(queue, joined) is None
    assert not [key for keys in joined.keys.shards for key in scripts.keys(keys.group("*"))]


def test_members_of_open_without_a_group_do_not_wait_for_their_deadline(redis_url: str, run: str) -> None:
    """Until they are removed they count in pacing, and keep producers from beginning groups."""
    with producing(redis_url, run) as producer:
        producer.push([trajectory("genuine", 0, 2)])
        joined = join(redis_url, run)
        keys, scripts = joined.keys.home, joined.connection.scripts
        in_an_hour = now_ms(joined) + 3_600_000
        scripts.zadd(keys.open, {f"nobody{number}": in_an_hour for number in range(250)})
        housekeeping = Housekeeping(joined)
        for _ in range(100):
            housekeeping.round()
            if scripts.zcard(keys.open) == 1:
                break
        assert scripts.zrange(keys.open, 0, -1) == [b"genuine"]
        assert problems(joined) == []


def test_a_group_with_a_deadline_that_nobody_may_give_ends(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        producer.begin_group(2, group_id="g")
        joined = join(redis_url, run)
        joined.connection.scripts.zadd(joined.keys.home.open, {"g": 1e18})
        group_all(joined)
        assert joined.connection.scripts.zcard(joined.keys.home.open) == 0
        assert problems(joined) == []


@pytest.mark.parametrize("size", [10**14, 2**31, 2**63])
def test_garbage_that_names_more_bytes_than_a_payload_may_have_is_removed(
    redis_url: str, run: str, size: int
) -> None:
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        joined = join(redis_url, run)
        keys, scripts = joined.keys.home, joined.connection.scripts
        group_all(joined)
        for number in range(5):
            scripts.rpush(keys.garbage, f"{keys.payload(str(number))} {size}")
        group_all(joined)
        assert scripts.llen(keys.garbage) == 0
    assert problems(joined) == []
