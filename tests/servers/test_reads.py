"""Values of hashes: each reply as soon as it has come."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from streamadv.store.connection import Connection
from streamadv.store.exchange import Client
from streamadv.store.replies import read_hashes


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
