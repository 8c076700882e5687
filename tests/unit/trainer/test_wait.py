"""Rank 0 looks at the groups logs rarely while much of a batch is missing, and at once when the last group comes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from streamadv.trainer import wait
from streamadv.trainer.wait import GroupPolls, wait_for_news

now = [0.0]


@pytest.fixture(autouse=True)
def _only_waiting_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now[0] = 0.0
    monkeypatch.setattr(wait.clock, "now", lambda: now[0])


class Session:
    """A session of one shard whose server answers as told."""

    def __init__(
        self,
        replies: list[Any],
        missing: float = 1.0,
        waits_for_groups: bool = True,
        found: Sequence[float] = (),
    ) -> None:
        """found: what each look finds of a batch."""
        self.found = list(found)
        self.replies = replies
        self.asked: list[tuple[set[str], int]] = []
        self.missing = missing
        self.waits_for_groups = waits_for_groups
        self.cursors = {0: "0-0"}
        self.looks, self.looks_again = 0, False
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

    def missing_fraction(self, _: int | None) -> float:
        return self.missing

    def could_name(self, _: int | None) -> bool:
        self.looks += 1
        self.missing -= self.found.pop(0) if self.found else 0.0
        return self.missing <= 0


def waited(session: Session, block_ms: int = 5000) -> list[tuple[set[str], int]]:
    log = SimpleNamespace(cursors={0: "0-0"}, take=lambda *taken: session.taken.append(taken))
    wait_for_news(session, log, block_ms, None, threading.Event())  # type: ignore[arg-type]
    return session.asked


def test_groups_are_left_alone_while_a_whole_batch_is_missing() -> None:
    asked = waited(Session([None, "results"]))
    assert [streams for streams, _ in asked] == [{"results"}, {"results", "groups"}]
    assert asked[0][1] <= wait.REST_S * 1000 < asked[1][1]


def test_a_result_that_ends_the_wait_is_taken() -> None:
    waited(session := Session(["results"]))
    assert session.taken == [(0, [(b"1-1", {})])]


def test_the_next_look_is_due_when_the_batch_will_be_full() -> None:
    """As groups have come since the look before, and the sooner the less is missing."""
    session = Session([], found=[0.8, 0.1, 0.05])
    polls = GroupPolls(session, None)  # type: ignore[arg-type]
    rests = []
    for _ in range(2):
        now[0] += 0.1
        assert not polls.look()
        rests.append(polls.rest_ms)
    now[0] += 0.01
    polls.look()
    assert [*rests, polls.rest_ms] == [25, 40, 10]


def test_a_group_that_fills_the_batch_ends_the_wait() -> None:
    session = Session(["groups"], missing=0.0)
    assert [streams for streams, _ in waited(session)] == [{"results", "groups"}]
    assert session.looks == 1


def test_while_groups_come_a_look_follows_the_rest() -> None:
    session = Session([None, "groups", None, None, None, "results"], found=[0.25, 0.25, 0.0])
    streams = [streams for streams, _ in waited(session)]
    assert streams == [{"results"}, {"results", "groups"}, *[{"results"}] * 3, {"results", "groups"}]
    assert session.looks == 3, "the last one found nothing, so the server is to say when a group comes"


def test_the_look_that_fills_a_batch_ends_the_wait() -> None:
    session = Session([None, "groups", None], found=[0.5, 0.5])
    assert [streams for streams, _ in waited(session)] == [{"results"}, {"results", "groups"}, {"results"}]
    assert session.looks == 2


@pytest.mark.parametrize(("reply", "expected"), [("results", True), (None, True), ("groups", False)])
def test_groups_are_looked_for_after_a_wait_unless_it_did(reply: str | None, expected: bool) -> None:
    waited(session := Session([reply], missing=0.0 if reply == "groups" else 1.0), block_ms=20)
    assert session.looks_again is expected


def test_a_rank_that_names_nothing_waits_for_results_only() -> None:
    asked = waited(Session([None], waits_for_groups=False), block_ms=20)
    assert [streams for streams, _ in asked] == [{"results"}]


def test_a_demoted_primary_ends_the_wait_and_other_refusals_are_raised() -> None:
    blocked = ResponseError("UNBLOCKED force unblock from blocking operation")
    assert len(waited(Session([blocked], waits_for_groups=False), block_ms=10)) == 1
    with pytest.raises(ResponseError, match="NOPERM"):
        waited(Session([ResponseError("NOPERM no")]))


def test_the_rest_shrinks_as_the_batch_fills() -> None:
    rests = [GroupPolls(Session([], missing), None).rest_ms for missing in (1.0, 0.5, 0.0, -0.1)]  # type: ignore[arg-type]
    assert rests[0] > rests[1] > rests[2] == rests[3] == 0
