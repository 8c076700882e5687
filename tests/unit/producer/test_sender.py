"""Pushes of many tasks in few calls: what goes together, and that no task pays for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import redis.exceptions

from streamadv.producer.requests import MAX_SLICE_BYTES, MAX_SLICE_PACKETS, GroupPush, Push
from streamadv.producer.sender import MAX_UNDER_WAY, Sender
from streamadv.store.keys import ShardKeys
from streamadv.trajectory.packet_encoding import Packet, ended_packets
from tests.support import packets_of, trajectory

KEYS = ShardKeys("r:0:0")


def push_of(group: str, *indices: int, size: int = 1, **fields: Any) -> Push:
    packet = Packet(tuple(range(len(indices))), indices, "", b"", size, {})
    groups = [GroupPush((group, 8, 8, "", 1000), 0, [packet])]
    return Push(**{"keys": KEYS, "scorer": "", "limits": (), "groups": groups, **fields})


def answer(push: Push) -> list[list[bytes]]:
    """A code for each member: its index."""
    return [
        [b"ok", *(b"%d" % index for packet in group.packets for index in packet.indices)]
        for group in push.groups
    ]


class Server:
    """Answers calls when told to, in any order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Push, asyncio.Future[Any]]] = []
        self.sender = Sender(self._call)

    async def _call(self, push: Push) -> Any:
        future = asyncio.get_running_loop().create_future()
        self.calls.append((push, future))
        return await future

    async def answer_all(self, pushing: Sequence[asyncio.Future[Any]]) -> None:
        while not all(future.done() for future in pushing):
            for push, future in self.calls:
                if not future.done():
                    future.set_result(answer(push))
            await asyncio.sleep(0)

    def groups(self) -> list[list[str]]:
        """Of each call the groups."""
        return [[group.spec[0] for group in push.groups] for push, _ in self.calls]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_is_pushed_in_one_turn_goes_together() -> None:
    server = Server()
    pushing = [server.sender.push(push) for push in (push_of("a", 0), push_of("b", 3, 1), push_of("a", 2))]
    await server.answer_all(pushing)
    assert server.groups() == [["a", "b"]]
    assert [await future for future in pushing] == [[[b"ok", b"0"]], [[b"ok", b"3", b"1"]], [[b"ok", b"2"]]]


async def test_members_of_a_group_go_in_one_packet_and_hear_their_own_codes() -> None:
    server = Server()
    pushes = []
    for index in (3, 0, 0, 1):
        (packet,) = packets_of([trajectory("a", index)], 1 << 20)
        pushes.append(push_of("a", 0)._replace(groups=[GroupPush(("a", 8, 8, "", 1000), 0, [packet])]))
    pushing = [server.sender.push(push) for push in pushes]
    await turns()
    (group,) = server.calls[0][0].groups
    assert [packet.indices for packet in group.packets] == [(0,), (0,), (1, 3)]
    server.calls[0][1].set_result([[b"ok", b"pushed", b"duplicate", b"again", b"range"]])
    answers = [reply for ((_, *reply),) in await asyncio.gather(*pushing)]
    assert answers == [[b"range"], [b"pushed"], [b"duplicate"], [b"again"]]


@pytest.mark.parametrize("first", ["push", "cancel"])
async def test_of_two_ends_of_a_rollout_the_first_one_counts(first: str) -> None:
    server = Server()
    (usable,) = packets_of([trajectory("a", 0)], 1 << 20)
    (cancelled,) = ended_packets([0], "cancelled")
    packets = [usable, cancelled] if first == "push" else [cancelled, usable]
    pushes = [push_of("a", 0)._replace(groups=[GroupPush(("a",), 0, [packet])]) for packet in packets]
    pushing = [server.sender.push(push) for push in pushes]
    await turns()
    assert server.calls[0][0].groups[0].packets == packets
    server.calls[0][1].set_result([[b"ok", b"pushed", b"duplicate"]])
    assert await asyncio.gather(*pushing) == [[[b"ok", b"pushed"]], [[b"ok", b"duplicate"]]]


