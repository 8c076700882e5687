"""Looks at the server in the middle of a schedule, between two scripts, without a step of the world."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from .. import doors
from ..run import find_run
from ..status import problems_of, read_shards
from ..status.audit import audit
from ..store.connection import Connection
from ..store.keys import EntryKeys
from .server import Server
from .strands import Process
from .wire import URL, Link, Socket
from .wire import Connection as WorldConnection
from .world import World

#: Keys of the shard that a run of a world has.
SHARD: Final = b"{r:0:0}:"


def problems(world: World, run: str) -> Iterator[str]:
    """What does not add up. Nothing while the server does not answer, or the run is not there yet."""
    server = world.server
    if not server.is_up or server.refusal or EntryKeys(run).manifest.encode() not in server.store.data:
        return
    with _at_once(world) as connection:
        joined = find_run(connection, run)
        for shard in read_shards(joined):
            yield from problems_of(shard)
        yield from audit(joined).problems
    yield from problems_of_groups(server)


def problems_of_groups(server: Server) -> Iterator[str]:
    """Pushes that were counted and fill no slot, and groups that are complete and open."""
    data = server.store.data
    slots = {name: data.get(SHARD + b"group:" + name, {}) for name in data.get(SHARD + b"open", {})}
    pushed = sum(len(group.get(b"slots", b"").replace(b".", b"")) for group in slots.values())
    for kind in (b"ended", b"ended_before"):
        pushed += sum(len(digits) - 1 - digits.count(b"0") for digits in data.get(SHARD + kind, {}).values())
    counted = int(data.get(SHARD + b"ledger", {}).get(b"pushed", b"0"))
    if counted != pushed:
        yield f"{counted} trajectories are counted as pushed, {pushed} slots were filled"
    for name, group in slots.items():
        if _is_complete(group):
            yield f"group {name.decode()} has all its members, and is open: {group[b'slots'].decode()}"


def _is_complete(group: Mapping[bytes, bytes]) -> bool:
    letters, head = Counter(group.get(b"slots", b"")), group.get(b"head", b"").split(b" ")
    lacks_columns = b"columns" in group and b" " not in group[b"columns"]
    if not letters or len(head) < 2 or lacks_columns:
        return False
    usable, unusable = letters[ord("u")], letters[ord("x")]
    return usable >= int(head[1]) or usable + unusable == letters.total()


@contextmanager
def _at_once(world: World) -> Iterator[Connection]:
    """A connection whose requests take no time."""

    class Here(WorldConnection):
        def connect(self) -> None:
            if self._sock is None:
                self._sock = _Socket(Link(world, Process(world, "inspection")), math.inf)
                self._parser.on_connect(self)

    with patch.dict(doors.client_options, connection_class=Here):
        yield Connection(URL)


class _Socket(Socket):
    """Its requests take no time."""

    def sendall(self, data: Any) -> None:
        self._due.extend(self._link.commands(bytes(data)))
        self._go_on()
