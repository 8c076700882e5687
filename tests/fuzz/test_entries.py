"""Entries of streams: each is what it says, or there is one line that says why not."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from pydantic_core import from_json

from streamadv.advantage.results import parse_result
from streamadv.errors import NoBatchError, StreamadvError, WireError
from streamadv.grouping.groups_log import parse_groups
from streamadv.run.dead_letters import list_dead
from streamadv.run.packets import read_packet
from streamadv.status import read_status
from streamadv.status.audit import audit
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.members import HAS_REWARD
from tests.support import (
    OneClient,
    compute_all,
    group_all,
    join,
    logged,
    make_overdue,
    members_problem,
    producing,
    push_groups,
    trajectory,
    unscored,
)

from .examples import stored
from .mutations import (
    HOSTILE,
    TOKENS,
    as_json,
    cases,
    chance_of,
    damaged_bytes,
    damaged_value,
    one_line_error,
    pick,
)


def damaged_entry(fields: dict[bytes, bytes], chance: random.Random) -> dict[bytes, bytes]:
    """Fields damaged in bytes or, where they hold JSON, in structure; removed, renamed, replaced, added."""
    fields = dict(fields)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(list(fields) or [b"junk"])
        value = fields.get(name, b"")
        match chance.randrange(7):
            case 0:
                fields.pop(name, None)
            case 1 if fields:
                fields[chance.choice([name + b"s", b"\xff", b""])] = fields.pop(name)
            case 2:
                fields[name] = chance.choice(TOKENS)
            case 3:
                fields[name] = str(chance.choice(HOSTILE)).encode(errors="surrogatepass")
            case 4 if value[:1] in (b"{", b"["):
                try:
                    fields[name] = as_json(damaged_value(from_json(value), chance))
                except ValueError:
                    fields[name] = b"{"
            case 5:
                fields[chance.choice([b"junk", b"\x00", b"advantages", b"scores"])] = chance.randbytes(12)
            case _:
                fields[name] = damaged_bytes(value, chance)
    return fields


def test_packets() -> None:
    run, entries = stored()
    for number in cases("packets"):
        fields = damaged_entry(
            pick(entries["rollouts"], chance_of("packets", number)), chance_of("p", number)
        )
        one_line_error(lambda fields=fields: read_packet(run, 0, fields), WireError, fields)


def test_groups_log() -> None:
    """A group that is accepted has members whose payloads are its own, in order, with a reward each."""
    run, entries = stored()
    for number in cases("groups log"):
        chance = chance_of("groups log", number)
        fields = damaged_entry(pick(entries["groups"], chance), chance)

        def call(fields: dict[bytes, bytes] = fields) -> None:
            [group] = parse_groups(run.keys, [(0, b"1-1", fields)])
            if group.problem is not None:
                assert not group.members
                raise WireError(group.problem)
            assert [(packet.key, packet.size) for packet in group.packets] == list(group.payloads)
            assert all(members_problem(packet.members, packet.size) is None for packet in group.packets)
            assert (group.members.table["flags"] & HAS_REWARD).all()
            indices = group.members.table["index"].tolist()
            assert indices == sorted(set(indices))
            assert len(indices) == group.count

        one_line_error(call, WireError, fields)


def test_results_log() -> None:
    run, entries = stored()
    for number in cases("results log"):
        chance = chance_of("results log", number)
        fields = damaged_entry(pick(entries["results"], chance), chance)
        one_line_error(lambda fields=fields: parse_result(run.keys.home, fields), WireError, fields)  # type: ignore[misc]


@pytest.mark.slow
def test_streams_of_a_run() -> None:
    """Damaged copies of genuine entries in all streams at once: healthy groups are trained on, nobody stops.

    Copies that look right are counted as they leave, so the ledger need not balance afterwards.
    """
    _, entries = stored()
    for number in cases("a run's streams"):
        chance = chance_of("a run's streams", number)
        connection = OneClient()
        with producing(connection, "r") as producer:
            run = join(connection, "r")

            def spoil(*streams: str, run: Any = run, chance: random.Random = chance) -> None:
                for name in streams:
                    for _ in range(chance.randint(0, 3)):
                        fields: Any = damaged_entry(pick(entries[name], chance), chance)
                        run.connection.scripts.xadd(getattr(run.keys.home, name), fields or {b"junk": b"1"})

            spoil("rollouts", "groups", "work", "results")
            ids = push_groups(producer, 2, prefix="healthy")
            spoil("rollouts", "groups")
            producer.finish()
        group_all(run)
        spoil("groups", "results")
        queue = TrainerQueue(
            connection, "r", batch_groups=2, chain={"estimator": "reinforce"}, commit="each_batch"
        )
        trained: set[str] = set()
        for _ in range(20):
            try:
                batch = queue.next_batch(timeout=0)
            except NoBatchError:
                spoil("work", "results")
                compute_all(run)
                continue
            if batch is None:
                break
            trained |= {reference.group_id for reference in batch.references}
        audit(run)
        read_status(run)
        assert set(ids) <= trained, number
        assert run.connection.scripts.xlen(run.keys.home.rollouts) == 0, number
        assert run.connection.scripts.xlen(run.keys.home.groups) == 0, number


@pytest.mark.release
@pytest.mark.slow
def test_hashes_of_open_groups() -> None:
    """Slot maps, packets and the rest, damaged while members are to come: the group ends, others do not notice."""
    for number in cases("open groups"):
        chance = chance_of("open groups", number)
        connection = OneClient()
        with producing(connection, "r", {"redundancy": 1}) as producer:
            run = join(connection, "r")
            scripts, key = connection.scripts, run.keys.home.group("spoilt")
            for group_id in ("spoilt", "healthy"):
                producer.push([trajectory(group_id, index, 3) for index in range(2)])
                producer.push([unscored(group_id, 2, 3)])
            group_all(run)
            fields = damaged_entry(scripts.hgetall(key), chance)
            scripts.delete(key)
            if chance.random() < 0.9:
                scripts.hset(key, mapping=fields or {b"junk": b"1"})
            else:
                scripts.rpush(key, b"no hash")
            for group_id in ("spoilt", "healthy"):
                with suppress(StreamadvError):
                    producer.push([trajectory(group_id, 3, 3)])
                producer.score(group_id, 2, 1.0)
            read_status(run)
            audit(run)
        group_all(run)
        make_overdue(run, "spoilt")
        group_all(run)
        found = logged(run)
        assert not scripts.exists(key), number
        assert scripts.zcard(run.keys.home.open) == 0, number
        assert found["healthy"].problem is None
        assert len(found["healthy"].members) == 3
        list(list_dead(run))
        audit(run)
