"""A simulated server: executes commands on a `Store`, refuses, dies, forgets its last writes.

Each write keeps what it has changed for a while, so that the server can go back to the moment before it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from .lua import scripts
from .store import Store
from .values import COMMANDS, OK, Refusal, Status, copy_of

#: Seconds since 1970 when a world begins.
EPOCH_S: Final = 1_700_000_000.0
#: Seconds of writes that a server may lose.
KEPT_S: Final = 3.0

REFUSALS: Final = {
    "loading": "LOADING Redis is loading the dataset in memory",
    "busy": "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "readonly": "READONLY You can't write against a read only replica.",
    "misconf": "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "oom": "OOM command not allowed when used memory > 'maxmemory'.",
}
_MISSING: Final = object()
_QUEUED: Final = Status(b"QUEUED")


class _Before(NamedTuple):
    """What a write has changed: key -> value and end of its life before."""

    time: float
    values: dict[bytes, tuple[Any, int | None]]


class Session:
    """One connection as the server sees it."""

    __slots__ = ("generation", "is_broken", "queued")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.queued: list[list[bytes]] | None = None  # in MULTI
        self.is_broken = False  # one of the queued was refused


class Server:
    """time: gives the seconds of the world. wrote: called with the streams that entries came to."""

    def __init__(self, time: Callable[[], float], wrote: Callable[[set[bytes]], object]) -> None:
        self._time = time
        self._wrote = wrote
        self.offset = 0.0  # seconds by which its clock is ahead
        self.is_up = True
        self.generation = 1
        self.refusal: str | None = None  # one of REFUSALS that it answers with now
        self._known: dict[bytes, bytes] = {}  # scripts
        self._log: deque[_Before] = deque()
        self._changed: dict[bytes, tuple[Any, int | None]] | None = None
        self.store = Store(self.now_ms, self._info)

    def now_ms(self) -> int:
        return int((EPOCH_S + self._time() + self.offset) * 1000)

    def _info(self) -> str:
        run_id = hashlib.sha1(b"%d" % self.generation, usedforsecurity=False).hexdigest()
        memory = "used_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"
        server = f"redis_version:7.2.4\r\nrun_id:{run_id}\r\nmaster_replid:{run_id}\r\n"
        return f"{server}{memory}role:master\r\ncluster_enabled:0\r\naof_enabled:1\r\n"

    # Faults

    def die(self, lost_s: float = 0.0) -> list[float]:
        """Close all connections, forget scripts and the writes of the last seconds. Returns the times of these."""
        self.is_up = False
        self.generation += 1
        self._known.clear()
        lost = []
        while self._log and self._log[-1].time > self._time() - lost_s:
            before = self._log.pop()
            lost.append(before.time)
            for key, (value, end) in before.values.items():
                self.store.data.pop(key, None)
                self.store.ends.pop(key, None)
                if value is not _MISSING:
                    self.store.data[key] = value
                if end is not None:
                    self.store.ends[key] = end
        return lost

    def forget_scripts(self) -> None:
        """SCRIPT FLUSH."""
        self._known.clear()

    # Commands

    def execute(self, session: Session, arguments: Sequence[bytes]) -> Any:
        """The reply to one command; a refusal is returned, not raised."""
        name = arguments[0].upper()
        try:
            if self.refusal in ("loading", "busy") and name != b"INFO":
                raise Refusal(REFUSALS[self.refusal])
            return self._in_session(session, name, arguments)
        except Refusal as refusal:
            return refusal

    def _in_session(self, session: Session, name: bytes, arguments: Sequence[bytes]) -> Any:
        if name == b"MULTI":
            session.queued, session.is_broken = [], False
            return OK
        if name == b"DISCARD":
            session.queued = None
            return OK
        if name == b"EXEC":
            queued, session.queued = session.queued or [], None
            if session.is_broken:
                raise Refusal("EXECABORT Transaction discarded because of previous errors.")
            return self._together(queued)
        if session.queued is not None:
            command = COMMANDS.get(name)
            refuses = self.refusal == "oom" or (command and command.writes and self.refusal)
            if refuses:
                session.is_broken = True
                raise Refusal(REFUSALS[str(self.refusal)])
            session.queued.append(list(arguments))
            return _QUEUED
        return self._together([arguments])[0]

    def _together(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """The replies of commands between which nobody else's come."""
        self._changed = {}
        replies: list[Any] = []
        for arguments in commands:
            try:
                replies.append(self._once(arguments[0].upper(), arguments[1:]))
            except Refusal as refusal:
                replies.append(refusal)
        if self._changed:
            self._log.append(_Before(self._time(), self._changed))
            while self._log[0].time < self._time() - KEPT_S:
                self._log.popleft()
        self._changed = None
        if added := self.store.added:
            self.store.added = set()
            self._wrote(added)
        if len(commands) == 1 and isinstance(replies[0], Refusal):
            raise replies[0]
        return replies

    def _once(self, name: bytes, arguments: Sequence[bytes]) -> Any:
        if name == b"SCRIPT":
            self.forget_scripts()
            return OK
        if name not in (b"EVAL", b"EVALSHA"):
            return self.in_script(name, arguments, has_written=False)
        if name == b"EVAL":
            text = arguments[0]
            self._known[hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()] = text
        elif (text := self._known.get(arguments[0], b"")) == b"":
            raise Refusal("NOSCRIPT No matching script. Please use EVAL.")
        count = int(arguments[1])
        return scripts().run(self, text, arguments[2 : 2 + count], arguments[2 + count :])

    def in_script(self, name: bytes, arguments: Sequence[bytes], has_written: bool) -> Any:
        """A command, of a script or alone. has_written: it is not the script's first write. Raises Refusal."""
        command = COMMANDS.get(name)
        if command is None:
            raise Refusal(f"ERR unknown command '{name.decode()}'")
        if command.writes:
            is_free = self.refusal == "oom" and (has_written or not command.needs_memory)
            if self.refusal is not None and not is_free:
                raise Refusal(REFUSALS[self.refusal])
            self.keep(name, arguments)
        return command.call(self.store, *arguments)

    def keep(self, name: bytes, arguments: Sequence[bytes]) -> None:
        """Remember what a write is about to change."""
        changed, store = self._changed, self.store
        if changed is None:
            return
        for key in keys_of(name, arguments):
            if key not in changed:
                value = store.data.get(key, _MISSING)
                changed[key] = (value if value is _MISSING else copy_of(value), store.ends.get(key))


def keys_of(name: bytes, arguments: Sequence[bytes]) -> Sequence[bytes]:
    """The keys that a writing command changes."""
    match name:
        case b"DEL" | b"UNLINK":
            return arguments
        case b"RENAME":
            return arguments[:2]
        case b"XGROUP":
            return arguments[1:2]
        case b"XREADGROUP":
            at = [argument.upper() for argument in arguments].index(b"STREAMS")
            return arguments[at + 1 : at + 1 + (len(arguments) - at - 1) // 2]
    return arguments[:1]


def encode(reply: Any, pieces: list[bytes]) -> None:
    """Append a reply as it travels."""
    if isinstance(reply, Status):
        pieces.append(b"+%b\r\n" % reply)
    elif isinstance(reply, bytes):
        pieces.append(b"$%d\r\n%b\r\n" % (len(reply), reply))
    elif isinstance(reply, int):
        pieces.append(b":%d\r\n" % reply)
    elif reply is None:
        pieces.append(b"$-1\r\n")
    elif isinstance(reply, Refusal):
        pieces.append(b"-%b\r\n" % str(reply).replace("\r", " ").replace("\n", " ").encode())
    else:
        pieces.append(b"*%d\r\n" % len(reply))
        for item in reply:
            encode(item, pieces)
