"""A primary of a cluster goes away in mid-run; its replica, which lacks recent writes, takes over."""

from __future__ import annotations

import pytest

from streamadv.producer import Producer
from streamadv.run import open_run
from streamadv.run.manifest import RunSettings
from streamadv.store.connection import Connection
from streamadv.store.keys import EntryKeys, ShardKeys
from streamadv.store.scripts import server_ids
from tests.clusters import Cluster, Node, until
from tests.flows import Flow
from tests.support import heartbeat, ledger, problems, push_groups, threads

pytestmark = pytest.mark.slow

LOST_BYTES = 20_000  # of changes the replica never hears of


def kill_behind(cluster: Cluster, primary: Node, lost_bytes: int = LOST_BYTES) -> None:
    """SIGKILL a primary after its replica has missed so much; the replica takes over, and it comes back as one."""
    replica = cluster.replica_of(primary)
    replica.cut()
    until(lambda: replica.behind(primary) > lost_bytes, "the replica is behind")
    primary.kill()
    cluster.take_over(replica)
    until(lambda: replica.info("replication")["role"] == "master", "the replica has taken over")
    replica.mend()
    cluster.bring_back(primary)


def test_primaries_are_killed_in_mid_run(cluster: Cluster, run: str) -> None:
    """Each in turn; what the replicas had not heard of is pushed, committed and named again."""
    flow = Flow(cluster.url, run, shards=3)
    with flow.going():
        flow.progress()
        for keys in flow.join().keys.shards:
            kill_behind(cluster, cluster.primary_of(keys.void))
            flow.progress()
    flow.check()


def test_a_primary_that_hangs_is_replaced_in_mid_run(cluster: Cluster, run: str) -> None:
    """It comes back still thinking that it is one, and answers what was sent to it meanwhile."""
    flow = Flow(cluster.url, run, shards=3)
    with flow.going():
        flow.progress()
        for keys in flow.join().keys.shards[:2]:
            primary = cluster.primary_of(keys.void)
            replica = cluster.replica_of(primary)
            primary.pause()
            try:
                cluster.take_over(replica)
                until(lambda replica=replica: replica.info("replication")["role"] == "master", "it took over")
            finally:
                primary.go_on()
            cluster.wait_until_whole()
            flow.progress()
    flow.check()


def test_a_primary_that_got_its_place_back_is_another_server(cluster: Cluster) -> None:
    """Nobody may have asked in between, and what it had before its replica took over may be lost."""
    keys = ShardKeys("r:0:0")
    with Connection(cluster.url) as connection:
        [before] = server_ids(connection, [keys])
        assert server_ids(connection, [keys]) == [before]
        primary = cluster.primary_of(keys.void)
        replica = cluster.replica_of(primary)
        for heir in (replica, primary):
            cluster.take_over(heir)
            cluster.wait_until_whole()
        [after] = server_ids(connection, [keys])
    assert cluster.primary_of(keys.void) is primary
    assert None not in (before, after)
    assert before != after


def test_a_producer_is_heard_at_home_while_another_primary_hangs(cluster: Cluster, run: str) -> None:
    with Connection(cluster.url) as connection:
        for number in range(100):
            joined = open_run(connection, f"{run}-{number}", RunSettings(shards=3))
            home = cluster.primary_of(joined.keys.home.void)
            elsewhere = cluster.primary_of(EntryKeys(joined.keys.run).manifest)
            if home is not elsewhere:
                break
        with Producer(connection, joined.keys.run) as producer:

            def said() -> object:
                return home.client.hvals(joined.keys.home.producers)

            first = said()
            with cluster.calm():  # nobody takes over
                elsewhere.pause()
                try:
                    with threads(lambda stop: heartbeat(producer)):
                        until(lambda: said() != first, "it is heard", within_s=30)
                        elsewhere.go_on()
                finally:
                    elsewhere.go_on()


def test_a_producer_sends_again_what_one_shard_forgot(cluster: Cluster, run: str) -> None:
    """Only the shard of the primary that went away: the others have theirs."""
    with (
        Connection(cluster.url) as connection,
        Producer(connection, run, settings=RunSettings(shards=3)) as producer,
    ):
        joined = open_run(connection, run)
        shards = joined.keys.shards
        heartbeat(producer)
        primary = cluster.primary_of(shards[1].void)
        replica = cluster.replica_of(primary)
        replica.cut()
        until(lambda: replica.info("replication")["master_link_status"] == "down", "it is cut off")
        ids = push_groups(producer, 12)
        in_shard = sum(2 for group_id in ids if joined.keys.shard_of(group_id) == 1)
        assert 0 < in_shard < 24
        primary.kill()
        cluster.take_over(replica)
        until(lambda: ledger(joined)["pushed"] == 24 - in_shard, "it has forgotten them")
        replica.mend()
        cluster.bring_back(primary)
        duplicates = [int(connection.scripts.hget(keys.ledger, "duplicates") or 0) for keys in shards]
        producer.finish()
        assert ledger(joined)["pushed"] == 24
        assert problems(joined) == []
        assert duplicates == [int(connection.scripts.hget(keys.ledger, "duplicates") or 0) for keys in shards]
