"""Payloads and references: what is encoded comes back, what is broken is a WireError."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import TrajectoryError, WireError
from streamadv.trajectory.columns import EXTRA_DTYPES, HEADER, KNOWN_COLUMNS
from streamadv.trajectory.payload import decode_payload, encode_payload, payload_bytes, payload_trajectory
from streamadv.trajectory.reference import REFERENCE, encode_reference, sent_reference
from streamadv.trajectory.schema import Column, Trajectory, parse_trajectory
from tests.support import trajectory

FLOAT_COLUMNS = [name for name, dtype in KNOWN_COLUMNS.items() if dtype.kind == "f"]


def received(item: Trajectory) -> dict[bytes, bytes]:
    """The fields as a client gets them back."""
    return {
        name if isinstance(name, bytes) else name.encode(): bytes(value)
        for name, value in encode_payload(item).items()
    }


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any usable trajectory: rows, known columns, extras of every dtype and shape."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = draw(st.lists(st.sampled_from(FLOAT_COLUMNS), unique=True, max_size=4))
    extras = draw(
        st.lists(
            st.tuples(
                st.sampled_from(sorted(EXTRA_DTYPES)),
                st.lists(st.integers(0, 3), max_size=3),
                st.booleans(),
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
        row |= {name: rng.normal(size=length).astype(np.float32) for name in names}
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
            "group_id": draw(st.sampled_from(["g", "task/1", "ä-{x}", "漢"])),
            "group_size": 4,
            "rollout_index": draw(st.integers(0, 3)),
            "reward": draw(st.floats(-1e9, 1e9)),
            "rewards": draw(st.dictionaries(st.sampled_from(["a", "b c"]), st.floats(-1, 1), max_size=2)),
            "status": draw(st.sampled_from(["completed", "truncated"])),
            "model_version": draw(st.sampled_from([None, 0, 3, (1, 4)])),
            "data_source": draw(st.sampled_from([None, "math"])),
            "role": draw(st.sampled_from(["train", "baseline"])),
            "metadata": draw(st.sampled_from([{}, {"a": [1, None, "x"], "b": {"c": 0.5}}])),
            "steps": [{"row": len(rows) - 1, "start": 0, "end": last, "reward": 0.25, "state_key": "s 1"}],
            "rows": rows,
        }
    )


@settings(max_examples=60, deadline=None)
@given(item=trajectories())
def test_everything_pushed_comes_back(item: Trajectory) -> None:
    fields = received(item)
    back = payload_trajectory(decode_payload(fields))
    assert back.model_dump(exclude={"rows"}) == item.model_dump(exclude={"rows"})
    for got, sent in zip(back.rows, item.rows, strict=True):
        assert (got.agent, got.reward) == (sent.agent, sent.reward)
        assert got.columns.keys() == sent.columns.keys()
        for name, array in sent.columns.items():
            np.testing.assert_array_equal(got.columns[name], array, strict=True)
        assert got.extras.keys() == sent.extras.keys()
        for name, column in sent.extras.items():
            assert got.extras[name].per_token == column.per_token
            np.testing.assert_array_equal(got.extras[name].data, column.data, strict=True)


@settings(max_examples=60, deadline=None)
@given(item=trajectories())
def test_a_reference_carries_the_scalars(item: Trajectory) -> None:
    fields = encode_payload(item)
    text = sent_reference(encode_reference(item, fields, payload_bytes(fields)), 'nonce "1"', 7)
    back = REFERENCE.validate_json(text)
    assert (back.key, back.epoch) == ('nonce "1"', 7)
    for name in ("group_id", "rollout_index", "status", "reward", "rewards", "role", "data_source"):
        assert getattr(back, name) == getattr(item, name)
    assert back.size == payload_bytes(received(item))
    assert back.row_lengths == tuple(len(row) for row in item.rows)
    assert back.row_trainable == tuple(int(row.response_mask.sum()) for row in item.rows)
    assert back.versions == item.version_span
    assert set(back.columns) == {*item.rows[0].columns, *item.rows[0].extras}
    assert back.is_baseline == (item.role == "baseline")
    assert [span._asdict() for span in back.steps] == [step.model_dump() for step in item.steps]


def test_only_the_columns_asked_for_are_decoded() -> None:
    fields = received(trajectory())
    del fields[b"rollout_log_probs"]
    assert list(decode_payload(fields, ["response_mask", "values"]).columns) == ["response_mask"]
    with pytest.raises(WireError, match="rollout_log_probs is named in the header but missing"):
        decode_payload(fields)


def test_received_columns_are_views() -> None:
    payload = decode_payload(received(trajectory()))
    assert not payload.columns["input_ids"].flags.writeable
    assert not payload.columns["input_ids"].flags.owndata


def header_of(**changes: Any) -> dict[bytes, bytes]:
    """A payload whose header has been tampered with."""
    fields = received(trajectory(extra=np.zeros((5, 2), np.float32)))
    header = json.loads(fields[HEADER])
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: Any = header
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return {**fields, HEADER: json.dumps(header).encode()}


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 2},
        {"schema_version": "1.0"},
        {"group_id": ...},
        {"rollout_index": "first"},
        {"status": "lost"},
        {"reward": "much"},
        {"rows": 3},
        {"rows": [{"length": 0}]},
        {"rows": [{"length": 1 << 40}]},
        {"rows": [{"length": -5}]},
        {"rows": [{"length": 4}]},
        {"rows": [{"length": 5}, {"length": 5}]},
        {"rows": [{"length": 1}] * 5000},
        {"steps": [[0, 1]]},
        {"columns__input_ids__dtype": "<i8"},
        {"columns__input_ids__dtype": "|O"},
        {"columns__input_ids__shape": [2]},
        {"columns__input_ids__lengths": [5]},
        {"columns__extra__dtype": "|O"},
        {"columns__extra__dtype": ">f4"},
        {"columns__extra__dtype": "<f4,<f4"},
        {"columns__extra__dtype": "S1000000000"},
        {"columns__extra__dtype": "float128"},
        {"columns__extra__shape": [3]},
        {"columns__extra__shape": [-2]},
        {"columns__extra__shape": [1 << 24, 1 << 24, 1 << 24]},
        {"columns__extra__shape": [1 << 60]},
        {"columns__extra__shape": [1] * 12},
        {"columns__extra__lengths": [4]},
        {"columns__extra__lengths": [5, 5]},
        {"columns__extra__lengths": [-5]},
        {"columns__extra__lengths": [1 << 27]},
        {"columns__unknown": {"dtype": "<f4"}},
    ],
    ids=str,
)
def test_a_corrupted_header_is_a_wire_error(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError) as error:
        decode_payload(header_of(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"{}" + b" " * (1 << 20)]
)
def test_a_header_that_is_no_header_is_a_wire_error(text: bytes) -> None:
    with pytest.raises(WireError):
        decode_payload({**received(trajectory()), HEADER: text})
    with pytest.raises(WireError, match="no header"):
        decode_payload({b"input_ids": b""})


@settings(max_examples=80, deadline=None)
@given(data=st.data(), item=trajectories())
def test_cut_or_grown_columns_are_wire_errors(data: st.DataObject, item: Trajectory) -> None:
    fields = received(item)
    name = data.draw(st.sampled_from(sorted(set(fields) - {HEADER})))
    raw = fields[name]
    size = data.draw(st.integers(0, len(raw) + 9).filter(lambda number: number != len(raw)))
    fields[name] = (raw + bytes(9))[:size]
    with pytest.raises(WireError, match=name.decode()):
        decode_payload(fields)


@pytest.mark.parametrize("byte", b'0957-"{}[],:e \0\xff')
def test_a_flipped_byte_in_the_header_ends_in_no_other_error(byte: int) -> None:
    steps = [{"start": 2, "end": 5, "reward": 0.25}]
    fields = received(trajectory(steps=steps, model_version=[1, 4], metadata={"a": 1}))
    accepted = 0
    for at in range(len(fields[HEADER])):
        text = bytearray(fields[HEADER])
        text[at] = byte
        with suppress(WireError):
            payload_trajectory(decode_payload({**fields, HEADER: bytes(text)}))
            accepted += 1
    assert (accepted > 0) == (byte not in b"\0\xff")  # these two are never JSON


@pytest.mark.parametrize(("name", "value"), [("rollout_log_probs", np.nan), ("rollout_log_probs", np.inf)])
def test_non_finite_numbers_on_the_wire_are_refused(name: str, value: float) -> None:
    fields = received(trajectory())
    array = np.frombuffer(fields[name.encode()], "<f4").copy()
    array[1] = value
    with pytest.raises(WireError, match="at token 1"):
        decode_payload({**fields, name.encode(): array.tobytes()})
    with pytest.raises(WireError, match="needs 0 or 1"):
        decode_payload({**fields, b"response_mask": bytes([0, 0, 1, 2, 1])})


def test_a_header_that_would_be_too_large_is_refused_at_the_producer() -> None:
    with pytest.raises(TrajectoryError, match="metadata"):
        encode_payload(trajectory(metadata={"text": "x" * (1 << 20)}))


def test_rows_that_differ_in_an_extra_are_refused() -> None:
    rows = [
        {"input_ids": [1], "response_mask": [1], "x": np.zeros((1, width), np.float32)} for width in (2, 3)
    ]
    with pytest.raises(TrajectoryError, match="extra column x differs between rows"):
        encode_payload(trajectory(rows=rows))


def test_outputs_of_an_earlier_run_are_not_pushed() -> None:
    item = trajectory(advantages=np.ones(5), returns=np.ones(5))
    assert not {b"advantages", b"returns"} & received(item).keys()
    assert b"advantages" not in encode_reference(item, encode_payload(item), 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rollout_index": 1}, "header is of g/0"),
        ({"row_lengths": (2, 1)}, "other row lengths"),
        ({"steps": ()}, "other steps"),
        ({"columns": ("input_ids", "response_mask")}, "other columns"),
        ({"row_trainable": (1,)}, "has 2 ones in a row, the reference 1"),
    ],
)
def test_a_payload_that_contradicts_its_reference_is_a_wire_error(
    change: dict[str, Any], problem: str
) -> None:
    item = trajectory("g", 0, tokens=4, steps=[{"start": 1, "end": 3}])
    fields = encode_payload(item)
    text = sent_reference(encode_reference(item, fields, payload_bytes(fields)), "payload", 1)
    reference = REFERENCE.validate_json(text)
    decode_payload(received(item), None, reference)
    with pytest.raises(WireError, match=problem):
        decode_payload(received(item), None, replace(reference, **change))
