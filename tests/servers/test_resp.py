"""Packed commands on a real server: it reads them, and every reply is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from streamadv.store.connection import Connection
from streamadv.store.resp import LARGE


def test_a_transaction_answers_with_its_call_or_raises_its_first_error(redis_url: str) -> None:
    with Connection(redis_url) as connection:
        client: Any = connection.push
        payloads = [("hash", {"a": np.arange(3, dtype="<i4"), b"b": b"1"})]
        assert client.transact(payloads, ("HGET", "hash", "a")) == np.arange(3, dtype="<i4").tobytes()
        with pytest.raises(ResponseError, match="unknown command 'NONE'"):  # nothing was done
            client.transact([("other", {"a": b""})], ("NONE",))
        assert client.exists("other") == 0
        client.set("text", "x")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            client.transact([("text", {"a": b""})], ("GET", "text"))
        assert client.get("text") == b"x"  # every reply has been read
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(OutOfMemoryError):
                client.transact(payloads, ("EVAL", "return 1", 0))
        finally:
            client.config_set("maxmemory", 0)


def test_a_server_reads_them(redis_url: str) -> None:
    values: dict[Any, Any] = {name: bytes([n]) * (LARGE // 2 * n) for n, name in enumerate("abcd")}
    with Connection(redis_url) as connection:
        pipe = connection.push.pipeline(transaction=True)
        pipe.hset("key", mapping={name: memoryview(value) for name, value in values.items()})
        pipe.hgetall("key")
        stored = pipe.execute()[1]
    assert stored == {name.encode(): value for name, value in values.items()}
