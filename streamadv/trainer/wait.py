"""Waits for news: new results, or enough groups for another batch."""

from __future__ import annotations

import threading
from typing import Any, Final

from redis.exceptions import ResponseError

from .. import clock
from ..batch.session import Session
from .results_log import ResultsLog

#: Longest pause of rank 0 between two reads of the groups logs, in seconds.
REST_S: Final = 0.1


class GroupPolls:
    """When rank 0 looks at the groups logs again: a look for each new group would cost more than reading the group.

    While groups come, the next look is due when the batch will be full, judging by those since the look before. After a
    look that found none, rank 0 rests the longer the more is missing, and then waits until the server has a group.
    """

    def __init__(self, session: Session, max_groups: int | None) -> None:
        self._session = session
        self._max_groups = max_groups
        self._looked = clock.now()
        self._missing = session.missing_fraction(max_groups)
        self._due = self._looked + REST_S * self._missing
        self.are_coming = False

    @property
    def rest_ms(self) -> int:
        """Milliseconds to the next look, at least 0; 0 also where this session names no batches."""
        return max(0, _ms_until(self._due)) if self._session.waits_for_groups else 0

    def look(self) -> bool:
        """Read on in the groups logs. True if another batch can be named."""
        if self._session.could_name(self._max_groups):
            return True
        now, missing = clock.now(), self._session.missing_fraction(self._max_groups)
        came = self._missing - missing
        self.are_coming = came > 0
        rest_s = missing * (now - self._looked) / came if self.are_coming else REST_S * missing
        # Cap the rest: groups may come faster from now on.
        self._looked, self._missing, self._due = now, missing, now + min(REST_S, 4 * REST_S * missing, rest_s)
        return False


def wait_for_news(
    session: Session, log: ResultsLog, block_ms: int, max_groups: int | None, stop: threading.Event
) -> None:
    """Return when a result has come, which `log` takes, or another batch can be named; at the latest after `block_ms`.

    The shards get equal parts of the time, one after another.
    """
    shards = range(len(session.run.keys.shards))
    part_ms = max(1, block_ms // len(shards))
    polls = GroupPolls(session, max_groups)
    started = clock.now()
    for shard in shards:
        if _wait_in_shard(session, shard, log, part_ms, polls):
            return
    session.look_again()
    if clock.now() - started < block_ms / 2000:
        stop.wait(part_ms / 1000)  # a server that does not block must not be asked in a loop


def _wait_in_shard(session: Session, shard: int, log: ResultsLog, part_ms: int, polls: GroupPolls) -> bool:
    """Wait for one shard's results and, between two rests, for its groups. True if there is news."""
    keys, until = session.run.keys.shard(shard), clock.now() + part_ms / 1000
    while (left_ms := _ms_until(until)) > 0:
        streams: dict[Any, Any] = {keys.results: log.cursors[shard]}
        rest_ms = polls.rest_ms
        if session.waits_for_groups and not rest_ms:
            if polls.are_coming:
                if polls.look():
                    return True
                continue
            streams[keys.groups] = session.cursors[shard]
        reply = _read_streams(session, streams, part_ms, min(left_ms, rest_ms or left_ms))
        if entries := reply.get(keys.results.encode()):
            log.take(shard, entries)
            session.look_again()
            return True
        if reply and polls.look():
            return True
        if not reply and not rest_ms:
            return False
    return False


def _read_streams(session: Session, streams: dict[Any, Any], part_ms: int, block_ms: int) -> dict[Any, Any]:
    client = session.run.connection.blocking(part_ms)
    try:
        reply: Any = client.xread(streams, count=1, block=block_ms)
    except ResponseError as error:
        if not str(error).startswith("UNBLOCKED"):  # a primary was demoted while this waited
            raise
        return {}
    return dict(reply or {})


def _ms_until(moment: float) -> int:
    return round((moment - clock.now()) * 1000)
