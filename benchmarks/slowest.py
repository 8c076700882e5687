"""What scripts cost the server within a window: the slowest one, and calls and processor time of each command."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any, Final, Self

from redis.exceptions import ResponseError

from streamadv.store.connection import Connection
from streamadv.store.scripts import files, load

#: Scripts that took so long are remembered by the server.
SLOW_MICROSECONDS: Final = 1000
#: No script may take longer.
BOUND_MILLISECONDS: Final = 5.0
REMEMBERED: Final = 10_000
OPTIONS: Final = ("slowlog-log-slower-than", "slowlog-max-len")


class Watch:
    """Reads the slow log, whose settings it restores at the end. Context manager.

    The server's clock does not stop when the machine gives the core to another process: a time is an upper bound.
    """

    def __init__(self, url: str) -> None:
        self._connection = Connection(url)
        self._client: Any = self._connection.scripts
        self._names = {load(name).sha: name for name in files()}
        self._before: dict[str, Any] = {}
        self._commands: dict[str, Any] = {}
        self._slow: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self._spent: dict[str, Counter[str]] = defaultdict(Counter)
        self._calls: dict[str, Counter[str]] = defaultdict(Counter)

    def __enter__(self) -> Self:
        with suppress(ResponseError):  # not permitted: no slow log
            self._before = {name: self._client.config_get(name)[name] for name in OPTIONS}
            for name, value in zip(OPTIONS, (SLOW_MICROSECONDS, REMEMBERED), strict=True):
                self._client.config_set(name, value)
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            self._client.config_set(name, value)
        self._connection.close()

    def begin(self) -> None:
        if self._before:
            self._client.slowlog_reset()
        self._commands = self._client.info("commandstats")

    def end(self, way: str) -> None:
        for command, stats in self._client.info("commandstats").items():
            before = self._commands.get(command, {"calls": 0, "usec": 0})
            name = command.removeprefix("cmdstat_")
            self._calls[way][name] += stats["calls"] - before["calls"]
            self._spent[way][name] += stats["usec"] - before["usec"]
        for entry in self._client.slowlog_get(REMEMBERED) if self._before else ():
            words = entry["command"].split()
            if words[0].upper() == b"EVALSHA":
                name = self._names.get(words[1].decode(), "another")
                self._slow[way].append((entry["duration"] / 1e3, name))

    def figures(self, way: str) -> dict[str, Any]:
        """For the record of this way."""
        slow = sorted(self._slow[way], reverse=True)
        commands = {
            name: {"calls": calls, "microseconds_per_call": self._spent[way][name] / calls}
            for name, calls in self._calls[way].most_common()
            if calls
        }
        if not self._before:
            return {"commands": commands}
        milliseconds, name = slow[0] if slow else (SLOW_MICROSECONDS / 1e3, None)
        return {
            "slowest_script": name,
            "slowest_script_milliseconds": milliseconds,
            "scripts_above_bound": sum(spent > BOUND_MILLISECONDS for spent, _ in slow),
            "commands": commands,
        }
