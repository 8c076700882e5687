"""Records read by hand: exactly what pydantic accepts is accepted, and the same bytes are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError
from streamadv.producer.extra_columns import conform, kinds_of
from streamadv.producer.records import check_records, read_by_hand
from streamadv.producer.tickets import Ticket
from streamadv.trajectory.columns import KNOWN_COLUMNS
from streamadv.trajectory.members import Checked
from streamadv.trajectory.packet_encoding import (
    LARGE_COLUMN,
    MAX_PACKET_BYTES,
    Packet,
    encode_packets,
    merge_packets,
)
from streamadv.trajectory.schema import Step
from tests.shares import examples

LIMIT = 1 << 20
TICKET = Ticket("g-1", 0, 6, 8, 3, 7, "math", {"prompt": 5})
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


def encoded(items: list[Checked], limit: int = LIMIT) -> list[Packet]:
    """What is sent of them by a run whose extra columns they have named."""
    kinds = kinds_of(items)
    return encode_packets([conform(item, kinds, "r") for item in items], limit)


def checked(records: list[Any], ticket: Ticket) -> list[Checked]:
    """The records as a push reads them."""
    return read_by_hand(records, ticket) or [Checked.of(one) for one in check_records(records, ticket)]


def by_hand(records: list[Any], ticket: Ticket = TICKET, limit: int = LIMIT) -> list[Any] | None:
    """What is sent of records that are read by hand; None for those left to the full check."""
    found = read_by_hand(records, ticket)
    if found is None:
        return None
    try:
        return sent(encoded(found, limit))
    except TrajectoryError as error:
        return str(error)  # type: ignore[return-value]


def full(records: list[Any], ticket: Ticket, limit: int = LIMIT) -> list[Any] | str:
    """What the full check makes of the records, or the text of its error."""
    try:
        return sent(encoded([Checked.of(item) for item in check_records(records, ticket)], limit))
    except TrajectoryError as error:
        return str(error)


def columns(tokens: int, seed: int = 0, *names: str) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {
        "input_ids": rng.integers(0, 1 << 20, tokens).astype(np.int32),
        "response_mask": rng.integers(0, 2, tokens).astype(np.uint8),
    }
    return found | {name: -rng.exponential(size=tokens).astype(np.float32) for name in names}


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
        *([1, True], [1.0, 0], [0.5, -1.0], [-1, 2**40], [2**70, 1], [True, False], ["1", "2"], [[1, 2]], []),
        *(np.array([1, 0], np.int8), np.array([2**33, 1]), np.array([-1e300, 0.0]), (1.0, 0.0), [1, None]),
        *([np.int64(1), np.int64(0)], [float("nan"), 0.0], [-0.5, False], np.array([0, 1], np.uint64)),
    ]
)
wholes = st.sampled_from([0, 0, 1, 2, np.int64(1), -1, 9, 1.0, True, None, "1"])
steps = st.one_of(
    st.fixed_dictionaries(
        {"start": wholes, "end": st.one_of(st.just(2), wholes)},
        optional={
            "row": wholes,
            "reward": st.sampled_from([1, 0.5, np.float32(0.5), np.nan, None, "1", True]),
            "state_key": st.one_of(st.none(), texts, st.just(5)),
            "turn": st.just(1),
        },
    ),
    st.just(Step(start=0, end=2, state_key="s")),
)
changes = st.one_of(
    st.tuples(
        st.just("reward"),
        st.sampled_from(
            [1, True, None, np.nan, np.inf, "1", np.float32(0.5), -0.0, 1e300, np.int64(2), 10**400]
        ),
    ),
    st.tuples(
        st.just("rollout_index"), st.sampled_from([0, 1, 7, 8, -1, 9000, True, 1.0, "1", None, np.int32(2)])
    ),
    st.tuples(
        st.just("model_version"),
        st.sampled_from([0, 2**53 - 1, 2**53, -1, None, (1, 2), [2, 2], (2, 1), (1,), 1.0, True]),
    ),
    st.tuples(
        st.just("status"), st.sampled_from(["completed", "truncated", "failed", "lost", None, ["completed"]])
    ),
    st.tuples(st.just("role"), st.sampled_from(["train", "baseline", "eval", 1, []])),
    st.tuples(st.just("reward_later"), st.sampled_from([True, False, 0, None])),
    st.tuples(st.just("metadata"), st.one_of(plain_values, st.dictionaries(texts, plain_values, max_size=3))),
    st.tuples(
        st.just("rewards"),
        st.sampled_from(
            [
                {"format": 0.5},
                {"a": np.float32(0.1), "b": True},
                {"x" * 300: 1.0},
                {"a": np.nan},
                {1: 1.0},
                [],
                None,
            ]
        ),
    ),
    st.tuples(st.just("steps"), st.lists(steps, max_size=3)),
    st.tuples(st.just("steps"), st.sampled_from([None, (), ({"start": 0, "end": 1},), 5, {}, [5], [None]])),
    st.tuples(st.just("rows"), st.sampled_from([None, [], [{}], 5, ()])),
    st.tuples(st.just("agent"), st.sampled_from([None, "planner", "x" * 300, 5])),
    st.tuples(st.just("batch"), st.sampled_from([None, 3])),
    st.tuples(st.just("advantages"), st.sampled_from([None, [0.5, 1.0]])),
    st.tuples(st.just("group_id"), st.sampled_from(["g-1", "other"])),
    st.tuples(st.just("group_size"), st.sampled_from([6, 7])),
    st.tuples(st.just("data_source"), st.sampled_from(["math", "code", None])),
    st.tuples(st.just("versions"), st.just(np.array([3, 4], np.int32))),
    st.tuples(
        st.sampled_from(["extra", "more.of_it", "no name", "loss_mask", "value"]),
        st.sampled_from(
            [np.zeros((2, 3)), [1, 2], 5, "text", None, ["a"], {"data": [1], "per_token": False}, {"a": 1}]
        ),
    ),
    st.tuples(st.sampled_from(["input_ids", "response_mask", *FLOATS[:2]]), bad_arrays),
    st.tuples(st.just("header"), st.just(np.zeros(2, np.float32))),
    st.tuples(st.just(5), st.just(5)),
)


@st.composite
def agents(draw: st.DrawFn, tokens: int) -> dict[str, Any]:
    """What an agent's record has beside, and its columns of another dtype, as lists or as rows."""
    found: dict[str, Any] = {}
    for name, array in columns(tokens, 1, FLOATS[0]).items():
        form = draw(st.sampled_from(["as it is", "wide", "list"]))
        if form != "as it is" and name != FLOATS[0]:
            found[name] = array.astype(np.int64) if form == "wide" else array.tolist()
    if draw(st.booleans()):
        found["versions"] = np.arange(tokens) - 1
        found["model_version"] = draw(st.sampled_from([3, (2, 5), None]))
    if draw(st.booleans()):
        found["steps"] = [{"start": at, "end": at + 1, "state_key": draw(texts)} for at in range(tokens)][:3]
    if draw(st.booleans()):
        found |= {"rewards": {draw(st.sampled_from("ab")): 0.5}, "status": "truncated"}
    return found


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
        record |= draw(agents(tokens))
        made.append(record)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        name, value = draw(changes)
        for record in made if draw(st.booleans()) else [draw(st.sampled_from(made))]:
            record[name] = value
    if draw(st.integers(0, 3)) == 0:
        record = draw(st.sampled_from(made))
        row = {name: record.pop(name) for name in list(record) if name in KNOWN_COLUMNS or name == "extra"}
        other = draw(st.sampled_from([{}, {"agent": "b", "reward": 0.5}, {"versions": None}, {"steps": []}]))
        record["rows"] = [row, {**row, **other}][: draw(st.integers(1, 2))]
    if draw(st.integers(0, 19)) == 0:
        made[0] = draw(st.sampled_from([None, 5, [], [("reward", 1.0)]]))
    return made


