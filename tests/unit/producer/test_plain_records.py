"""The short way of plain records gives the packets that the full checks give, or leaves the record to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError
from streamadv.producer.checks import check_records
from streamadv.producer.plain_records import plain_packets
from streamadv.producer.tickets import Ticket
from streamadv.trajectory.columns import KNOWN_COLUMNS
from streamadv.trajectory.packet import LARGE_COLUMN, MAX_PACKET_BYTES, Packet
from streamadv.trajectory.packet_encoding import encode_packets, merge_packets

LIMIT = 1 << 20
FLOATS = [name for name, dtype in KNOWN_COLUMNS.items() if dtype.kind == "f"]


def sent(packets: list[Packet]) -> list[Any]:
    """Everything that reaches the server, and what the caller is told."""
    return [
        (packet[:5], {name: bytes_of(value) for name, value in packet.fields.items()}) for packet in packets
    ]


def bytes_of(value: Any) -> bytes:
    if isinstance(value, tuple):
        return b"".join(map(bytes_of, value))
    return value if isinstance(value, bytes) else value.tobytes()  # type: ignore[no-any-return]


def full(records: list[Any], ticket: Ticket, limit: int = LIMIT) -> list[Any] | str:
    """What the full checks make of the records, or the text of their error."""
    try:
        return sent(encode_packets(check_records(records, ticket), limit))
    except TrajectoryError as error:
        return str(error)


def columns(tokens: int, seed: int = 0, *names: str) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {
        "input_ids": rng.integers(0, 1 << 20, tokens).astype(np.int32),
        "response_mask": rng.integers(0, 2, tokens).astype(np.uint8),
    }
    return found | {name: -rng.exponential(size=tokens).astype(np.float32) for name in names}


TICKET = Ticket("g-1", 0, 6, 8, 3, 7, "math", {"prompt": 5})
texts = st.sampled_from(["", "a", "ä", "漢", "\ud800", "x" * 300])
plain_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=4,
)
bad_arrays = st.sampled_from(
    [
        *(np.zeros((2, 2), np.float32), np.array([], np.int32), np.array([np.nan, 0.0], np.float32)),
        *(np.array([0.5, 0.0], np.float32), np.array([0.0005, 0.0], np.float32)),
        *(np.array([1, 2, 3]), [1, 2], (0, 1), "text", None, np.array([0, 2], np.uint8), np.array(1)),
        *(np.array([True, False]), np.arange(4, dtype=np.int32)[::2], np.array(["a", "b"])),
        *(np.array([1, 2], ">i4"), np.array([0.5, np.inf], np.float32), np.array([1.5, 2.0])),
    ]
)
changes = st.one_of(
    st.tuples(
        st.just("reward"), st.sampled_from([1, True, None, np.nan, np.inf, "1", np.float32(0.5), -0.0, 1e300])
    ),
    st.tuples(st.just("rollout_index"), st.sampled_from([0, 1, 7, 8, -1, 9000, True, 1.0, "1", None])),
    st.tuples(st.just("model_version"), st.sampled_from([0, 2**53 - 1, 2**53, -1, None, (1, 2), 1.0, True])),
    st.tuples(
        st.just("status"), st.sampled_from(["completed", "truncated", "failed", "lost", None, ["completed"]])
    ),
    st.tuples(st.just("role"), st.sampled_from(["train", "baseline", "eval", 1, []])),
    st.tuples(st.just("reward_later"), st.sampled_from([True, False, 0, None])),
    st.tuples(st.just("metadata"), st.one_of(plain_values, st.dictionaries(texts, plain_values, max_size=3))),
    st.tuples(st.just("rewards"), st.just({"format": 0.5})),
    st.tuples(st.just("steps"), st.just([{"start": 0, "end": 2, "reward": 1.0}])),
    st.tuples(st.just("group_id"), st.sampled_from(["g-1", "other"])),
    st.tuples(st.just("group_size"), st.sampled_from([6, 7])),
    st.tuples(st.just("data_source"), st.sampled_from(["math", "code", None])),
    st.tuples(st.just("versions"), st.just(np.array([3, 4], np.int32))),
    st.tuples(st.just("extra"), st.sampled_from([np.zeros((2, 3)), [1, 2]])),
    st.tuples(st.sampled_from(["input_ids", "response_mask", *FLOATS[:2]]), bad_arrays),
    st.tuples(st.just("header"), st.just(np.zeros(2, np.float32))),
    st.tuples(st.just(5), st.just(5)),
)


@st.composite
def records(draw: st.DrawFn) -> list[Any]:
    names = draw(st.lists(st.sampled_from(FLOATS), unique=True, max_size=2))
    indices = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=draw(st.integers(0, 9)) > 0))
    tokens = 2 if draw(st.booleans()) else draw(st.integers(1, 9))
    made: list[Any] = []
    for seed, index in enumerate(indices):
        record = columns(tokens, seed, *names) | {"rollout_index": index, "reward": draw(st.floats(-1, 1))}
        if draw(st.booleans()):
            record["metadata"] = {"seed": seed}
        made.append(record)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        name, value = draw(changes)
        for record in made if draw(st.booleans()) else [draw(st.sampled_from(made))]:
            record[name] = value
    if draw(st.integers(0, 19)) == 0:
        made[0] = draw(st.sampled_from([None, 5, [], [("reward", 1.0)]]))
    return made


tickets = st.sampled_from(
    [
        TICKET,
        Ticket("g", 2, 8, 8, 0, None),
        Ticket("ä", 0, 8, 8, 0, 3, "ä", {}),
        Ticket("a b", 0, 8, 8, 0, 3),
        Ticket("g", 0, 8, 8, 0, -1, None, {"deep": float("nan")}),
        Ticket("g", 0, 0, 8, 0, 3),
        Ticket("", 0, 8, 8, 0, 3, "x" * 300),
    ]
)


@settings(max_examples=400, deadline=None)
@given(records(), tickets, st.sampled_from([LIMIT, 1024, 60]))
@example([{"reward": 1.0, **columns(3)}], TICKET, LIMIT)
def test_both_ways_give_the_same(found: list[Any], ticket: Ticket, limit: int) -> None:
    packets = plain_packets(found, ticket, limit)
    if packets is not None:
        assert sent(packets) == full(found, ticket, limit)


@pytest.mark.parametrize("tokens", [1, 512, LARGE_COLUMN // 16, LARGE_COLUMN // 4, MAX_PACKET_BYTES // 8])
def test_plain_records_take_the_short_way(tokens: int) -> None:
    found = [
        columns(tokens, index, "rollout_log_probs", "values") | {"rollout_index": index, "reward": 0.5}
        for index in (3, 0, 5, 1)
    ]
    found[2] = dict(reversed(found[2].items()))  # the order of a record's fields says nothing
    packets = plain_packets(found, TICKET, LIMIT)
    assert packets is not None
    assert sent(packets) == full(found, TICKET)
    assert [index for packet in packets for index in packet.indices] == [0, 1, 3, 5]


def one_by_one(found: list[Any], ticket: Ticket) -> list[Packet]:
    """The packets of records that are pushed one after another, merged."""
    packets = [
        packet for record in found for packet in encode_packets(check_records([record], ticket), LIMIT)
    ]
    return merge_packets(packets)


@pytest.mark.parametrize("data_source", ["math", None, 'a,"members":[b'])
@pytest.mark.parametrize("tokens", [3, LARGE_COLUMN // 8])
def test_records_one_by_one_are_one_packet_once_merged(tokens: int, data_source: str | None) -> None:
    ticket = Ticket("g-1", 0, 6, 8, 3, 7, data_source)
    found = [columns(tokens, index) | {"rollout_index": index, "reward": 0.5} for index in (3, 0, 5, 1)]
    for record in found[1:3]:
        record["metadata"] = {"prompt": "}", "members": [record["rollout_index"]]}
    merged, whole = one_by_one(found, ticket), encode_packets(check_records(found, ticket), LIMIT)
    assert [packet[1:] for packet in sent_alone(merged)] == [packet[1:] for packet in sent_alone(whole)]
    assert [packet.indices for packet in merged] == [(0, 1, 3, 5)]


def sent_alone(packets: list[Packet]) -> list[Any]:
    return [(*fields, columns) for fields, columns in sent(packets)]


def test_what_differs_is_not_merged() -> None:
    record = columns(3) | {"reward": 0.5}
    found: list[Any] = [
        *({**record, "rollout_index": 0}, {**record, "rollout_index": 0}),
        {**record, **columns(3, 1, "values"), "rollout_index": 1},
        {**columns(3), "reward_later": True, "rollout_index": 2},
        {**record, "steps": [{"start": 0, "end": 2, "reward": 1.0}], "rollout_index": 3},
        {**record, "rewards": {"format": 0.5}, "rollout_index": 4},
        {"status": "failed", "rollout_index": 5},
    ]
    merged = one_by_one(found, TICKET)
    assert sorted(packet.indices for packet in merged) == [(0,), (0,), (1,), (2,), (3,), (4,), (5,)]


def test_merged_packets_keep_their_bounds() -> None:
    ticket = Ticket("g", 0, 150, 150, 0, 3)
    found = [columns(3, index) | {"rollout_index": index, "reward": 0.5} for index in range(150)]
    assert [len(packet.indices) for packet in one_by_one(found, ticket)] == [50] * 3


def test_more_records_than_a_packet_holds() -> None:
    ticket = Ticket("g", 0, 150, 150, 0, 3)
    found = [columns(3, index) | {"rollout_index": index, "reward": 0.5} for index in range(150)]
    packets = plain_packets(found, ticket, LIMIT)
    assert packets is not None
    assert [len(packet.indices) for packet in packets] == [50] * 3
    assert sent(packets) == full(found, ticket)


def test_a_record_of_more_bytes_than_a_table_can_say_is_left_to_the_full_checks() -> None:
    huge = {name: np.broadcast_to(array[:1], (1 << 30,)) for name, array in columns(1).items()}
    assert plain_packets([{"reward": 0.5, **huge}], TICKET, LIMIT) is None


def test_large_columns_are_sent_from_where_they_lie() -> None:
    tokens = LARGE_COLUMN // 8
    found = [columns(tokens, index) | {"rollout_index": index, "reward": 0.5} for index in range(2)]
    packets = plain_packets(found, TICKET, LIMIT)
    assert packets is not None
    (packet,) = packets
    assert [
        part is record["input_ids"] for part, record in zip(packet.fields["input_ids"], found, strict=True)
    ] == [True, True]
    assert isinstance(packet.fields["response_mask"], np.ndarray), "a quarter of it: copied"


@pytest.mark.parametrize("tokens", [2, LARGE_COLUMN])
def test_arrays_with_gaps_in_memory(tokens: int) -> None:
    """Small ones are copied; large ones, which are sent from where they lie, are left to the full checks."""
    record = columns(tokens) | {"reward": 0.5, "input_ids": np.arange(2 * tokens, dtype=np.int32)[::2]}
    packets = plain_packets([record], TICKET, LIMIT)
    assert (packets is None) == (tokens > 2)
    assert packets is None or sent(packets) == full([record], TICKET)


def test_small_arrays_may_be_written_into_once_they_are_pushed() -> None:
    """A producer keeps what it has sent for a while, and may send it again."""
    record = columns(100, 3) | {"reward": 0.5}
    pushed = record["input_ids"].copy()
    for packets in (
        plain_packets([record], TICKET, LIMIT),
        encode_packets(check_records([record], TICKET), LIMIT),
    ):
        assert packets is not None
        record["input_ids"][:] = 7  # the buffer of the next rollout
        np.testing.assert_array_equal(packets[0].fields["input_ids"], pushed)
        record["input_ids"][:] = pushed


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 1},
        {"reward": np.nan},
        {"input_ids": [1, 2]},
        {"response_mask": np.array([0, 2], np.uint8)},
        {"rollout_index": 8},
        {"versions": np.zeros(2, np.int32)},
        {"metadata": {"a": (1,)}},
        {"metadata": {"a": "\ud800"}},
        {"steps": []},
    ],
    ids=str,
)
def test_all_else_is_left_to_the_full_checks(change: dict[str, Any]) -> None:
    record = columns(2) | {"reward": 1.0}
    assert plain_packets([record], TICKET, LIMIT) is not None
    assert plain_packets([record | change], TICKET, LIMIT) is None
    for records in ([], (), iter([record]), {"a": record}.values(), record, None):
        assert plain_packets(records, TICKET, LIMIT) is None  # type: ignore[arg-type]
