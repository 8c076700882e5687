"""A cluster of three primaries with a replica each, and a master with a replica behind Sentinels, on loopback.

All in memory and formed by hand: redis-cli does not come with every server. Every process is stopped by its own id and
dies with this one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamadv.launcher import ending_with_parent
from streamadv.store.embedded import EmbeddedServer, find_server_binary, free_port
from streamadv.store.keys import CLUSTER_SLOTS
from streamadv.store.retry import RETRYABLE
from streamadv.store.waiting import Blocked, Wait

PRIMARIES: Final = 3
PATIENCE_S: Final = 120.0  # bounds a hang
#: A node silent for longer is taken for dead by the others. Tests that promote by hand set it high.
NODE_TIMEOUT_MS: Final = 4_000
FORMING_TIMEOUT_MS: Final = 500  # sets how often they talk
#: While a test wants a failover, CALM_MS while not: a busy machine is silent as well.
DOWN_AFTER_MS: Final = 300
CALM_MS: Final = 60_000
MASTER: Final = "mymaster"


def until(true: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait for something on a server or of processes. What cannot be asked now is asked again."""
    wait = Wait(Blocked("test", "waiting for a server", None), timeout=within_s, base=0.005, cap=0.05)
    while True:
        try:
            if true():
                return
        except (*RETRYABLE, redis.exceptions.ResponseError):
            if wait.expired:
                raise
        if wait.expired:
            raise AssertionError(f"{what}: not after {within_s:g} s")
        wait.pause()


def refusals(client: redis.Redis, code: str) -> int:
    """How often the server has answered with this error."""
    errors: Any = client.info("errorstats")
    return int(errors.get(f"errorstat_{code}", {"count": 0})["count"])


class Node:
    """One server of a group, with a client for commands the library does not need."""

    def __init__(self, **options: str) -> None:
        self.server = EmbeddedServer(extra_options={"repl-diskless-sync-delay": "0", **options})

    def start(self) -> None:
        self.server.start()
        self.client = redis.Redis.from_url(self.server.url, socket_timeout=5.0, retry=Retry(NoBackoff(), 0))

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2].partition("/")[0])

    def ask(self, *words: Any) -> Any:
        execute: Any = self.client.execute_command
        return execute(*words)

    def info(self, section: str) -> dict[str, Any]:
        state: dict[str, Any] = self.client.info(section)
        return state

    def errors(self, code: str) -> int:
        """How often the server has answered with this error."""
        return refusals(self.client, code)

    @property
    def in_sync(self) -> bool:
        """Whether this is a replica that has all its primary has."""
        state = self.info("replication")
        return state["role"] == "slave" and state["master_link_status"] == "up"

    def cut(self) -> None:
        """No longer hear of the primary, which does not notice: what is written from now on dies with it."""
        self.client.config_set("masterauth", "nobody has this password")
        self.client.config_set("masteruser", "nobody")
        self.ask("CLIENT", "KILL", "TYPE", "master")

    def behind(self, primary: Node) -> int:
        """Bytes of its primary's changes that this replica has not heard of."""
        there, here = primary.info("replication"), self.info("replication")
        return int(there["master_repl_offset"]) - int(here["slave_repl_offset"])

    def mend(self) -> None:
        """Hear of the primary again."""
        self.client.config_set("masteruser", "")
        self.client.config_set("masterauth", "")

    def kill(self) -> None:
        self.server.kill()

    def pause(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.server.pid, signal.SIGCONT)


