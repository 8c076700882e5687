"""How a producer begins groups: admission, waiting for it, and calls that nobody waits for any more."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from .. import metrics
from ..errors import GroupEndedError, TrajectoryError
from ..run.manifest import MAX_DEADLINE_S
from ..store.scripts import script_call
from ..store.waiting import Wait
from .admission import broken_group_error, busy_error, check_room, refusal
from .membership import Member
from .requests import Pause, Steps
from .tickets import Ticket, check_group, check_seconds, new_group_id

logger = logging.getLogger(__name__)

#: First wait for admission: about what a batch takes of a trainer that keeps up.
ADMISSION_WAIT_S: Final = 0.005


@dataclass(slots=True)
class Call:
    """One call of `begin`: by its nonce the server knows which group it opened."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    wanted: bool = True  # whether the caller still waits


class Beginner(Member):
    """A member of a run that begins groups."""

    def begin(
        self,
        size: int,
        group_id: str | None,
        data_source: str | None,
        metadata: Mapping[str, Any] | None,
        deadline_s: float | None,
        redundancy: int | None,
        timeout: float | None,
        call: Call | None = None,
    ) -> Steps[list[Ticket]]:
        """Admit a group, waiting up to `timeout` seconds (None = for ever). Raises Busy, GroupEndedError."""
        call = call or Call()
        manifest = self.joined
        redundancy = manifest.redundancy if redundancy is None else redundancy
        shared = check_group(
            new_group_id() if group_id is None else group_id, size, redundancy, data_source, metadata
        )
        group_id = group_id and shared.group_id
        deadline_s = check_seconds("deadline_s", deadline_s, MAX_DEADLINE_S)
        timeout = check_seconds("timeout", timeout, zero=True)
        places = size + redundancy
        yield from self._reopen()
        yield from self.withdraw()
        wait = Wait(self._not_admitted, timeout=timeout, base=ADMISSION_WAIT_S)
        while True:
            chosen = group_id or new_group_id()
            reply = yield from self._begin(call, chosen, size, places, data_source, deadline_s)
            if self._over_share(reply):
                counts = yield from self._groups_ahead()
                if group_id is None:
                    chosen = self._new_id_in(counts.index(min(counts)))
                elsewhere = sum(counts) - counts[self.joined.keys.shard_of(chosen)]
                reply = yield from self._begin(call, chosen, size, places, data_source, deadline_s, elsewhere)
            state = reply[0].decode()
            if state in ("ok", "open"):
                wait.over()
                if self.closed or not call.wanted:
                    self.forgo(call, chosen)
                    self.check_open()
                    return []
                places = int(reply[3])
                self.version = version = int(reply[2] or 0)
                return [
                    Ticket(
                        chosen,
                        index,
                        size,
                        places,
                        int(reply[1]),
                        version,
                        shared.data_source,
                        dict(shared.metadata),
                    )
                    for index in range(places)
                ]
            if state == "ended":
                raise GroupEndedError(f"group {chosen} has ended: begin another one")
            if state == "broken":
                raise broken_group_error(chosen)
            if state == "mismatch":
                raise TrajectoryError(f"group_size is {size}, group {chosen} is open with {int(reply[1])}")
            check_room(reply, places)
            shard = self.joined.keys.shard_of(chosen) if len(self.joined.keys.salts) > 1 else None
            wait.because(refusal(reply, shard))
            if wait.expired:
                raise busy_error(reply, timeout, shard)
            delay = wait.delay()
            metrics.backpressure(delay)
            yield Pause(delay)
            if not call.wanted:
                return []

    def forgo(self, call: Call, group_id: str) -> None:
        """Nobody has heard, or wants to hear, that this call may have opened the group."""
        self._unclaimed[call.nonce] = group_id

    def _begin(
        self,
        call: Call,
        group_id: str,
        size: int,
        places: int,
        data_source: str | None,
        deadline_s: float | None,
        elsewhere: int | None = None,
    ) -> Steps[list[Any]]:
        """Ask for admission once. elsewhere: groups that count in the other shards."""
        self._tell_if_unpaced()
        keys = self._keys(group_id)
        room = self._room(group_id)
        args = self._admission(group_id, size, places, data_source, deadline_s, room, elsewhere)
        try:
            ask = partial(script_call, "begin", keys.admission(group_id), [*args, call.nonce])
            reply: list[Any] = yield from self._laid_out(ask)
        except OutOfMemoryError:  # above maxmemory, the fuse: what is there drains, then there is room
            return [b"busy", b"maxmemory", 0, 0]
        except BaseException:  # also the end of the steps: the answer has not come, and may have been yes
            self.forgo(call, group_id)
            raise
        return reply

    def _over_share(self, reply: Sequence[Any]) -> bool:
        """Whether a shard has its share of the groups that may be ahead, which other shards may have less of."""
        return reply[:2] == [b"busy", b"max_staleness"] and len(self.joined.keys.salts) > 1

    def _groups_ahead(self) -> Steps[list[int]]:
        """How many groups count in pacing, of each shard."""
        counts = []
        for keys in self.joined.keys.shards:
            counts.append((yield script_call("ahead", [keys.open, keys.groups, keys.ledger, keys.trainer])))
        return counts

    def _new_id_in(self, shard: int) -> str:
        while self.joined.keys.shard_of(group_id := new_group_id()) != shard:
            pass
        return group_id

    def _tell_if_unpaced(self) -> None:
        manifest = self.joined
        known = self.version is not None or None not in (manifest.batch_groups, manifest.max_staleness)
        if known or self._told_unpaced:
            return
        self._told_unpaced = True
        logger.warning(
            "run %s has no trainer yet: until one starts only max_bytes (%d) limits how many groups are begun, "
            "all at version 0; `streamadv runs create --batch-groups N --max-staleness N` paces them until then",
            self.run,
            self.max_bytes * len(manifest.keys.salts),
        )
