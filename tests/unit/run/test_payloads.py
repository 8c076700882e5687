"""Reading payloads: the columns asked for, of many packets, and what is said of those that cannot be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamadv.run import Run
from streamadv.run.packets import fetch_columns
from streamadv.store.connection import Connection
from streamadv.trajectory.packet import StoredPacket
from tests.support import join, members_in, trajectory

HEADER = b'{"group_size":2}'
COLUMNS = ("input_ids", "response_mask", "rollout_log_probs")


@pytest.fixture
def joined(fake: Connection) -> Run:
    return join(fake, "payloads")


def stored(run: Run, key: str = "payload", **changes: Any) -> StoredPacket:
    """A packet of two trajectories of 5 and 3 tokens, whose payload has these fields changed (None: left out)."""
    items = [trajectory("g", 0, tokens=5), trajectory("g", 1, tokens=3)]
    rows = [item.rows[0].columns for item in items]
    fields: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]).tobytes() for name in COLUMNS}
    fields = {**fields, "header": HEADER, **changes}
    run.connection.scripts.delete(key)
    run.connection.scripts.hset(
        key, mapping={name: value for name, value in fields.items() if value is not None}
    )
    return StoredPacket(key, 200, 0, COLUMNS, members_in(items, [100, 100]))


def test_columns_of_all_members_lie_end_to_end(joined: Run) -> None:
    (fetched,) = fetch_columns(joined, [stored(joined)], None, header=True)
    assert fetched.problem is None
    assert list(fetched.columns) == list(COLUMNS)
    np.testing.assert_array_equal(fetched.columns["input_ids"], [0, 1, 2, 3, 4, 10, 11, 12])
    assert not fetched.columns["input_ids"].flags.writeable
    assert fetched.header == HEADER


def test_columns_that_a_packet_does_not_have_are_left_out(joined: Run) -> None:
    packet = stored(joined)
    for names, expected in ((["response_mask", "values"], ["response_mask"]), (["values"], []), ([], [])):
        (fetched,) = fetch_columns(joined, [packet], names)
        assert (list(fetched.columns), fetched.problem) == (expected, None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"input_ids": None}, "column input_ids is missing"),
        ({"input_ids": bytes(31)}, "input_ids has 31 bytes, its packet says 32"),
        ({"response_mask": bytes([0, 0, 1, 2, 1, 0, 0, 1])}, "is 2 at token 3"),
        ({"response_mask": bytes([0, 0, 1, 1, 1, 0, 1, 1])}, "other numbers of ones"),
        ({"rollout_log_probs": np.full(8, np.nan, np.float32).tobytes()}, "is nan at token 0"),
        ({"header": None}, "no header"),
    ],
)
def test_what_cannot_be_read_is_a_problem_of_that_packet_alone(
    joined: Run, changes: dict[str, Any], problem: str
) -> None:
    packets = [stored(joined, "a"), stored(joined, "b", **changes), stored(joined, "c")]
    first, broken, last = fetch_columns(joined, packets, None, header=True)
    assert broken.problem is not None
    assert problem in broken.problem
    assert not broken.columns
    assert (first.problem, last.problem) == (None, None)


def test_a_payload_that_is_gone_or_no_hash(joined: Run) -> None:
    gone, text = stored(joined, "gone"), stored(joined, "text")
    joined.connection.scripts.delete("gone")
    joined.connection.scripts.set("text", "x")
    for fetched in fetch_columns(joined, [gone, text], None):
        assert fetched.problem == "payload is gone, or is no hash"


def test_packets_beyond_the_bound_of_a_reply_are_read_one_after_another(
    joined: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamadv.run.packets.REPLY_BYTES", 250)
    packets = [stored(joined, f"payload:{number}") for number in range(5)]
    fetched = list(fetch_columns(joined, packets, ["input_ids"]))
    assert [item.packet for item in fetched] == packets
    assert all(item.problem is None for item in fetched)
