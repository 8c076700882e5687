"""Packets: every trajectory that is encoded comes back; what is broken is a WireError."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from streamadv.errors import TrajectoryError, WireError
from streamadv.trajectory.columns import EXTRA_DTYPES, HEADER, KNOWN_COLUMNS, Array
from streamadv.trajectory.member_table import read_table
from streamadv.trajectory.members import references_of
from streamadv.trajectory.packet import (
    MAX_PACKET_MEMBERS,
    StoredPacket,
    check_column,
    decode_column,
    parse_header,
    payload_trajectory,
    payloads_of,
)
from streamadv.trajectory.packet_encoding import (
    MAX_HEADER_BYTES,
    MAX_PACKET_BYTES,
    Packet,
    ended_packets,
    select_members,
)
from streamadv.trajectory.schema import Column, Trajectory, parse_trajectory
from tests.shares import examples
from tests.support import ended, members_problem, packets_of, trajectory, unscored

FLOAT_COLUMNS = [name for name, dtype in KNOWN_COLUMNS.items() if dtype.kind == "f"]
LIMIT = 1 << 22


def kinds_of(items: Sequence[Trajectory]) -> dict[str, str]:
    """Extra columns as the manifest has them."""
    return {
        name: json.dumps([column.data.dtype.str, list(column.data.shape[1:]), column.per_token])
        for item in items
        for row in item.rows
        for name, column in row.extras.items()
    }


def bytes_of(value: Any) -> bytes:
    if isinstance(value, tuple):
        return b"".join(map(bytes_of, value))
    return value if isinstance(value, bytes) else value.tobytes()  # type: ignore[no-any-return]


def received(packet: Packet) -> tuple[StoredPacket, dict[str, bytes]]:
    """The packet as a reader knows it, and the fields of its payload."""
    members, names = read_table(packet.table)
    fields = {
        name if isinstance(name, str) else name.decode(): bytes_of(v) for name, v in packet.fields.items()
    }
    return StoredPacket("key", packet.size, 0, names, members), fields


def columns_of(
    stored: StoredPacket, fields: Mapping[str, bytes], kinds: Mapping[str, str]
) -> dict[str, Array]:
    columns = {}
    for name in stored.columns:
        columns[name] = decode_column(stored, name, fields.get(name), kinds)
        if name in KNOWN_COLUMNS:
            check_column(stored, name, columns[name])
    return columns


def read(packet: Packet, kinds: Mapping[str, str], group_id: str = "ä-{x") -> list[Trajectory]:
    """The trajectories of a packet."""
    stored, fields = received(packet)
    parse_header(fields["header"], stored.members)
    payloads = payloads_of(stored, columns_of(stored, fields, kinds), fields["header"])
    owners = repeat((group_id, None), len(payloads))
    return [
        payload_trajectory(reference, payload)
        for reference, payload in zip(references_of(stored.members, owners), payloads, strict=True)
    ]


@st.composite
def trajectories(draw: st.DrawFn, index: int = 0) -> Trajectory:
    """Any usable trajectory: rows, known columns, extras of every dtype and shape."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = draw(st.lists(st.sampled_from(FLOAT_COLUMNS), unique=True, max_size=4))
    extras = draw(
        st.lists(
            st.tuples(
                st.sampled_from(sorted(EXTRA_DTYPES)), st.lists(st.integers(0, 3), max_size=3), st.booleans()
            ),
            max_size=3,
        )
    )
    rows: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 6))
        row: dict[str, Any] = {
            "input_ids": rng.integers(0, 2**31 - 1, length),
            "response_mask": rng.integers(0, 2, length),
            "agent": draw(st.sampled_from([None, "planner"])),
            "reward": draw(st.sampled_from([None, 0.1])),
        }
        row |= {name: -rng.exponential(size=length).astype(np.float32) for name in names}
        if draw(st.booleans()) or rows:
            row["versions"] = rng.integers(0, 9, length)
        for number, (dtype, shape, per_token) in enumerate(extras):
            entries = length if per_token else int(rng.integers(0, 4))
            data = rng.integers(0, 100, (entries, *shape)).astype(dtype)
            row[f"extra{number}"] = Column(data=data, per_token=per_token)
        rows.append(row)
    if any("versions" in row for row in rows):
        for row in rows:
            row.setdefault("versions", np.zeros(len(row["input_ids"]), np.int32))
    last = len(rows[-1]["input_ids"])
    return parse_trajectory(
        {
            "group_id": "ä-{x",
            "group_size": 4,
            "rollout_index": index,
            **draw(st.sampled_from([{"reward": 0.1}, {"reward": -3e9}, {"reward_later": True}])),
            "rewards": draw(st.dictionaries(st.sampled_from(["a", "b c"]), st.floats(-1, 1), max_size=2)),
            "status": draw(st.sampled_from(["completed", "truncated"])),
            "model_version": draw(st.sampled_from([None, 0, 3, (1, 4), (3, 3)])),
            "data_source": draw(st.sampled_from([None, "math"])),
            "role": draw(st.sampled_from(["train", "baseline"])),
            "metadata": draw(st.sampled_from([{}, {"a": [1, None, "x"], "b": {"c": 0.5}}])),
            "steps": [{"row": len(rows) - 1, "start": 0, "end": last, "reward": 0.25, "state_key": "s 1"}],
            "rows": rows,
        }
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories of one group in any order, some of them without columns, sometimes one of them twice."""
    made: list[Trajectory] = []
    for index in draw(st.permutations(range(draw(st.integers(1, 4))))):
        kind = draw(st.sampled_from(["usable", "usable", "failed", "unscorable"]))
        if kind == "usable":
            made.append(draw(trajectories(index)))
        elif kind == "failed":
            made.append(ended("ä-{x", index, 4, kind))
        else:
            made.append(trajectory("ä-{x", index, 4, reward=None))
    return [*made, *made[: draw(st.integers(0, 1))]]


def assert_same(back: Trajectory, item: Trajectory) -> None:
    left_out = {"rows", "reward_later"}
    assert back.model_dump(exclude=left_out) == item.model_dump(exclude=left_out)
    assert len(back.rows) == len(item.rows)
    for got, sent in zip(back.rows, item.rows, strict=True):
        assert (got.agent, got.reward) == (sent.agent, sent.reward)
        assert got.columns.keys() == sent.columns.keys()
        for name, array in sent.columns.items():
            np.testing.assert_array_equal(got.columns[name], array, strict=True)
        assert got.extras.keys() == sent.extras.keys()
        for name, column in sent.extras.items():
            assert got.extras[name].per_token == column.per_token
            np.testing.assert_array_equal(got.extras[name].data, column.data, strict=True)


def extras_agree(items: Sequence[Trajectory]) -> bool:
    kinds: dict[str, str] = {}
    return all(
        kinds.setdefault(name, kind) == kind for item in items for name, kind in kinds_of([item]).items()
    )


@settings(max_examples=examples(80), deadline=None)
@given(items=groups().filter(extras_agree))
def test_everything_pushed_comes_back(items: list[Trajectory]) -> None:
    packets = packets_of(items, LIMIT)
    assert sorted(position for packet in packets for position in packet.positions) == list(range(len(items)))
    for packet in packets:
        assert packet.indices == tuple(items[position].rollout_index for position in packet.positions)
        assert list(packet.indices) == sorted(set(packet.indices))
        assert packet.size == sum(len(bytes_of(value)) for value in packet.fields.values())
        lines = [line.split(" ") for line in packet.members.splitlines()]
        assert [int(index) for index, *_ in lines] == list(packet.indices)
        if not packet.size:
            assert {kind for _, kind, *_ in lines} <= {"failed", "unscorable"}
            continue
        stored, _ = received(packet)
        assert members_problem(stored.members, packet.size) is None
        sent = [items[position] for position in packet.positions]
        for back, item, (_, kind, reward, role) in zip(
            read(packet, kinds_of(items)), sent, lines, strict=True
        ):
            assert_same(back, item)
            assert (kind, role) == ("usable", item.role)
            assert reward == ("-" if item.reward is None else repr(item.reward))
    assert_first_comes_first(items, packets)


def assert_first_comes_first(items: Sequence[Trajectory], packets: Sequence[Packet]) -> None:
    """Of two trajectories for one slot the server takes the one that it sees first."""
    sent = [position for packet in packets for position in packet.positions]
    for first, item in enumerate(items):
        for second in range(first + 1, len(items)):
            if items[second].rollout_index == item.rollout_index:
                assert sent.index(first) < sent.index(second)


@settings(max_examples=examples(60), deadline=None)
@given(items=groups().filter(extras_agree), data=st.data())
def test_members_of_a_packet_can_be_sent_alone(items: list[Trajectory], data: st.DataObject) -> None:
    for packet in packets_of(items, LIMIT):
        chosen = data.draw(
            st.lists(st.integers(0, len(packet.indices) - 1), min_size=1, unique=True).map(sorted)
        )
        part = select_members(packet, chosen)
        sent = [items[packet.positions[member]] for member in chosen]
        (alone,) = packets_of(sent, LIMIT)
        assert part.positions == tuple(packet.positions[member] for member in chosen)
        assert part._replace(positions=alone.positions)[:3] == alone[:3]
        if packet.size:
            for back, item in zip(read(part, kinds_of(items)), sent, strict=True):
                assert_same(back, item)


def test_what_travels_together() -> None:
    items = [
        trajectory("g", 3, 8),
        trajectory("g", 0, 8, values=np.zeros(5)),
        unscored("g", 1, 8),
        trajectory("g", 2, 8),
        ended("g", 4, 8, "aborted"),
        trajectory("g", 5, 8, reward=None),
    ]
    packets = packets_of(items, LIMIT)
    assert [packet.indices for packet in packets] == [(0,), (1,), (2, 3), (4, 5)]
    assert [packet.positions for packet in packets] == [(1,), (2,), (3, 0), (4, 5)]
    assert packets[3].members == "4 aborted - train\n5 unscorable - train\n"
    (cancelled,) = ended_packets([7, 2], "cancelled")
    assert (cancelled.indices, cancelled.positions) == ((2, 7), (1, 0))
    assert cancelled.members == "2 cancelled - train\n7 cancelled - train\n"


def test_a_packet_is_bounded() -> None:
    tokens = MAX_PACKET_BYTES // 27  # three of them are below the bound
    sizes = [len(p.indices) for p in packets_of([trajectory("g", i, 9, tokens) for i in range(7)], LIMIT)]
    assert sizes == [3, 3, 1]
    sizes = [len(p.indices) for p in packets_of([trajectory("g", i, 9, 4096) for i in range(8)], LIMIT)]
    assert sizes == [4, 4], "seven would fit"
    (large,) = packets_of([trajectory("g", 0, 9, MAX_PACKET_BYTES)], LIMIT)
    assert large.size > MAX_PACKET_BYTES
    many = [trajectory("g", index, 200, 3) for index in range(200)]
    for packet in packets_of(many, LIMIT):
        assert members_problem(received(packet)[0].members, packet.size) is None
    assert [len(packet.indices) for packet in packets_of(many, LIMIT)] == [50] * 4
    assert {len(packet.indices) for packet in ended_packets(range(200), "failed")[:-1]} == {
        MAX_PACKET_MEMBERS
    }


def test_a_member_table_is_bounded_too() -> None:
    """Turns of one token need more there than in the columns."""
    tokens = 6000
    steps = [{"start": start, "end": start + 1, "state_key": f"{start:064}"} for start in range(tokens)]
    items = [trajectory("g", index, 8, tokens=tokens, steps=steps) for index in range(8)]
    packets = packets_of(items, LIMIT)
    assert [packet.indices for packet in packets] == [(index,) for index in range(8)]
    few = [trajectory("g", index, 8, steps=[{"start": 2, "end": 3}]) for index in range(8)]
    assert len(packets_of(few, LIMIT)) == 1
    with pytest.raises(
        TrajectoryError, match=r"has 58\d{4} bytes, max_trajectory_bytes is 400000: drop steps"
    ):
        packets_of(items, 400_000)


def test_received_columns_are_views() -> None:
    stored, fields = received(packets_of([trajectory(), trajectory(index=1)], LIMIT)[0])
    payloads = payloads_of(stored, columns_of(stored, fields, {}), fields["header"])
    for payload in payloads:
        assert not payload.columns["input_ids"].flags.writeable
        assert not payload.columns["input_ids"].flags.owndata


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"group_size":0}'),
        b'{"group_size":2}' + b" " * (1 << 20),
        *(
            b'{"group_size":2,"members":%b}' % members
            for members in (b"3", b"[{}]", b"[{},3]", b"[{},{},{}]")
        ),
        *(
            b'{"group_size":2,"members":[{},{%b}]}' % member
            for member in (
                b'"metadata":3',
                b'"agents":[null,"b"]',
                b'"agents":[1]',
                b'"row_rewards":["x"]',
                b'"row_rewards":[1e999]',
                b'"row_rewards":[1%b]' % (b"0" * 400),
                b'"row_rewards":[0.5,0.5]',
                b'"metadata":{"a":1e999}',
                b'"metadata":%b1%b' % (b'{"a":' * 40, b"}" * 40),
                b'"model_version":-1',
                b'"model_version":[1]',
                b'"model_version":[2,1]',
                b'"data_source":7',
            )
        ),
    ],
    ids=lambda text: repr(text[:60]),
)
def test_what_is_no_header_is_a_wire_error(text: bytes) -> None:
    stored, _ = received(packets_of([trajectory(), trajectory(index=1)], LIMIT)[0])
    with pytest.raises(WireError) as error:
        parse_header(text, stored.members)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("byte", b'0957-"{}[],:e \0\xff')
def test_a_flipped_byte_in_the_header_ends_in_no_other_error(byte: int) -> None:
    items = [trajectory(data_source="math", model_version=[1, 1], metadata={"a": 1}), trajectory(index=1)]
    (packet,) = packets_of(items, LIMIT)
    header = packet.fields[HEADER]
    accepted = 0
    for at in range(len(header)):
        text = bytearray(header)
        text[at] = byte
        with suppress(WireError):
            read(packet._replace(fields={**packet.fields, HEADER: bytes(text)}), {})
            accepted += 1
    assert (accepted > 0) == (byte not in b"\0\xff")  # these two are never JSON


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), item=trajectories())
def test_cut_or_grown_columns_are_wire_errors(data: st.DataObject, item: Trajectory) -> None:
    stored, fields = received(packets_of([item], LIMIT)[0])
    name = data.draw(st.sampled_from(stored.columns))
    raw = fields[name]
    size = data.draw(st.integers(0, len(raw) + 9).filter(lambda number: number != len(raw)))
    fields[name] = (raw + bytes(9))[:size]
    with pytest.raises(WireError, match=name):
        columns_of(stored, fields, kinds_of([item]))


@pytest.mark.parametrize(
    "kind",
    [
        *('["|O",[2],true]', '[">f4",[2],true]', '["<f4,<f4",[2],true]', '["S1000000000",[2],true]'),
        *('["float128",[2],true]', '["<f4",[3],true]', '["<f4",[-2],true]', '["<f4",[2],false]'),
        *('["<f4",[16777216,16777216,16777216],true]', '["<f4",[1,1,1,1,1,1,2],true]', "{", "[]", "null"),
    ],
)
def test_an_extra_column_of_another_kind_is_a_wire_error(kind: str) -> None:
    stored, fields = received(packets_of([trajectory(extra=np.zeros((5, 2), np.float32))], LIMIT)[0])
    with pytest.raises(WireError) as error:
        columns_of(stored, fields, {"extra": kind})
    assert "\n" not in str(error.value)
    with pytest.raises(WireError, match="none that the run has registered"):
        columns_of(stored, fields, {})


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.5])
def test_wrong_values_on_the_wire_are_refused(value: float) -> None:
    stored, fields = received(packets_of([trajectory(), trajectory(index=1)], LIMIT)[0])
    array = np.frombuffer(fields["rollout_log_probs"], "<f4").copy()
    array[6] = value
    with pytest.raises(WireError, match="at token 6"):
        columns_of(stored, {**fields, "rollout_log_probs": array.tobytes()}, {})
    mask = bytearray(fields["response_mask"])
    for ones, problem in ((2, "needs 0 or 1"), (0, "other numbers of ones")):
        mask[3] = ones
        with pytest.raises(WireError, match=problem):
            columns_of(stored, {**fields, "response_mask": bytes(mask)}, {})


def test_what_is_too_large_is_refused_at_the_producer() -> None:
    with pytest.raises(TrajectoryError, match="metadata"):
        packets_of([trajectory(metadata={"text": "x" * (1 << 20)})], LIMIT)
    with pytest.raises(TrajectoryError, match=r"trajectory g/1 has .* bytes, max_trajectory_bytes is 1024"):
        packets_of([trajectory(), trajectory(index=1, tokens=300)], 1024)


def test_the_largest_header_that_is_sent_can_be_read() -> None:
    def encode(text: str) -> Packet:
        return packets_of([trajectory(metadata={"text": text})], LIMIT)[0]

    room = MAX_HEADER_BYTES - len(encode("").fields[HEADER])
    packet = encode("x" * room)
    assert len(packet.fields[HEADER]) == MAX_HEADER_BYTES
    assert len(read(packet, {})[0].metadata["text"]) == room
    with pytest.raises(TrajectoryError, match=f"has {MAX_HEADER_BYTES + 1} bytes"):
        encode("x" * (room + 1))


def test_outputs_of_an_earlier_run_are_not_pushed() -> None:
    (packet,) = packets_of([trajectory(advantages=np.ones(5), returns=np.ones(5))], LIMIT)
    stored, fields = received(packet)
    assert not {"advantages", "returns"} & {*fields, *stored.columns}


def test_a_header_is_small_where_there_is_nothing_to_say() -> None:
    (packet,) = packets_of([trajectory(model_version=3, data_source="math")], LIMIT)
    assert packet.fields[HEADER] == to_json({"group_size": 2, "data_source": "math"})
