"""Turns of rollouts that a gateway plays: the script that appends them, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import streamadv as sa
from streamadv.gateway.turns import Store
from streamadv.producer.tickets import Ticket
from streamadv.run import open_run
from streamadv.store.connection import Connection
from tests.support import deep_problems, group_all, problems


class Playing:
    """A rollout and its store."""

    def __init__(self, producer: Any, ticket: Ticket, deadline_s: float = 60) -> None:
        self.producer, self.ticket, self.store = producer, ticket, Store(producer, deadline_s)

    async def append(self, known: int, *turns: bytes) -> tuple[str, list[Any]]:
        reply = await self.store.append(self.ticket, known, turns)
        return reply.state, list(reply.rest)

    async def read(self, known: int = 0) -> tuple[str, list[Any]]:
        reply = await self.store.read(self.ticket, known)
        return reply.state, list(reply.rest)


def play(url: str, run: str, test: Callable[..., Any], **options: Any) -> None:
    async def main() -> None:
        async with sa.Producer(url, run) as producer:
            group = await producer.begin_group(2, data_source="sums", **options)
            await test(Playing(producer, group.tickets[0]), group)

    asyncio.run(main())


def test_two_gateways_do_not_interleave(redis_url: str, run: str) -> None:
    async def test(rollout: Playing, _: Any) -> None:
        assert await rollout.read() == ("turns", [b"sums", b""])
        assert await rollout.append(0, b"one") == ("ok", [])
        assert await rollout.append(0, b"one") == ("ok", [])  # sent twice
        assert await rollout.append(0, b"other") == ("behind", [b"one"])
        assert await rollout.append(1, b"two", b"three") == ("ok", [])
        assert await rollout.append(1, b"two") == ("behind", [b"two", b"three"])
        assert await rollout.append(5, b"six") == ("lost", [3])
        assert await rollout.read(1) == ("turns", [b"sums", b"", b"two", b"three"])

    play(redis_url, run, test)


def test_a_slot_that_has_ended_takes_no_turn_and_keeps_none(redis_url: str, run: str) -> None:
    server = Connection(redis_url)

    def fields() -> list[bytes]:
        (key,) = server.scripts.scan_iter(match="*:group:*")
        return [
            name
            for name in server.scripts.hkeys(key)
            if name.startswith(b"turn:") or name.startswith(b"turns:")
        ]

    async def test(rollout: Playing, group: Any) -> None:
        other = Playing(rollout.producer, group.tickets[1])
        await rollout.append(0, b"one", b"two")
        await other.append(0, b"one")
        assert len(fields()) == 5
        await rollout.producer.rollout(rollout.ticket).push(
            input_ids=[1, 2], response_mask=[0, 1], rollout_log_probs=[0, -1], reward=1.0
        )
        assert await rollout.append(2, b"three") == ("ended", [b"p"])
        assert await rollout.read() == ("ended", [b"p"])
        assert sorted(fields()) == [b"turn:1:0", b"turns:1"]
        assert deep_problems(open_run(server, run)) == []
        (key,) = server.scripts.scan_iter(match="*:group:*")
        server.scripts.hset(key, "turn:0:0", "left behind")
        assert "turns of slots that have ended are kept: [0]" in deep_problems(open_run(server, run))[0]
        server.scripts.hdel(key, "turn:0:0")
        await group.cancel(indices=[1])
        assert await other.append(1, b"two") == ("ended", [b"p"])
        assert fields() == []
        joined = open_run(server, run)
        group_all(joined)
        assert deep_problems(joined) == []
        assert (await rollout.append(2, b"three"))[0] == "ended"

    play(redis_url, run, test)


def test_a_rollout_may_have_as_many_bytes_as_its_trajectory(redis_url: str, run: str) -> None:
    async def test(rollout: Playing, _: Any) -> None:
        most = rollout.store.most_bytes
        assert await rollout.append(0, b"x" * (most - 10)) == ("ok", [])
        assert await rollout.append(1, b"x" * 11) == ("large", [str(most + 1).encode()])
        assert await rollout.append(1, b"x" * 10) == ("ok", [])

    play(redis_url, run, test)


def test_a_turn_moves_the_deadline_on_and_seldom(redis_url: str, run: str) -> None:
    server = Connection(redis_url)

    def deadline() -> float:
        (key,) = server.scripts.scan_iter(match="*:open")
        return float(server.scripts.zrange(key, 0, -1, withscores=True)[0][1])

    async def test(rollout: Playing, _: Any) -> None:
        before = deadline()
        await rollout.append(0, b"one")
        first = deadline()
        assert first > before + 50_000
        await rollout.append(1, b"two")
        assert deadline() == first

    play(redis_url, run, test, deadline_s=1)


def test_a_group_that_the_server_has_lost_opens_again_with_its_turns(redis_url: str, run: str) -> None:
    server = Connection(redis_url)

    async def test(rollout: Playing, _: Any) -> None:
        await rollout.append(0, b"one")
        for pattern in ("*:group:*", "*:open", "*:ledger", "*:sizes"):
            server.scripts.delete(*server.scripts.scan_iter(match=pattern))
        assert await rollout.read() == ("none", [])
        assert await rollout.append(1, b"two") == ("lost", [0])
        assert problems(open_run(server, run)) == []
        assert await rollout.append(0, b"one", b"two") == ("ok", [])
        assert await rollout.read() == ("turns", [b"sums", b"", b"one", b"two"])
        elsewhere = Playing(rollout.producer, replace(rollout.ticket, rollout_index=7))
        assert (await elsewhere.append(0, b"one"))[0] == "ended"  # no such slot
        assert problems(open_run(server, run)) == []

    play(redis_url, run, test)


@pytest.mark.parametrize("way", ["expires", "completes with a redundant slot"])
def test_turns_go_with_their_group(redis_url: str, run: str, way: str) -> None:
    server = Connection(redis_url)

    async def test(rollout: Playing, group: Any) -> None:
        await rollout.append(0, b"one" * 1000)
        await rollout.store.share(group.group_id, '{"metadata":{}}')
        assert (await rollout.read())[1][1] == b'{"metadata":{}}'
        others = group.tickets[1:]
        for ticket in others if way != "expires" else others[:1]:
            await rollout.producer.rollout(ticket).push(
                input_ids=[1, 2],
                response_mask=[0, 1],
                rollout_log_probs=[0, -1],
                reward=float(ticket.rollout_index),
            )
        joined = open_run(server, run)
        if way == "expires":
            (key,) = server.scripts.scan_iter(match="*:open")
            server.scripts.zadd(key, {group.group_id: 0})
        group_all(joined)
        assert list(server.scripts.scan_iter(match="*:group:*")) == []
        assert deep_problems(joined) == []
        assert (await rollout.append(1, b"two"))[0] == "ended"

    play(redis_url, run, test, redundancy=1)
