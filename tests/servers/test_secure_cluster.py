"""A cluster with TLS, client certificates and a user for each role: the whole job of each, on several shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import redis.asyncio.cluster
import redis.exceptions

import streamadv as sa
from streamadv import cli
from streamadv.errors import ServerError, SettingError
from streamadv.producer import Producer
from streamadv.store import acl
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.embedded import free_port
from streamadv.trainer.queue import TrainerQueue
from tests.certificates import Authority
from tests.clusters import Node, divide_slots, until
from tests.support import delivered_batch, group_all, join, problems, producing, push_groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(redis.asyncio.cluster, "TransactionStrategy"), reason="redis-py 7 or newer"
    ),
]

RUN = "secure"
PRIMARIES = 3


@dataclass(frozen=True)
class SecureCluster:
    port: int  # of one node, with TLS
    stranger: Authority

    def url(self, role: str) -> str:
        return f"rediss+cluster://streamadv-{role}@127.0.0.1:{self.port}"


def is_whole(node: Node) -> bool:
    state = node.ask("CLUSTER INFO")
    return bool(state["cluster_state"] == "ok" and state["cluster_known_nodes"] == str(PRIMARIES))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def secured(files: Path) -> Iterator[SecureCluster]:
    ca, stranger = Authority(files / "ca"), Authority(files / "stranger", "another CA")
    pair = ca.issue("node")
    ca.issue("client")
    rules = [
        acl.acl_line(role, RUN, f"streamadv-{role.name}", acl.password_hash(f"pw {role.name}"))
        for role in acl.ROLES
    ]
    (files / "users.acl").write_text("\n".join(["user default on nopass ~* &* +@all", *rules, ""]))
    with ExitStack() as stack:
        ports, buses, nodes = [], [], []
        for _ in range(PRIMARIES):
            ports.append(free_port())
            buses.append(free_port())  # else port + 10,000, which may be anybody's
            options = {
                **{
                    "tls-port": str(ports[-1]),
                    "tls-cert-file": str(pair.cert),
                    "tls-key-file": str(pair.key),
                },
                **{"tls-ca-cert-file": str(ca.file), "tls-auth-clients": "yes", "tls-cluster": "yes"},
                **{
                    "cluster-enabled": "yes",
                    "cluster-port": str(buses[-1]),
                    "cluster-node-timeout": "500",
                    "aclfile": str(files / "users.acl"),
                },
            }
            node = Node(**options)
            stack.callback(node.server.close)
            try:
                node.start()
            except ServerError as error:
                if "tls" in str(error).lower():
                    pytest.skip(f"this server is built without TLS: {error}")
                raise
            nodes.append(node)
        divide_slots(nodes)
        for number, node in enumerate(nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port, bus in zip(ports[1:], buses[1:], strict=True):
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", port, bus)
        until(lambda: all(map(is_whole, nodes)), "the cluster is whole")
        for node in nodes:
            node.client.config_set("cluster-node-timeout", 15_000)
        yield SecureCluster(ports[0], stranger)


@pytest.fixture
def told(secured: SecureCluster, files: Path, monkeypatch: pytest.MonkeyPatch) -> SecureCluster:
    """The environment names the certificates."""
    for setting, file in (("CA", "ca"), ("CERT", "client")):
        monkeypatch.setenv(f"STREAMADV_TLS_{setting}_FILE", str(files / "ca" / f"{file}.pem"))
    monkeypatch.setenv("STREAMADV_TLS_KEY_FILE", str(files / "ca" / "client.key"))
    monkeypatch.setenv("STREAMADV_RUN", RUN)
    return secured


def as_role(nodes: SecureCluster, role: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STREAMADV_REDIS_PASSWORD", f"pw {role}")
    monkeypatch.setenv("STREAMADV_REDIS_URL", nodes.url(role))
    return sa.redis_url()


async def test_every_role_does_its_job(
    told: SecureCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with producing(as_role(told, "producer", monkeypatch), RUN, {"shards": PRIMARIES}) as producer:
        push_groups(producer, 6)
    async with Producer(as_role(told, "producer", monkeypatch), RUN) as other:
        async with other.group(1, group_id="last") as group:
            for rollout in group:
                await rollout.push(input_ids=range(3), response_mask=[0, 1, 1], reward=1.0)
        await other.finish()
    run = join(as_role(told, "pipeline", monkeypatch), RUN)
    assert group_all(run) == ["complete"] * 7
    queue = TrainerQueue(run.connection, RUN, batch_groups=7, commit="each_batch")
    batch = delivered_batch(queue, run)
    assert len(batch.references) == 13
    queue.trained(batch)
    queue.commit(queue.state_dict())
    assert problems(run, deep=False) == []
    run.connection.close()
    as_role(told, "observer", monkeypatch)
    for words in (["status", "--check"], ["runs", "list"], ["dead", "list"]):
        assert cli.main(words) == 0, words
    assert "trained 13" in capsys.readouterr().out


def test_a_role_is_refused_on_every_node(told: SecureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for role in acl.ROLES:
        with Connection(as_role(told, role.name, monkeypatch)) as connection:
            for number in range(12):  # keys all over the slots
                with pytest.raises(redis.exceptions.NoPermissionError):
                    connection.scripts.hset(f"{{other:{number}:0}}:ledger", "trained", 1)


async def test_who_is_refused_learns_why(
    told: SecureCluster, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = as_role(told, "observer", monkeypatch)
    stranger = told.stranger.file
    pair = told.stranger.issue("client")
    for url, part in (
        (good.replace("pw%20", "wrong"), "user name and password"),
        (good.replace(str(files / "ca" / "ca.pem").replace("/", "%2F"), str(stranger)), "TLS_CA_FILE"),
        (good.partition("&ssl_certfile")[0], "it wants a client certificate"),
        (
            f"{good.partition('&ssl_certfile')[0]}&ssl_certfile={pair.cert}&ssl_keyfile={pair.key}",
            "does not accept this client's certificate",
        ),
    ):
        assert url != good
        with Connection(url) as connection, pytest.raises(SettingError, match=part) as caught:
            connection.wait_until_ready(5)
        assert "observer:***@" in str(caught.value)
        async with AsyncConnection(url) as other:
            with pytest.raises(SettingError, match=part):
                await other.wait_until_ready(5)
