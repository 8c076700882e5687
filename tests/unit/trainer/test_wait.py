"""A rank waits on the server for results; rank 0 for groups too, and rests after each: many come at one look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from streamadv.batch.leader import Leader
from streamadv.trainer import loop

now = [0.0]


@pytest.fixture(autouse=True)
def _only_waiting_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now[0] = 0.0
    monkeypatch.setattr(loop.clock, "now", lambda: now[0])


class Session(Leader):
    """A session of one shard whose server answers as told."""

    waits_for_groups = True  # type: ignore[assignment]

    def __init__(self, replies: list[Any], missing: int = 10) -> None:
        """missing: looks for groups until another batch can be named."""
        self.replies = replies
        self.asked: list[tuple[set[str], int]] = []
        self.missing = missing
        self.cursors = {0: "0-0"}
        keys: Any = SimpleNamespace(results="results", groups="groups")
        connection = SimpleNamespace(blocking=lambda _: SimpleNamespace(xread=self.xread))
        run: Any = SimpleNamespace(
            connection=connection, keys=SimpleNamespace(shards=[keys], shard=lambda _: keys)
        )
        self.run = run

    def xread(self, streams: dict[str, str], count: int, block: int) -> Any:
        self.asked.append((set(streams), block))
        reply = self.replies.pop(0) if self.replies else None
        if isinstance(reply, Exception):
            raise reply
        if reply is None:
            now[0] += block / 1000
        return None if reply is None else {reply.encode(): [(b"1-1", {})]}

    def could_name(self, _: int | None = None) -> bool:
        self.missing -= 1
        return self.missing == 0


def waited(session: Session, block_ms: int = 5000, is_leader: bool = True) -> list[tuple[set[str], int]]:
    asks: Any = session if is_leader else SimpleNamespace(run=session.run)
    collector: Any = SimpleNamespace(session=asks, cursors={0: "0-0"})
    loop.wait_for_news(collector, block_ms, lambda: session.could_name(None), lambda _: None)
    return session.asked


def test_a_result_ends_the_wait() -> None:
    assert len(waited(Session(["results"]))) == 1


def test_after_a_group_no_other_wakes_rank_0_for_a_moment() -> None:
    both, rest = ({"results", "groups"}, 5000), ({"results"}, loop.REST_MS)
    left = ({"results", "groups"}, 5000 - loop.REST_MS)
    assert waited(Session(["groups", None, "groups", "results"])) == [both, rest, left, rest]


def test_a_group_that_fills_the_batch_ends_the_wait() -> None:
    assert len(waited(Session(["groups", None, "groups"], missing=2))) == 3


def test_a_rank_that_names_nothing_waits_for_results_only() -> None:
    asked = waited(Session([None]), block_ms=20, is_leader=False)
    assert [streams for streams, _ in asked] == [{"results"}]


def test_a_demoted_primary_ends_the_wait_and_other_refusals_are_raised() -> None:
    blocked = ResponseError("UNBLOCKED force unblock from blocking operation")
    assert len(waited(Session([blocked]), block_ms=10)) == 1
    with pytest.raises(ResponseError, match="NOPERM"):
        waited(Session([ResponseError("NOPERM no")]))
