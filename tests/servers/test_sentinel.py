"""A master behind Sentinels: found by its name, killed in mid-run, and its replica takes over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis.exceptions

from streamadv.errors import ServerUnreachableError, SettingError
from streamadv.store.connection import AsyncConnection, Connection
from tests.clusters import Sentinels, until
from tests.flows import Flow

pytestmark = pytest.mark.slow

LOST_BYTES = 20_000  # of changes the replica never hears of


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels() as running:
        yield running


def test_the_master_is_killed_in_mid_run(sentinels: Sentinels, run: str) -> None:
    """What the replica had not heard of is pushed, committed and named again."""
    flow = Flow(sentinels.url, run, shards=2)
    with flow.going():
        flow.progress()
        master, replica = sentinels.master(), sentinels.replica()
        replica.cut()
        until(lambda: replica.behind(master) > LOST_BYTES, "the replica is behind")
        sentinels.replace(master, replica)
        replica.mend()
        sentinels.bring_back(master)
        flow.progress()
    flow.check()


async def test_a_connection_to_a_former_master_is_given_up(sentinels: Sentinels) -> None:
    """It answers READONLY; nor is a new one taken while what the Sentinels name is no master."""
    master, replica = sentinels.master(), sentinels.replica()
    write = ("return redis.call('SET', KEYS[1], '1')", 1, "pipelined")
    async with AsyncConnection(sentinels.url) as other:
        with Connection(sentinels.url) as connection:
            connection.push.set("key", b"1")
            await other.push.set("key", b"1")
            pipelined = other.pipelined
            assert pipelined is not None
            await pipelined.eval(*write)
            reading = connection.blocking(100)
            assert reading.get("key") == b"1"
            master.ask("REPLICAOF", "127.0.0.1", replica.port)  # keeps its connections, unlike a failover
            try:
                with pytest.raises(redis.exceptions.ConnectionError, match="is now a slave"):
                    connection.push.set("key", b"2")
                with pytest.raises(redis.exceptions.ConnectionError, match="is now a slave"):
                    reading.pipeline(transaction=False).set("key", b"2").execute(raise_on_error=False)
                with pytest.raises(redis.exceptions.ConnectionError, match="is now a slave"):
                    await other.push.set("key", b"3")
                with pytest.raises(redis.exceptions.ReadOnlyError):
                    await pipelined.eval(*write)
                with pytest.raises(redis.exceptions.ConnectionError, match="not yet, the master"):
                    await pipelined.eval(*write)
                for client in (connection.push, connection.scripts, reading):
                    with pytest.raises(redis.exceptions.ConnectionError, match="not yet, the master"):
                        client.get("key")
                with pytest.raises(redis.exceptions.ConnectionError, match="not yet, the master"):
                    await other.scripts.get("key")
            finally:
                master.ask("REPLICAOF", "NO", "ONE")
            assert connection.push.set("key", b"4")
            assert await other.push.get("key") == b"4"
            assert await pipelined.eval(*write) == b"OK"
    until(lambda: replica.in_sync, "the replica follows again")


async def test_what_is_wrong_is_said(sentinels: Sentinels) -> None:
    hosts = sentinels.url.rpartition("/")[0]
    with Connection(f"{hosts}/nobody") as connection, pytest.raises(ServerUnreachableError, match="nobody"):
        connection.wait_until_ready(0)
    async with AsyncConnection(f"{hosts}/nobody") as other:
        with pytest.raises(ServerUnreachableError, match="nobody"):
            await other.wait_until_ready(0)
    server = sentinels.master().server.url.removesuffix("/0").replace("redis:", "redis+sentinel:")
    problem = "no Sentinel answers there: give their addresses"
    with Connection(f"{server}/mymaster") as connection, pytest.raises(SettingError, match=problem):
        connection.wait_until_ready(5)
    with Connection(f"{sentinels.url}?sentinel_password=wrong-pw") as connection:
        with pytest.raises((SettingError, ServerUnreachableError)) as caught:
            connection.wait_until_ready(0)
        assert "wrong-pw" not in str(caught.value)
