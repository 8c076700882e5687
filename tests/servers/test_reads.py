"""Values of hashes: each reply as soon as it has come, or the values of one hash in their places."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamadv.grouping.groups_log import read_log
from streamadv.store.clients import Client
from streamadv.store.connection import Connection
from streamadv.store.replies import read_hashes
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.packet import MAX_PACKET_BYTES
from tests.support import group_all, join, ledger, next_batch, producing


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with Connection(redis_url) as connection:
        assert isinstance(connection.scripts, Client)
        yield connection.scripts


def commands_of(*keys: str) -> list[tuple[str, ...]]:
    return [("HMGET", key, "a", "b") for key in keys]


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_replies_come_in_order(client: Any, size: int) -> None:
    values = {f"hash {number}": [secrets.token_bytes(size), b""] for number in range(20)}
    for key, (first, second) in values.items():
        client.hset(key, mapping={"a": first, "b": second})
    assert list(read_hashes(client, commands_of(*values))) == list(values.values())


def test_a_key_of_another_kind_gives_nothing_and_the_rest_is_read(client: Any) -> None:
    client.set("text", "123")
    client.hset("hash", "b", "2")
    replies = list(read_hashes(client, commands_of("text", "hash", "none")))
    assert replies == [None, [None, b"2"], [None, None]]


def test_what_nobody_has_taken_answers_no_other_call(client: Any) -> None:
    client.hset("hash", mapping={"a": "1" * 100_000, "b": "2"})
    replies = read_hashes(client, commands_of("hash", "hash", "hash"))
    assert next(replies)[1] == b"2"
    replies.close()
    assert client.hget("hash", "b") == b"2"


def test_the_rest_is_asked_for_again_when_a_connection_breaks(client: Any) -> None:
    keys = [f"hash {number}" for number in range(40)]
    for key in keys:
        client.hset(key, mapping={"a": key * 10_000, "b": key})
    read = []
    for reply in read_hashes(client, commands_of(*keys)):
        if not read:
            others = [each["id"] for each in client.client_list() if each["id"] != client.client_id()]
            for other in others:
                client.client_kill_filter(_id=other)
        read.append(reply[1].decode())
    assert read == keys


@pytest.mark.parametrize("size", [1, 1000, 3_000_000])
def test_values_fill_their_places(client: Any, size: int) -> None:
    values = {name: secrets.token_bytes(size) for name in ("a", "b")}
    client.hset("hash", mapping=values)
    places = {name: bytearray(size) for name in ("b", "a")}
    again = {name: bytearray(size) for name in places}
    wanted = [("hash", {name: memoryview(place) for name, place in each.items()}) for each in (places, again)]
    assert client.fill(wanted) == 2
    assert places == again == values
    assert client.ping()


OTHER: dict[str, dict[str, Any]] = {
    "shorter": {"a": b"12"},
    "longer": {"a": b"1" * 400},
    "missing": {"b": b"123"},
    "empty": {"a": b""},
    "like a reply": {"a": b"\r\n$3\r\n123\r\n"},
}


@pytest.mark.parametrize("what", [*OTHER, "text", "gone"])
def test_another_reply_is_none_and_answers_no_other_call(client: Any, what: str) -> None:
    if what in OTHER:
        client.hset("hash", mapping=OTHER[what])
    elif what == "text":
        client.set("hash", "123")
    client.set("other", "value")
    client.hset("before", mapping={"a": b"abc"})
    place = bytearray(3)
    wanted = [(key, {"a": memoryview(each)}) for key, each in (("before", place), ("hash", bytearray(3)))]
    assert client.fill([*wanted, ("before", {"a": memoryview(bytearray(3))})]) == 1
    assert place == b"abc"
    assert client.get("other") == b"value", "no old reply is taken for a new one"


def test_a_broken_connection_fills_nothing(client: Any) -> None:
    client.hset("hash", "a", "123")
    connection = client.connection_pool.get_connection()
    connection._sock.shutdown(socket.SHUT_RDWR)
    client.connection_pool.release(connection)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamadv.store.exchange._is_dirty", lambda _: False)
        assert not client.fill([("hash", {"a": memoryview(bytearray(3))})])
    assert client.hget("hash", "a") == b"123"


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_trainer_receives_large_trajectories_so(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    filled: list[int] = []
    fill = Client.fill

    def spy(client: Client, wanted: Any) -> int:
        filled.append(fill(client, wanted))
        return filled[-1]

    monkeypatch.setattr(Client, "fill", spy)
    tokens = MAX_PACKET_BYTES // 5 + 1
    ids = np.arange(2 * tokens, dtype=np.int32).reshape(2, tokens)
    mask = np.ones(tokens, np.uint8)
    with Connection(redis_url) as connection, producing(connection, run) as producer:
        joined = join(connection, run)
        queue = TrainerQueue(connection, run, batch_groups=1, commit="each_batch")
        queue.open()
        records = [{"input_ids": row, "response_mask": mask, "reward": float(row[0])} for row in ids]
        producer.begin_group(2).push([{**record, "rollout_index": i} for i, record in enumerate(records)])
        group_all(joined)
        if spoilt:
            [group] = read_log(joined, 0, "0-0", 1)
            connection.scripts.hset(group.payloads[1][0], "header", b"[")
        batch = next_batch(queue, joined)
        queue.close()
        assert filled[0] == 2 - spoilt
        if spoilt:
            assert ledger(joined)["dead"] == {"undecodable": 2}
            return
        assert batch is not None
        [micro_batch] = batch
        assert np.array_equal(micro_batch.input_ids.numpy(), ids.reshape(-1))