async def test_what_comes_while_two_calls_are_under_way_goes_together() -> None:
    server = Server()
    pushing = []
    for number in range(10):
        pushing.append(server.sender.push(push_of(f"g{number}", 0)))
        await turns()
    assert len(server.calls) == MAX_UNDER_WAY
    await server.answer_all(pushing)
    assert server.groups() == [["g0"], ["g1"], [f"g{number}" for number in range(2, 10)]]


@pytest.mark.parametrize(
    ("size", "most"), [(1, MAX_SLICE_PACKETS), (MAX_SLICE_BYTES // 4, 4), (MAX_SLICE_BYTES + 1, 1)]
)
async def test_a_call_is_bounded(size: int, most: int) -> None:
    server = Server()
    pushing = [server.sender.push(push_of(f"g{number}", 0, size=size)) for number in range(300)]
    await server.answer_all(pushing)
    assert max(len(groups) for groups in server.groups()) == most
    assert sum(len(groups) for groups in server.groups()) == 300


async def test_shards_and_limits_of_admission_have_calls_of_their_own() -> None:
    server = Server()
    pushes = [push_of("a", 0), push_of("b", 0, limits=(1,)), push_of("c", 0, keys=ShardKeys("r:1:0"))]
    pushing = [server.sender.push(push) for push in pushes]
    await server.answer_all(pushing)
    assert server.groups() == [["a"], ["b"], ["c"]]


async def test_a_refusal_of_a_group_is_its_own() -> None:
    server = Server()
    pushing = [server.sender.push(push_of(name, 0)) for name in "aab"]
    await turns()
    server.calls[0][1].set_result([[b"busy", b"max_bytes"], [b"ok", b"pushed"]])
    assert await asyncio.gather(*pushing) == [[[b"busy", b"max_bytes"]]] * 2 + [[[b"ok", b"pushed"]]]


async def test_a_call_that_fails_fails_for_those_in_it() -> None:
    server = Server()
    pushing = [server.sender.push(push_of("a", 0)), server.sender.push(push_of("b", 0))]
    await turns()
    later = server.sender.push(push_of("c", 0))
    server.calls[0][1].set_exception(redis.exceptions.ConnectionError("lost"))
    outcomes = await asyncio.gather(*pushing, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [redis.exceptions.ConnectionError] * 2
    await server.answer_all([later])
    assert server.groups() == [["a", "b"], ["c"]]


@pytest.mark.parametrize("moment", ["waiting", "under way"])
async def test_a_cancelled_pusher_costs_nobody_else(moment: str) -> None:
    server = Server()
    first, second, third = (server.sender.push(push_of(name, 0)) for name in "abc")
    if moment == "under way":
        await turns()
    second.cancel()
    await server.answer_all([first, third])
    assert [await first, await third] == [[[b"ok", b"0"]]] * 2
    assert server.groups() == [["a", "b", "c"] if moment == "under way" else ["a", "c"]]


async def test_closing_fails_what_is_not_sent() -> None:
    server = Server()
    pushing = [server.sender.push(push_of(f"g{number}", 0)) for number in range(2)]
    server.sender.close()
    outcomes = await asyncio.gather(*pushing, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [redis.exceptions.ConnectionError] * 2
    await turns()
    assert server.calls == []


def test_a_loop_that_ends_leaves_no_pusher_waiting() -> None:
    async def work() -> None:
        server = Server()
        pushing = [server.sender.push(push_of("a", 0))]
        await turns()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        outcomes = await asyncio.gather(*pushing, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [redis.exceptions.ConnectionError]

    asyncio.run(work())


async def test_a_call_that_is_cancelled_before_it_begins_blocks_nobody() -> None:
    """As by a program that cancels all its tasks, then ends its producers."""
    server = Server()
    for _ in range(MAX_UNDER_WAY):
        pushing = server.sender.push(push_of("a", 0))
        asyncio.get_running_loop().call_soon(cancel_others)
        outcomes = await asyncio.gather(pushing, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [redis.exceptions.ConnectionError]
    assert server.calls == []
    later = server.sender.push(push_of("b", 0))
    await server.answer_all([later])


def cancel_others() -> None:
    for task in asyncio.all_tasks():
        if task.get_coro().__name__ == "_send":  # type: ignore[union-attr]
            task.cancel()