def divide_slots(primaries: Sequence[Node]) -> None:
    """An equal share of the slots for each."""
    for number, node in enumerate(primaries):
        first, last = (CLUSTER_SLOTS * n // len(primaries) for n in (number, number + 1))
        node.ask("CLUSTER", "ADDSLOTSRANGE", first, last - 1)


class Cluster:
    """Three primaries and a replica for each; slots are divided evenly."""

    def __init__(self, node_timeout_ms: int = NODE_TIMEOUT_MS) -> None:
        options = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(FORMING_TIMEOUT_MS),
            "cluster-replica-validity-factor": "0",
            "cluster-require-full-coverage": "no",
        }
        self._node_timeout_ms = node_timeout_ms
        self.nodes = [Node(**options) for _ in range(2 * PRIMARIES)]
        self.url = ""

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes:
                node.start()
            self._form()
        except BaseException:
            self.close()
            raise
        self.url = "redis+cluster://" + self.nodes[0].server.url.partition("://")[2].removesuffix("/0")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            if node.server.running:
                node.kill()
            node.server.close()

    def _form(self) -> None:
        ids = [node.ask("CLUSTER", "MYID").decode() for node in self.nodes]
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        divide_slots(self.nodes[:PRIMARIES])
        for number, node in enumerate(self.nodes):
            for other in self.nodes[number + 1 :]:
                node.ask("CLUSTER", "MEET", "127.0.0.1", other.port)
        until(
            lambda: all(len(self.peers_of(node)) == len(ids) for node in self.nodes), "nodes know each other"
        )
        for replica, primary_id in zip(self.nodes[PRIMARIES:], ids[:PRIMARIES], strict=True):
            until(partial(replica.ask, "CLUSTER", "REPLICATE", primary_id), "replicas")
        self.wait_until_whole()
        for node in self.nodes:
            node.client.config_set("cluster-node-timeout", self._node_timeout_ms)

    @staticmethod
    def peers_of(node: Node) -> dict[str, dict[str, Any]]:
        """The nodes that this one has shaken hands with, itself too, by address."""
        nodes: dict[str, dict[str, Any]] = node.ask("CLUSTER NODES")
        return {address: entry for address, entry in nodes.items() if "handshake" not in entry["flags"]}

    def wait_until_whole(self) -> None:
        """Every node agrees on who is primary, all slots are served, all replicas are in sync."""

        def whole() -> bool:
            views = set()
            for node in self.nodes:
                peers = self.peers_of(node).values()
                views.add(frozenset((p["node_id"], p["master_id"], "slave" in p["flags"]) for p in peers))
                state = node.ask("CLUSTER INFO")
                if state["cluster_state"] != "ok" or state["cluster_slots_ok"] != str(CLUSTER_SLOTS):
                    return False
            replicas = [node for node in self.nodes if node not in self.primaries()]
            return len(views) == 1 and len(replicas) == PRIMARIES and all(node.in_sync for node in replicas)

        until(whole, "the cluster is whole")

    def primaries(self) -> list[Node]:
        """The nodes that run and serve slots."""
        running = [node for node in self.nodes if node.server.running]
        return [node for node in running if node.info("replication")["role"] == "master"]

    def primary_of(self, key: str) -> Node:
        """The node that serves the key's slot."""
        asked = self.primaries()[0]
        slot = asked.ask("CLUSTER KEYSLOT", key)
        for first, last, primary, *_ in asked.ask("CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise AssertionError(f"nobody serves {key}")

    def replica_of(self, primary: Node) -> Node:
        return next(
            node
            for node in self.nodes
            if node is not primary
            and node.server.running
            and node.info("replication").get("master_port") == primary.port
        )

    def bring_back(self, node: Node) -> None:
        """Start a killed node; it becomes a replica of who took over."""
        node.start()
        self.wait_until_whole()
        node.client.config_set("cluster-node-timeout", self._node_timeout_ms)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """No node takes another for dead meanwhile."""
        for node in self.nodes:
            node.client.config_set("cluster-node-timeout", 3_600_000)
        try:
            yield
        finally:
            for node in self.nodes:
                node.client.config_set("cluster-node-timeout", self._node_timeout_ms)

    def take_over(self, replica: Node) -> None:
        """Make a replica the primary at once, whatever the others say."""
        until(lambda: replica.ask("CLUSTER", "FAILOVER", "TAKEOVER"), "taking over")

    @contextmanager
    def moving(self, key: str) -> Iterator[tuple[Node, Node]]:
        """The key's slot is on its way from one primary to another: all that is there has gone, the slot has not.

        Gives source and target; leaving hands the slot over.
        """
        source = self.primary_of(key)
        target = next(node for node in self.primaries() if node is not source)
        slot = source.ask("CLUSTER KEYSLOT", key)
        ids = {node: node.ask("CLUSTER", "MYID").decode() for node in (source, target)}
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        yield source, target
        for node in (target, source, *self.primaries()):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


class Sentinels:
    """A master with a replica, and Sentinels that make the replica the master when it goes away."""

    def __init__(self, sentinels: int = 3) -> None:
        self.nodes = [Node(), Node()]
        self._count = sentinels
        self._stack = ExitStack()
        self.ports: list[int] = []
        self.url = ""

    def __enter__(self) -> Sentinels:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamadv-sentinels-")))
            for node in self.nodes:
                stack.callback(node.server.close)
                node.start()
            self.nodes[1].ask("REPLICAOF", "127.0.0.1", self.nodes[0].port)
            until(lambda: self.nodes[1].in_sync, "the replica is in sync")
            for number in range(self._count):
                self._start_sentinel(stack, folder / f"sentinel-{number}.conf")
            until(self._all_agree, "the Sentinels know the replica and each other")
            self._stack = stack.pop_all()
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.url = f"redis+sentinel://{hosts}/{MASTER}"
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            if node.server.running:
                node.kill()
        self._stack.close()

    def _start_sentinel(self, stack: ExitStack, file: Path) -> None:
        port = free_port()
        quorum = self._count // 2 + 1
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {file.parent}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {self.nodes[0].port} {quorum}\n"
            f"sentinel down-after-milliseconds {MASTER} {CALM_MS}\n"
            f"sentinel failover-timeout {MASTER} 3000\n"
        )
        command = ending_with_parent([str(find_server_binary()), str(file), "--sentinel"], signal.SIGTERM)
        with file.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        self.ports.append(port)

    def _ask(self, port: int, *words: Any) -> Any:
        with redis.Redis(port=port, socket_timeout=5.0, retry=Retry(NoBackoff(), 0)) as client:
            execute: Any = client.execute_command
            return execute(*words)

    def _all_agree(self) -> bool:
        states = [self._ask(port, "SENTINEL MASTER", MASTER) for port in self.ports]
        return all(
            state["num-slaves"] == 1 and state["num-other-sentinels"] == self._count - 1 for state in states
        )

    def master(self) -> Node:
        """Who the Sentinels say it is, and says so itself."""
        _, port = self._ask(self.ports[0], "SENTINEL GET-MASTER-ADDR-BY-NAME", MASTER)
        return next(node for node in self.nodes if node.port == int(port))

    def replica(self) -> Node:
        master = self.master()
        return next(node for node in self.nodes if node is not master)

    def _set_down_after(self, milliseconds: int) -> None:
        for port in self.ports:
            self._ask(port, "SENTINEL SET", MASTER, "down-after-milliseconds", milliseconds)

    def replace(self, master: Node, replica: Node) -> None:
        """SIGKILL the master; the Sentinels promote its replica."""
        self._set_down_after(DOWN_AFTER_MS)
        master.kill()
        self.wait_until_promoted(replica)
        self._set_down_after(CALM_MS)

    def wait_until_promoted(self, node: Node) -> None:
        address = [b"127.0.0.1", str(node.port).encode()]

        def all_agree() -> bool:
            said = [
                list(self._ask(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)) for port in self.ports
            ]
            return said == [address] * len(said) and node.info("replication")["role"] == "master"

        until(all_agree, "the replica has been promoted")

    def bring_back(self, node: Node) -> None:
        """Start a killed node as the replica; the Sentinels would take ten seconds to do so."""
        node.start()
        until(lambda: node.ask("REPLICAOF", "127.0.0.1", self.master().port), "it follows the new master")
        until(lambda: node.in_sync, "the former master is a replica")
