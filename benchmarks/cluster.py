"""A Redis Cluster of primaries on loopback, in memory: what shards spread over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import redis

from streamadv.errors import ServerError
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.keys import CLUSTER_SLOTS
from streamadv.store.waiting import Blocked, Wait

FORMING_S: Final = 20.0


@contextmanager
def cluster(primaries: int, binary: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """URL of the cluster, and those of its servers. Raises ServerError if they do not find each other."""
    options = {"cluster-enabled": "yes", "cluster-node-timeout": "1000"}
    with ExitStack() as stack:
        servers = [EmbeddedServer(binary=binary, extra_options=options) for _ in range(primaries)]
        for server in servers:
            stack.enter_context(server)
        urls = [server.url for server in servers]
        clients = [stack.enter_context(redis.Redis.from_url(url)) for url in urls]
        _form(clients, [int(url.rpartition(":")[2].partition("/")[0]) for url in urls])
        for client in clients:  # busy processes on few cores answer late
            client.config_set("cluster-node-timeout", 15_000)
        yield urls[0].replace("redis://", "redis+cluster://").removesuffix("/0"), urls


def _form(clients: Sequence[redis.Redis], ports: Sequence[int]) -> None:
    for number, client in enumerate(clients):
        first, last = (CLUSTER_SLOTS * n // len(clients) for n in (number, number + 1))
        _ask(client, "CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        _ask(client, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for port in ports[1:]:
        _ask(clients[0], "CLUSTER", "MEET", "127.0.0.1", port)
    wait = Wait(Blocked("bench", "waiting for a cluster", None), timeout=FORMING_S, base=0.01, cap=0.1)
    while not all(_is_whole(client, len(clients)) for client in clients):
        if wait.expired:
            raise ServerError(f"{len(clients)} cluster nodes did not find each other in {FORMING_S:g} s")
        wait.pause()


def _is_whole(client: redis.Redis, nodes: int) -> bool:
    state = _ask(client, "CLUSTER INFO")
    return bool(state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == nodes)


def _ask(client: redis.Redis, *words: Any) -> Any:
    execute: Any = client.execute_command
    return execute(*words)
