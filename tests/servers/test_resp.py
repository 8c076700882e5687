"""Packed commands on a real server: it reads them, and every reply is read."""

from __future__ import annotations

from typing import Any

import hiredis
import numpy as np
import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from streamadv.store.connection import Connection
from streamadv.store.exchange import LARGE
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import Cluster
from tests.support import delivered_batch, group_all, join, problems, producing, trajectory


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


def numbers_packed(url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the C packer gets that is no text, while a run takes a batch through all its stages."""
    pack, packed = hiredis.pack_command, list[Any]()

    def recorded(command: tuple[Any, ...]) -> bytes:
        packed.extend(command)
        return pack(command)

    monkeypatch.setattr(hiredis, "pack_command", recorded)
    with producing(url, run, {"max_trajectory_bytes": 1 << 14}) as producer:
        joined, queue = join(url, run), TrainerQueue(url, run, batch_groups=2)
        producer.push([trajectory("g", index, 2) for index in range(2)])
        with producer.group(1) as group:
            group.push([{"rollout_index": 0, "input_ids": [1], "response_mask": [1], "reward": 1.0}])
        group_all(joined)
        queue.trained(delivered_batch(queue, joined))
        assert problems(joined) == []
        queue.close()
    assert packed
    return [arg for arg in packed if not isinstance(arg, str | bytes)]


def test_no_number_reaches_the_c_packer(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints numbers by a call that runs signal handlers: one that raises, as Ctrl-C does, ends the process."""
    assert numbers_packed(redis_url, run, monkeypatch) == []


def test_no_number_reaches_the_c_packer_on_a_cluster(
    cluster: Cluster, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numbers_packed(cluster.url, run, monkeypatch) == []


def test_a_server_reads_them(redis_url: str) -> None:
    values: dict[Any, Any] = {name: bytes([n]) * (LARGE // 2 * n) for n, name in enumerate("abcd")}
    with Connection(redis_url) as connection:
        pipe = connection.push.pipeline(transaction=True)
        pipe.hset("key", mapping={name: memoryview(value) for name, value in values.items()})
        pipe.hgetall("key")
        stored = pipe.execute()[1]
    assert stored == {name.encode(): value for name, value in values.items()}
