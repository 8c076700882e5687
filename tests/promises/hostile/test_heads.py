"""The head of an open group, which a producer may write: no data source in it ends a process or fills a figure."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from streamadv import metrics
from streamadv.run.dead_letters import list_dead
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    delivered_batch,
    group_all,
    join,
    ledger,
    logged,
    make_overdue,
    problems,
    producing,
    push_groups,
    some_of,
    trajectory,
    unscored,
)

SOURCES: dict[str, bytes] = {
    "no UTF-8": b"\xff\xfe",
    "a lone surrogate": b"\xed\xa0\x80",
    "control characters": b"\x00\n\x1b[31m\r",
    "half a character": b"\xc3",
    "long": b"\xff" * 900,
}
"""Data sources behind the numbers of a genuine head."""


def forge_source(connection: Connection, key: str, source: bytes) -> None:
    head: Any = connection.scripts.hget(key, "head")
    connection.scripts.hset(key, "head", head + source)


@pytest.mark.parametrize("end", ["complete", "expired", "scored"])
@pytest.mark.parametrize("role", ["train", "eval"])
@pytest.mark.parametrize("source", some_of(SOURCES, 2))
def test_a_data_source_of_any_bytes_ends_nobody(fake: Connection, source: str, role: str, end: str) -> None:
    with producing(fake, "r", {"partial_min_usable": 1}) as producer:
        run = join(fake, "r")
        first = unscored if end == "scored" else trajectory
        producer.push([first("forged", 0, 2, role=role)])
        group_all(run)
        forge_source(fake, run.keys.home.group("forged"), SOURCES[source])
        if end == "expired":
            make_overdue(run, "forged")
        else:
            producer.push([trajectory("forged", 1, 2, role=role)])
        if end == "scored":
            producer.score("forged", 0, 1.0)
        push_groups(producer, 1)
        group_all(run)
        producer.finish()
        queue = TrainerQueue(fake, "r", batch_groups=4, min_groups=1, chain={"estimator": "reinforce"})
        trained = {each.group_id for each in delivered_batch(queue, run).references}
    assert trained == ({"g0000", "forged"} if role == "train" else {"g0000"})
    status = read_status(run)
    assert all(len(each.data_source) <= 250 for each in status.evaluations)
    assert generate_latest(metrics.REGISTRY)
    assert problems(run) == []


@pytest.mark.parametrize(
    "change",
    [
        {"head": b"train 2 9 1 0 0 " + b"x" * 5_000_000},
        {"head": f"train {2**52} 9 1 0 0 ".encode()},
        {"head": b"train 3 9 1 0 0 math"},
        {"head": b"\xff" * 500},
    ],
    ids=["a data source of many MB", "a size of 2^52", "a size above its slots", "no text"],
)
def test_a_head_that_no_script_writes_makes_its_group_malformed(
    fake: Connection, change: dict[str, bytes]
) -> None:
    with producing(fake, "r", {"partial_min_usable": 1}) as producer:
        run = join(fake, "r")
        producer.push([trajectory("forged", 0, 2, role="train")])
        group_all(run)
        fake.scripts.hset(run.keys.home.group("forged"), mapping=change)
        make_overdue(run, "forged")
        push_groups(producer, 1)
        group_all(run)
    assert set(logged(run)) == {"g0000"}
    assert ledger(run)["dead"] == {"malformed": 1}
    assert [dead.reason for dead in list_dead(run)] == ["malformed"]