tickets = st.sampled_from(
    [
        TICKET,
        Ticket("g", 2, 8, 8, 0, None),
        Ticket("ä", 0, 8, 8, 0, 3, "ä", {}),
        Ticket("g", 0, 8, 8, 0, -1, None, {"deep": float("nan")}),
    ]
)


@settings(max_examples=examples(150), deadline=None)
@given(records(), tickets, st.sampled_from([LIMIT, 1024, 60]))
@example([{"reward": 1.0, **columns(3)}], TICKET, LIMIT)
def test_both_ways_give_the_same(found: list[Any], ticket: Ticket, limit: int) -> None:
    read = by_hand(found, ticket, limit)
    assert read is None or read == full(found, ticket, limit)


AGENT: dict[str, Any] = columns(4, 3, "rollout_log_probs") | {
    **{"versions": np.array([-1, 3, 3, 4]), "model_version": (3, 4), "reward": 1, "status": "truncated"},
    "steps": [{"start": 1, "end": 2, "reward": 0.5, "state_key": "room 1"}, Step(start=2, end=4)],
    **{"rewards": {"format": np.float32(0.5)}, "metadata": {"task": "search", "tools": ["open"]}},
}
WIDE = {
    name: value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
    if name in KNOWN_COLUMNS
    else value
    for name, value in AGENT.items()
}
LISTS = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in AGENT.items()}
OF_ROW = {name: value for name, value in LISTS.items() if name in KNOWN_COLUMNS}
SEVERAL = {name: value for name, value in LISTS.items() if name not in KNOWN_COLUMNS}


@pytest.mark.parametrize(
    "record",
    [
        *(AGENT, WIDE, LISTS, {**AGENT, "versions": None, "model_version": np.int64(3)}),
        {**SEVERAL, "rows": [{**OF_ROW, "agent": "planner", "reward": 1}, {**OF_ROW, "agent": None}]},
        {**WIDE, "pages": {"data": np.zeros((2, 3), np.float32), "per_token": False}, "logits": [1, 2, 3, 4]},
        {"status": "failed"},
        {**LISTS, "reward": None},
        {**{name: value for name, value in LISTS.items() if name != "reward"}, "reward_later": True},
    ],
)
def test_what_agents_push_is_read_by_hand(record: dict[str, Any]) -> None:
    found = [{**record, "rollout_index": index} for index in (3, 0)]
    assert by_hand(found) == full(found, TICKET)
    assert isinstance(full(found, TICKET), list)


