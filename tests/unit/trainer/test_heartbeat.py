"""The heartbeat of a rank goes on through outages of the server."""

from __future__ import annotations

import pytest
import redis.exceptions

from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from streamadv.trainer.session import Heartbeat
from tests.support import join


@pytest.mark.parametrize(
    "error", [redis.exceptions.ConnectionError("away"), redis.exceptions.RedisClusterException("away")]
)
def test_an_outage_does_not_end_it(
    error: Exception, fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[str] = []

    def away(_shard: object, script: str, *_arguments: object) -> None:
        beats.append(script)
        raise error

    monkeypatch.setattr(
        Heartbeat, "start", lambda heartbeat, session: setattr(heartbeat, "_session", session)
    )
    queue = TrainerQueue(fake, "r")
    queue.open()
    run = join(fake, "r")
    monkeypatch.setattr(type(run.home), "call", away)
    queue._sessions._heartbeat.beat()
    queue._sessions._heartbeat.beat()
    assert beats == ["attend"] * 2
