"""A producer as a member of its run: it agrees on the manifest, is heard of, finishes, and knows its keys and budget.

Generators that yield requests, as all of `producing.py`.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

from .. import metrics
from ..errors import ManifestMismatchError, ProducerClosedError, SettingError, TrajectoryError
from ..messages import brief
from ..run.budget import byte_budget
from ..run.manifest import Manifest, RunSettings, manifest_call, parse_manifest, register_call
from ..store.keys import ShardKeys
from ..store.reasons import Reason
from ..store.scripts import script_call
from ..store.waiting import Blocked, Wait
from .admission import LOST_GROUPS_FIRST, NO_ROOM
from .failures import Failures
from .requests import Memory, Pause, Request, Steps
from .resend import RESEND_WINDOW_S, ResendWindow
from .tickets import Ticket

logger = logging.getLogger(__name__)

STAGE: Final = "producer"
#: How long closing a producer lets calls under way end by themselves.
CLOSE_S: Final = 1.0
#: Between heartbeats while the server has no room for what it has lost.
CATCH_UP_S: Final = 1.0
ABOVE_MAXMEMORY: Final = Reason("maxmemory", "the server is above its maxmemory")


class Member:
    """The state of a producer, and the steps that are about itself."""

    def __init__(
        self,
        run: str,
        name: str | None,
        settings: RunSettings | None,
        resend_window: float = RESEND_WINDOW_S,
    ) -> None:
        self.run = run
        self.name = name or f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self.settings = settings
        self.manifest: Manifest | None = None
        self.max_bytes = 0  # of one shard
        self.version: int | None = None  # newest model version heard of
        self.finished = False
        self._process = os.getpid()  # a forked child is nobody on the list of producers
        self._instance: int | None = None  # among those of one name, the latest has the name's place
        self._succeeded = False
        self._refused: ManifestMismatchError | None = None  # the run is another one now
        self._drop_after: int | None = None
        self._told_unpaced = False
        self._resend = ResendWindow(resend_window)
        self._who = f"{STAGE} {self.name}"
        self._not_admitted = Blocked(self._who, "not admitted")  # of all threads and tasks together
        self.failures = Failures()
        self.closed = False
        self._unclaimed: dict[str, str] = {}  # nonce of a begin that nobody waits for any more -> group id

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of a producer in a child of its process."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raises ProducerClosedError once it is closed."""
        if self.closed:
            raise ProducerClosedError(f"producer {self.name} is closed: make another one")

    @property
    def joined(self) -> Manifest:
        """The manifest of the run this producer has joined."""
        if self._refused is not None:
            raise self._refused
        if self.manifest is None:
            raise SettingError("producer is not connected: use it in a with block, or call open() first")
        return self.manifest

    def open(self) -> Steps[None]:
        """Read or write the manifest and find the byte budget."""
        memory = yield Memory()
        if self.settings is not None:
            byte_budget(self.settings.max_bytes, memory)  # before others read it
        yield from self._agree()
        yield register_call(self.run)
        self._set_budget(memory)
        yield from self.heartbeat()

    def _set_budget(self, memory: Mapping[str, Any]) -> None:
        self.max_bytes = byte_budget(self.joined.max_bytes, memory) // len(self.joined.keys.salts)

    def heartbeat(self) -> Steps[None]:
        """Say that this producer is alive or finished, and hear of the newest model version."""
        self.failures.tell()
        yield from self.withdraw()
        yield from self._agree()  # a setting that nobody had given may have been given since
        yield from self._say("finished" if self.finished else "open")
        try:
            self._set_budget((yield Memory()))
        except SettingError as error:  # written by a process that asks for no memory
            logger.warning("%s; until then %d bytes a shard", error, self.max_bytes)
        yield from self._resend.check(self.joined.keys.voids)

    def _agree(self, columns: Mapping[str, str] | None = None) -> Steps[Manifest]:
        """Read the manifest, writing what this process knows of it and the server does not.

        Raises ManifestMismatchError when the run is another one; every later call does then as well.
        """
        known = self.manifest
        reply = yield manifest_call(self.run, self.settings, columns, known)
        try:
            self.manifest = parse_manifest(self.run, self.settings, reply, known)
        except ManifestMismatchError as error:
            self._refused = None if known is None else error
            raise
        if reply[0] and known is not None:
            yield register_call(self.run)
        return self.manifest

    def _laid_out(self, request: Callable[[], Request]) -> Steps[Any]:
        """The reply to a request that may open a group, made again once the shard knows the run's manifest."""
        while (reply := (yield request()))[0] == b"layout":
            manifest = yield from self._agree()
            for keys in manifest.keys.shards:
                yield script_call("lay_out", [keys.void, keys.ledger], [len(manifest.keys.salts)])
        return reply

    def until_heartbeat(self, usual: float) -> float:
        """Seconds to the next heartbeat, which also sends again what the server had no room for."""
        return min(usual, CATCH_UP_S) if self._resend.behind else usual

    def too_late(self, ticket: Ticket) -> bool:
        """Whether a rollout begun under this ticket can only be dropped as stale."""
        if self._drop_after is None or ticket.model_version is None or self.version is None:
            return False
        return self.version - ticket.model_version > self._drop_after

    def goodbye(self) -> Steps[None]:
        """On a clean exit: only a producer that has finished stays on the list."""
        self.failures.tell(now=True)
        if self._refused is None and self.manifest is not None:
            yield from self.withdraw()
            yield from self._say("finished" if self.finished else "gone")

    def _say(self, state: str) -> Steps[None]:
        if self.is_forked:
            return
        keys = self.joined.keys.home
        args = [self.name, state, "" if self._instance is None else self._instance]
        reply = yield script_call("heartbeat", [keys.void, keys.producers, keys.trainer], args)
        if reply[0]:
            self.version = int(reply[0])
        self._drop_after = int(reply[1]) if reply[1] else None
        if self._instance is None:
            self._instance = int(reply[2])
        elif int(reply[2]) != self._instance and not self._succeeded:
            self._succeeded = True
            logger.warning(
                "another producer has taken the name %s, and this one's place on the list", self.name
            )

    def finish(self) -> Steps[None]:
        """No more groups will come from this producer."""
        wait = Wait(Blocked(self._who, "not finished"))
        while not (yield from self._resend.check(self.joined.keys.voids)):
            wait.because(LOST_GROUPS_FIRST)
            yield Pause(wait.delay())
        self.finished = True
        yield from self.heartbeat()

    def _reopen(self) -> Steps[None]:
        if self.finished:
            self.finished = False
            yield from self.heartbeat()

    def withdraw(self) -> Steps[None]:
        """Undo the opening of groups by calls that ended without hearing of it."""
        for nonce, group_id in list(self._unclaimed.items()):
            keys = self._keys(group_id)
            names = [keys.void, keys.group(group_id), keys.open, keys.ledger]
            yield script_call("withdraw", names, [group_id, nonce])
            self._unclaimed.pop(nonce, None)

    def _keys(self, group_id: str) -> ShardKeys:
        if not isinstance(group_id, str):
            raise TrajectoryError(f"group_id is {brief(group_id)}, needs to be text")
        keys = self.joined.keys
        return keys.shard(keys.shard_of(group_id))

    def _admission(
        self,
        group_id: str,
        size: int,
        places: int,
        data_source: str | None,
        deadline_s: float | None,
        max_bytes: int | None = None,
        elsewhere: int | None = None,
    ) -> list[Any]:
        """The first arguments of the scripts that may open a group, see `lua/lib/admit.lua`.

        max_bytes: None = the shard's budget, for a group admitted before. Sizes were known then, which its server may
        have forgotten: it needs no more than there is.
        """
        manifest = self.joined
        each = manifest.max_trajectory_bytes
        if max_bytes is None:
            max_bytes = self.max_bytes
            each = max(1, min(each, max_bytes // places))
        deadline_ms = round((deadline_s or manifest.group_deadline_s) * 1000)
        return [
            group_id,
            size,
            places,
            data_source or "",
            deadline_ms,
            each,
            max_bytes,
            len(manifest.keys.salts),
            "" if elsewhere is None else elsewhere,
            "" if manifest.max_staleness is None else manifest.max_staleness,
            "" if manifest.batch_groups is None else manifest.batch_groups,
            self.name,
        ]

    def _room(self, group_id: str) -> int:
        """The byte budget for a group that may be new: none while its shard has no room for what it has lost.

        That was admitted once. Behind new groups it might wait until this producer dies and what it kept with it.
        """
        return NO_ROOM if self.joined.keys.shard_of(group_id) in self._resend.behind else self.max_bytes

    def _room_for_push(self) -> Wait:
        return Wait(Blocked(self._who, "a push waits"))

    def _wait_for_room(self, room: Wait, reason: Reason = ABOVE_MAXMEMORY) -> Steps[None]:
        room.because(reason)
        delay = room.delay()
        metrics.backpressure(delay)
        yield Pause(delay)
