"""Values of hashes are received where they belong, and whatever else the server replies is left to the ordinary way."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from streamadv.grouping.layout import Layout
from streamadv.run import open_run
from streamadv.store.connection import Connection
from streamadv.store.direct import MOST_PIECES, HashRead, receive
from streamadv.store.keys import manifest_key
from streamadv.trainer import fetch as module
from streamadv.trainer.memory import ColumnMemory
from streamadv.trainer.plan import Rank, share_of
from tests.support import CPU
from tests.unit.grouping.layouts import StoredGroups
from tests.unit.trainer.test_fetch import NAMES, end_to_end, trajectories_of
from tests.unit.trainer.test_fetch import store as store_payloads

Hashes = Mapping[str, Mapping[str, bytes]]


@pytest.fixture
def connection(redis_url: str) -> Connection:
    return Connection(redis_url)


def store(connection: Connection, hashes: Hashes) -> None:
    for key, fields in hashes.items():
        connection.scripts.hset(key, mapping=dict(fields))


def read(
    connection: Connection, sizes: Mapping[str, Mapping[str, list[int]]]
) -> tuple[Any, dict[str, dict[str, bytes]]]:
    """What `receive` returns, and what it leaves in pieces of these sizes, for keys and their fields."""
    memory = {
        key: {name: [bytearray(size) for size in pieces] for name, pieces in fields.items()}
        for key, fields in sizes.items()
    }
    reads = [
        HashRead(
            key,
            [name.encode() for name in fields],
            [[memoryview(piece) for piece in pieces] for pieces in fields.values()],
            [b"header", b"none"],
        )
        for key, fields in memory.items()
    ]
    replies = receive(connection.scripts, reads)
    return replies, {
        key: {name: b"".join(pieces) for name, pieces in fields.items()} for key, fields in memory.items()
    }


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_values_fill_their_pieces(connection: Connection, size: int) -> None:
    hashes = {
        f"hash {number}": {name: secrets.token_bytes(size) for name in ("a", "b", "header")}
        for number in range(3 * MOST_PIECES)
    }
    if size == 300_000:
        hashes = dict(list(hashes.items())[:5])
    store(connection, hashes)
    pieces = [size] if size < 3 else [1, size - 3, 2]
    replies, values = read(connection, {key: {"b": pieces, "a": [size]} for key in hashes})
    assert replies == [[fields["header"], None] for fields in hashes.values()]
    assert values == {key: {"b": fields["b"], "a": fields["a"]} for key, fields in hashes.items()}
    assert connection.scripts.ping()


def test_only_hashes_with_other_fields_have_a_reply(connection: Connection) -> None:
    store(connection, {key: {"a": b"123", "header": b"{}"} for key in ("first", "second", "third")})
    memory = [bytearray(3) for _ in range(3)]
    places = [[[memoryview(piece)]] for piece in memory]
    others: list[list[bytes]] = [[], [b"header"], []]
    keys = ("first", "second", "third")
    reads = [
        HashRead(key, [b"a"], place, other) for key, place, other in zip(keys, places, others, strict=True)
    ]
    assert receive(connection.scripts, reads) == [[b"{}"]]
    assert memory == [b"123"] * 3


OTHER: dict[str, dict[str, Any]] = {
    "shorter": {"a": b"12"},
    "longer": {"a": b"1" * 400},
    "missing": {"b": b"123"},
    "empty": {"a": b""},
    "like a reply": {"a": b"\r\n$3\r\n123\r\n"},
}


@pytest.mark.parametrize("what", OTHER)
def test_a_value_of_another_size_is_left_to_the_ordinary_way(connection: Connection, what: str) -> None:
    store(connection, {"first": {"a": b"123"}, "second": OTHER[what], "third": {"a": b"123"}})
    replies, _ = read(connection, {key: {"a": [3]} for key in ("first", "second", "third")})
    assert replies is None
    assert connection.scripts.hget("third", "a") == b"123", "no old reply is taken for a new one"


def test_what_is_no_hash_is_left_to_the_ordinary_way(connection: Connection) -> None:
    store(connection, {"first": {"a": b"123"}})
    connection.scripts.set("text", "123")
    assert read(connection, {"first": {"a": [3]}, "text": {"a": [3]}})[0] is None
    assert read(connection, {"text": {"a": [3]}, "first": {"a": [3]}})[0] is None
    assert connection.scripts.get("text") == b"123"


def test_another_client_is_left_to_the_ordinary_way(fake: Connection) -> None:
    store(fake, {"first": {"a": b"123"}})
    assert read(fake, {"first": {"a": [3]}})[0] is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_trainer_receives_its_columns_so(
    connection: Connection, run: str, monkeypatch: pytest.MonkeyPatch, seed: int, world_size: int
) -> None:
    monkeypatch.delattr(module, "fetch_replies")
    joined = open_run(connection, run)
    connection.scripts.hset(manifest_key(run), "column.pictures", '["<i8", [2], false]')
    stored = StoredGroups(seed, 6)
    store_payloads(joined, stored)
    for number in range(world_size):
        share = share_of(Layout.of(stored.groups), None, Rank(number, world_size, CPU))
        fetched = module.fetch(joined, share, ColumnMemory(CPU), None)
        trajectories = trajectories_of(stored, share)
        for name in NAMES:
            np.testing.assert_array_equal(fetched.columns[name].numpy(), end_to_end(trajectories, name))
