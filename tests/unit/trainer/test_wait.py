"""A rank waits on the server for results; rank 0 for groups too, and rests after each, so that many come at one look."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from streamadv.trainer import wait
from streamadv.trainer.wait import wait_for_news

now = [0.0]


@pytest.fixture(autouse=True)
def _only_waiting_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now[0] = 0.0
    monkeypatch.setattr(wait.clock, "now", lambda: now[0])


class Session:
    """A session of one shard whose server answers as told."""

    def __init__(self, replies: list[Any], missing: int = 10, waits_for_groups: bool = True) -> None:
        """missing: looks for groups until another batch can be named."""
        self.replies = replies
        self.asked: list[tuple[set[str], int]] = []
        self.missing = missing
        self.waits_for_groups = waits_for_groups
        self.cursors = {0: "0-0"}
        self.looks_again = False
        self.taken: list[Any] = []
        keys = SimpleNamespace(results="results", groups="groups")
        connection = SimpleNamespace(blocking=lambda _: SimpleNamespace(xread=self.xread))
        self.run = SimpleNamespace(
            connection=connection, keys=SimpleNamespace(shards=[keys], shard=lambda _: keys)
        )

    def xread(self, streams: dict[str, str], count: int, block: int) -> Any:
        self.asked.append((set(streams), block))
        reply = self.replies.pop(0) if self.replies else None
        if isinstance(reply, Exception):
            raise reply
        if reply is None:
            now[0] += block / 1000
        return None if reply is None else {reply.encode(): [(b"1-1", {})]}

    def look_again(self) -> None:
        self.looks_again = True

    def could_name(self, _: int | None) -> bool:
        self.missing -= 1
        return self.missing == 0


def waited(session: Session, block_ms: int = 5000) -> list[tuple[set[str], int]]:
    log = SimpleNamespace(cursors={0: "0-0"}, take=lambda *taken: session.taken.append(taken))
    wait_for_news(session, log, block_ms, None, threading.Event())  # type: ignore[arg-type]
    return session.asked


def test_a_result_that_ends_the_wait_is_taken() -> None:
    waited(session := Session(["results"]))
    assert session.taken == [(0, [(b"1-1", {})])]


def test_after_a_group_no_other_wakes_rank_0_for_a_moment() -> None:
    both, rest = ({"results", "groups"}, 5000), ({"results"}, wait.REST_MS)
    left = ({"results", "groups"}, 5000 - wait.REST_MS)
    assert waited(Session(["groups", None, "groups", "results"])) == [both, rest, left, rest]


def test_a_group_that_fills_the_batch_ends_the_wait() -> None:
    assert len(waited(Session(["groups", None, "groups"], missing=2))) == 3


@pytest.mark.parametrize(("reply", "expected"), [("results", True), (None, True), ("groups", False)])
def test_groups_are_looked_for_after_a_wait_unless_it_did(reply: str | None, expected: bool) -> None:
    waited(session := Session([reply], missing=1), block_ms=20)
    assert session.looks_again is expected


def test_a_rank_that_names_nothing_waits_for_results_only() -> None:
    asked = waited(Session([None], waits_for_groups=False), block_ms=20)
    assert [streams for streams, _ in asked] == [{"results"}]


def test_a_demoted_primary_ends_the_wait_and_other_refusals_are_raised() -> None:
    blocked = ResponseError("UNBLOCKED force unblock from blocking operation")
    assert len(waited(Session([blocked], waits_for_groups=False), block_ms=10)) == 1
    with pytest.raises(ResponseError, match="NOPERM"):
        waited(Session([ResponseError("NOPERM no")]))
