"""Processes of different releases in one run: what may differ, and what is refused before anything is touched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from streamadv.errors import SettingError
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer
from streamadv.producer import push as pushing
from streamadv.run import open_run
from streamadv.store.connection import Connection
from streamadv.store.keys import EntryKeys
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.columns import HEADER
from streamadv.trajectory.members import Checked
from streamadv.trajectory.packet import SCHEMA_VERSION
from streamadv.trajectory.packet_encoding import Packet
from tests.support import delivered_batch, join, ledger, next_batch, problems, push_groups


def newer_packet(packet: Packet) -> Packet:
    """Of a release that knows one field more in the header."""
    header = {
        **json.loads(packet.fields[HEADER]),
        "novelty": 1,
        "members": [{"novelty": 1}] * len(packet.indices),
    }
    fields = {**packet.fields, HEADER: json.dumps(header).encode()}
    return packet._replace(fields=fields, size=packet.size - len(packet.fields[HEADER]) + len(fields[HEADER]))


def test_a_field_that_a_newer_release_adds_passes_through_an_older_one(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a schema version fields are only ever added, and left alone by who does not know them."""
    encode = pushing.encode_packets

    def encode_newer(items: Sequence[Checked], *settings: Any) -> list[Packet]:
        return [newer_packet(packet) for packet in encode(items, *settings)]

    joined = join(redis_url, run)
    with Producer(redis_url, run) as older:
        push_groups(older, 2, prefix="old")
        monkeypatch.setattr(pushing, "encode_packets", encode_newer)
        with Producer(redis_url, run) as newer:
            push_groups(newer, 2, prefix="new")
            newer.finish()
        older.finish()
    queue = TrainerQueue(redis_url, run, batch_groups=4, commit="each_batch")
    batch = delivered_batch(queue, joined)
    assert {reference.group_id for reference in batch.references} == {
        "new0000",
        "new0001",
        "old0000",
        "old0001",
    }
    assert next_batch(queue, joined) is None
    queue.close()
    assert ledger(joined)["trained"] == 8
    assert problems(joined) == []


def test_every_role_refuses_a_run_of_another_schema_version(redis_url: str, run: str) -> None:
    """It stays as it is, for processes of that release."""
    with Connection(redis_url) as connection:
        with Producer(connection, run) as producer:
            push_groups(producer, 1)
        connection.scripts.hset(EntryKeys(run).manifest, "schema_version", json.dumps(SCHEMA_VERSION + 1))
        before = {key: connection.scripts.dump(key) for key in connection.scripts.keys("*")}
        roles = (
            lambda: Producer(connection, run).open(),
            lambda: open_run(connection, run),  # groupers, advantage workers, status
            lambda: Scorer(connection, run, "judge"),
            lambda: TrainerQueue(connection, run, commit="each_batch").next_batch(timeout=0),
        )
        for role in roles:
            with pytest.raises(
                SettingError, match=f"schema version {SCHEMA_VERSION + 1}.* reads {SCHEMA_VERSION}"
            ):
                role()
        assert {key: connection.scripts.dump(key) for key in connection.scripts.keys("*")} == before
