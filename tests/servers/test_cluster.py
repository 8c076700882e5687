"""A run over three shards on a real cluster of three primaries: every stage, and a slot that moves meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from streamadv.cli import main
from streamadv.producer import Producer
from streamadv.run import open_run
from streamadv.run.consumer import ADVANTAGE, GROUPER
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import Cluster, until
from tests.flows import Flow
from tests.support import (
    compute_all,
    consumer_of,
    delivered_batch,
    group_all,
    ledger,
    next_batch,
    problems,
    push_groups,
)

pytestmark = pytest.mark.slow


def test_every_stage_works_across_three_primaries(
    cluster: Cluster, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = Flow(cluster.url, run, shards=3)
    with flow.going():
        flow.progress(3)
        assert main(["status", "--redis", cluster.url, "--run", run, "--check", "--json"]) == 0
    flow.check()
    joined = flow.join()
    assert len({cluster.primary_of(keys.void).port for keys in joined.keys.shards}) == 3
    groups = [int(joined.connection.scripts.hget(keys.ledger, "trained")) for keys in joined.keys.shards]
    assert min(groups) > 0
    capsys.readouterr()
    assert main(["status", "--redis", cluster.url, "--run", run, "--check", "--deep", "--json"]) == 0
    state: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert state["balanced"]
    assert state["ledger"]["trained"] == len(flow.trained)
    assert main(["runs", "list", "--redis", cluster.url]) == 0
    assert run in capsys.readouterr().out
    assert main(["runs", "delete", "--redis", cluster.url, "--run", run]) == 0
    assert not any(list(node.client.scan_iter(match=f"*{run}*")) for node in cluster.primaries())


def test_what_a_lost_reply_brought_is_read_again_at_once(
    cluster: Cluster, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Any = redis.connection.Connection.read_response
    lost: list[Any] = []

    def lose(connection: Any, *arguments: Any, **options: Any) -> Any:
        reply = read(connection, *arguments, **options)
        if not lost and "b'group_id'" in str(reply):
            lost.append(reply)
            connection.disconnect()
            raise redis.exceptions.ConnectionError("connection lost")
        return reply

    with Connection(cluster.url) as connection:
        with Producer(connection, run, settings=RunSettings(shards=1)) as producer:
            push_groups(producer, 1)
        consumer = consumer_of(open_run(connection, run), GROUPER)
        monkeypatch.setattr(redis.connection.Connection, "read_response", lose)
        assert consumer.read(128) == []
        assert lost
        assert consumer.read(128)


def test_a_push_goes_on_while_another_thread_reads_the_layout_again(cluster: Cluster, run: str) -> None:
    with Producer(cluster.url, run) as producer:
        push_groups(producer, 1)
        client: Any = producer._connection.push
        client.nodes_manager.default_node = None  # as redis-py has it in between
        push_groups(producer, 1, prefix="more")
    assert ledger(open_run(Connection(cluster.url), run))["pushed"] == 4


def test_what_a_dead_consumer_had_is_taken_over_on_every_shard(cluster: Cluster, run: str) -> None:
    with Connection(cluster.url) as connection:
        settings = RunSettings(shards=3)
        with Producer(connection, run, settings=settings) as producer:
            push_groups(producer, 12)
            producer.finish()
        joined = open_run(connection, run)
        queue = TrainerQueue(connection, run, batch_groups=12, commit="each_batch")
        for stage, work in ((GROUPER, group_all), (ADVANTAGE, compute_all)):
            dead = consumer_of(joined, stage)
            held = [dead.read(128) for _ in range(9)]
            assert {entry.shard for entries in held for entry in entries} == {0, 1, 2}
            work(joined, consumer_of(joined, stage, lease_s=0.0))  # type: ignore[operator]
            if stage == GROUPER:
                with pytest.raises(Exception, match="no new group"):
                    queue.next_batch(timeout=0)
        batch = delivered_batch(queue, joined)
        assert batch.num_trajectories == 24
        assert next_batch(queue, joined) is None
        assert ledger(joined)["trained"] == 24
        assert problems(joined) == []


def test_a_slot_moves_in_mid_run(cluster: Cluster, run: str) -> None:
    """Clients meet ASK and TRYAGAIN while it moves, MOVED afterwards; the run goes on."""
    flow = Flow(cluster.url, run, shards=3)

    def met(code: str) -> int:
        return sum(node.errors(code) for node in cluster.primaries())

    with flow.going():
        flow.progress()
        for shard in (0, 1):  # the home shard first
            before = {code: met(code) for code in ("ASK", "TRYAGAIN", "MOVED")}
            with cluster.moving(flow.join().keys.shards[shard].void):
                until(lambda before=before: met("ASK") > before["ASK"], "ASK was met")  # type: ignore[misc]
                until(lambda before=before: met("TRYAGAIN") > before["TRYAGAIN"], "TRYAGAIN")  # type: ignore[misc]
            until(lambda before=before: met("MOVED") > before["MOVED"], "MOVED was met")  # type: ignore[misc]
            flow.progress()
    flow.check()