@pytest.mark.parametrize("tokens", [1, 512, LARGE_COLUMN // 16, LARGE_COLUMN // 4, MAX_PACKET_BYTES // 8])
def test_the_order_of_records_and_fields_says_nothing(tokens: int) -> None:
    found = [
        columns(tokens, index, "rollout_log_probs", "values") | {"rollout_index": index, "reward": 0.5}
        for index in (3, 0, 5, 1)
    ]
    found[2] = dict(reversed(found[2].items()))
    packets = encoded(checked(found, TICKET))
    assert by_hand(found) == full(found, TICKET) == sent(packets)
    assert [index for packet in packets for index in packet.indices] == [0, 1, 3, 5]


def one_by_one(found: list[Any], ticket: Ticket) -> list[Packet]:
    """The packets of records that are pushed one after another, merged."""
    return merge_packets([packet for record in found for packet in encoded(checked([record], ticket))])


@pytest.mark.parametrize("data_source", ["math", None, 'a,"members":[b'])
@pytest.mark.parametrize("tokens", [3, LARGE_COLUMN // 8])
def test_records_one_by_one_are_one_packet_once_merged(tokens: int, data_source: str | None) -> None:
    ticket = Ticket("g-1", 0, 6, 8, 3, 7, data_source)
    found: list[Any] = [
        columns(tokens, index) | {"rollout_index": index, "reward": 0.5} for index in (3, 0, 5, 1)
    ]
    for record in found[1:3]:
        record["metadata"] = {"prompt": "}", "members": [record["rollout_index"]]}
        record["steps"] = [{"start": 0, "end": 2, "state_key": f"room {record['rollout_index']}"}]
    found[3]["rewards"] = {"format": 0.5}
    merged, whole = one_by_one(found, ticket), encoded(checked(found, ticket))
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
        {**record, "data_source": "code", "rollout_index": 3},
        {**record, "extra": [1, 2, 3], "rollout_index": 4},
        {"status": "failed", "rollout_index": 5},
    ]
    merged = one_by_one(found, TICKET)
    assert sorted(packet.indices for packet in merged) == [(0,), (0,), (1,), (2,), (3,), (4,), (5,)]


def test_merged_packets_keep_their_bounds() -> None:
    ticket = Ticket("g", 0, 150, 150, 0, 3)
    found = [columns(3, index) | {"rollout_index": index, "reward": 0.5} for index in range(150)]
    assert [len(packet.indices) for packet in one_by_one(found, ticket)] == [50] * 3


def test_large_columns_are_sent_from_where_they_lie() -> None:
    tokens = LARGE_COLUMN // 8
    found = [columns(tokens, index) | {"rollout_index": index, "reward": 0.5} for index in range(2)]
    (packet,) = encoded(checked(found, TICKET))
    assert [
        part is record["input_ids"] for part, record in zip(packet.fields["input_ids"], found, strict=True)
    ] == [True, True]
    assert isinstance(packet.fields["response_mask"], np.ndarray), "a quarter of it: copied"


def test_small_arrays_may_be_written_into_once_they_are_pushed() -> None:
    """A producer keeps what it has sent for a while, and may send it again."""
    record = columns(100, 3) | {"reward": 0.5}
    pushed = record["input_ids"].copy()
    (packet,) = encoded(checked([record], TICKET))
    record["input_ids"][:] = 7  # the buffer of the next rollout
    np.testing.assert_array_equal(packet.fields["input_ids"], pushed)


@pytest.mark.parametrize(
    "change",
    [
        *({"reward": np.nan}, {"response_mask": np.array([0, 2], np.uint8)}, {"input_ids": [1, True]}),
        *(
            {"rollout_index": 8},
            {"metadata": {"a": (1,)}},
            {"metadata": {"a": "\ud800"}},
            {"loss_mask": [0, 1]},
        ),
        *(
            {"steps": [{"start": 0, "end": 3}]},
            {"versions": [1]},
            {"values": [1.0, None]},
            {"model_version": (2, 1)},
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_by_the_full_check(change: dict[str, Any]) -> None:
    record = columns(2) | {"reward": 1.0}
    assert by_hand([record]) == full([record], TICKET)
    assert by_hand([record | change]) is None
    assert isinstance(full([record | change], TICKET), str)


def test_what_is_no_list_of_records_is_left_to_the_full_check() -> None:
    record = columns(2) | {"reward": 1.0}
    for records in (iter([record]), {"a": record}.values(), record, None):
        assert by_hand(records) is None  # type: ignore[arg-type]


def test_rows_that_differ_in_an_extra_are_refused() -> None:
    rows = [{**columns(1), "x": np.zeros((1, width), np.float32)} for width in (2, 3)]
    with pytest.raises(
        TrajectoryError, match=r"extra column x has .* 3 numbers per token, run r has .* 2 numbers"
    ):
        encoded(checked([{"rows": rows, "reward": 1.0}], TICKET))
