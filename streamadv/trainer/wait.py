"""Waits for news: new results, or enough groups for another batch."""

from __future__ import annotations

import threading
from typing import Any, Final

from redis.exceptions import ResponseError

from .. import clock
from ..batch.session import Session
from .results_log import ResultsLog

#: Milliseconds after a new group in which no other one wakes rank 0: waking costs more than reading a group.
REST_MS: Final = 20


def wait_for_news(
    session: Session, log: ResultsLog, block_ms: int, max_groups: int | None, stop: threading.Event
) -> None:
    """Return when a result has come, which `log` takes, or another batch can be named; at the latest after `block_ms`.

    The shards get equal parts of the time, one after another.
    """
    shards = range(len(session.run.keys.shards))
    part_ms = max(1, block_ms // len(shards))
    started = clock.now()
    for shard in shards:
        if _wait_in_shard(session, shard, log, part_ms, max_groups):
            return
    session.look_again()
    if clock.now() - started < block_ms / 2000:
        stop.wait(part_ms / 1000)  # a server that does not block must not be asked in a loop


def _wait_in_shard(
    session: Session, shard: int, log: ResultsLog, part_ms: int, max_groups: int | None
) -> bool:
    """Wait for one shard's results and groups. True if there is news."""
    keys, until, rests = session.run.keys.shard(shard), clock.now() + part_ms / 1000, False
    while (left_ms := round((until - clock.now()) * 1000)) > 0:
        streams: dict[Any, Any] = {keys.results: log.cursors[shard]}
        if session.waits_for_groups and not rests:
            streams[keys.groups] = session.cursors[shard]
        reply = _read_streams(session, streams, part_ms, min(left_ms, REST_MS) if rests else left_ms)
        if entries := reply.get(keys.results.encode()):
            log.take(shard, entries)
            session.look_again()
            return True
        if reply and session.could_name(max_groups):
            return True
        if not reply and not rests:
            return False
        rests = bool(reply)
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
