"""Members: what a table holds comes back from its bytes; damaged bytes are refused before memory is allocated."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import WireError
from streamadv.trajectory.member_table import read_table
from streamadv.trajectory.members import HAS_VERSION, MEMBER, NO_STATE, Members
from streamadv.trajectory.packet_encoding import encode_table
from streamadv.trajectory.schema import Trajectory, parse_trajectory
from tests.shares import examples
from tests.support import members_in, members_problem

COLUMNS = ("input_ids", "response_mask")


def row(mask: list[int]) -> dict[str, Any]:
    return {"input_ids": list(range(len(mask))), "response_mask": mask}


def steps_of(masks: list[list[int]], states: list[str | None]) -> list[dict[str, Any]]:
    return [
        {"row": n, "start": 0, "end": len(mask), "reward": n / 4, "state_key": states[n]}
        for n, mask in enumerate(masks)
        if states[n] != "none"
    ]


masks = st.lists(st.integers(0, 1), min_size=1, max_size=5)
kinds = st.fixed_dictionaries(
    {
        "masks": st.lists(masks, min_size=1, max_size=3),
        "states": st.lists(st.sampled_from([None, "a", "b", "c", "none"]), min_size=3, max_size=3),
        "reward": st.sampled_from([0.0, -1.5, 1e300]),
        "rewards": st.dictionaries(st.sampled_from(["style", "length"]), st.floats(-1, 1), max_size=2),
        "model_version": st.sampled_from([None, 0, 7, (3, 5)]),
        "status": st.sampled_from(["completed", "truncated"]),
        "role": st.sampled_from(["train", "baseline"]),
    }
)
groups = st.lists(kinds, min_size=1, max_size=5)


def made(found: list[dict[str, Any]], first: int = 0) -> list[Trajectory]:
    return [
        parse_trajectory(
            {
                **{"group_id": "g", "group_size": 9, "rollout_index": first + n},
                **{key: kind[key] for key in ("reward", "rewards", "model_version", "status", "role")},
                "rows": [row(mask) for mask in kind["masks"]],
                "steps": steps_of(kind["masks"], kind["states"]),
            }
        )
        for n, kind in enumerate(found)
    ]


def listed(members: Members) -> list[Any]:
    """Members one by one, as plain Python."""
    first_row, first_step = members.first_row, members.first_step
    return [
        (
            members.table[m].tolist(),
            members.rows[first_row[m] : first_row[m + 1]].tolist(),
            [
                (*step[:3], None if step[3] == NO_STATE else members.states[step[3]], step[4])
                for step in members.steps[first_step[m] : first_step[m + 1]].tolist()
            ],
            {name: values[m] for name, values in members.rewards.items() if not np.isnan(values[m])},
        )
        for m in range(len(members))
    ]


@settings(max_examples=examples(100), deadline=None)
@given(found=groups)
def test_a_table_comes_back_from_its_bytes(found: list[dict[str, Any]]) -> None:
    trajectories = made(found)
    members = members_in(trajectories, [1000] * len(trajectories))
    decoded, columns = read_table(encode_table(members, COLUMNS))
    assert listed(decoded) == listed(members)
    assert columns == COLUMNS
    assert members_problem(decoded, 1000 * len(trajectories)) is None


@settings(max_examples=examples(100), deadline=None)
@given(found=groups)
def test_members_say_what_their_trajectories_say(found: list[dict[str, Any]]) -> None:
    trajectories = made(found)
    members = members_in(trajectories, [7] * len(trajectories))
    for m, (item, (record, rows, steps, rewards)) in enumerate(
        zip(trajectories, listed(members), strict=True)
    ):
        fields = dict(zip(MEMBER.names or (), record, strict=True))
        assert (fields["index"], fields["size"], fields["reward"]) == (m, 7, item.reward)
        assert rows == [(len(r), int(r.response_mask.sum())) for r in item.rows]
        assert (fields["tokens"], fields["trainable"]) == (item.num_tokens, sum(ones for _, ones in rows))
        assert steps == [(s.row, s.start, s.end, s.state_key, s.reward) for s in item.steps]
        assert rewards == item.rewards
        assert bool(members.is_baseline[m]) == (item.role == "baseline")
        span = item.version_span
        assert bool(fields["flags"] & HAS_VERSION) == (span is not None)
        expected = np.nan if span is None else max(0, 4 - span[0])
        assert np.array_equal(members.staleness(4)[m], expected, equal_nan=True)


@settings(max_examples=examples(100), deadline=None)
@given(found=groups, more=groups, chance=st.randoms())
def test_members_are_joined_and_picked_one_by_one(
    found: list[dict[str, Any]], more: list[dict[str, Any]], chance: Any
) -> None:
    parts = [members_in(made(found), [1] * len(found)), members_in(made(more, 5), [1] * len(more))]
    joined = Members.concat(parts)
    everyone = [*listed(parts[0]), *listed(parts[1])]
    assert listed(joined) == everyone
    picked = [n for n in range(len(everyone)) if chance.random() < 0.5]
    assert listed(joined.select(picked)) == [everyone[n] for n in picked]


def test_entry_counts_belong_to_rows() -> None:
    item = parse_trajectory(
        {
            **{"group_id": "g", "group_size": 1, "rollout_index": 0, "reward": 1.0},
            "rows": [
                {**row([1]), "pixels": {"data": [1, 2, 3], "per_token": False}},
                {**row([0, 1]), "pixels": {"data": [4], "per_token": False}},
            ],
        }
    )
    members, _ = read_table(encode_table(members_in([item], [9]), [*COLUMNS, "pixels"]))
    assert {name: counts.tolist() for name, counts in members.entries.items()} == {"pixels": [3, 1]}


KIND: Any = {
    **{"masks": [[0, 1], [1]], "states": ["a", None, None], "reward": 1.0, "rewards": {"style": 0.5}},
    **{"model_version": 3, "status": "completed", "role": "train"},
}


def sample() -> bytes:
    return encode_table(members_in(made([KIND, KIND]), [50, 50]), COLUMNS)


def test_damaged_bytes_are_refused() -> None:
    """A table that is accepted has members that fit its bytes, whatever was changed."""
    raw, chance = sample(), np.random.default_rng(5)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(raw)
        for at in chance.integers(0, len(raw), chance.integers(1, 4)):
            damaged[at] = chance.integers(0, 256)
        if chance.random() < 0.3:
            damaged = damaged[: chance.integers(0, len(raw))]
        try:
            members, _ = read_table(bytes(damaged))
        except WireError:
            refused += 1
            continue
        if members_problem(members, 100) is None:
            assert (members.rows["tokens"] >= members.rows["trainable"]).all()
            assert 5 * int(members.table["tokens"].sum()) <= 100
            assert len(members.steps) == int(members.table["steps"].sum())
        else:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ({"columns": [*COLUMNS, ["values"]]}, "no name"),
        ({"columns": COLUMNS, "rewards": [[1]]}, "no name"),
        ({"columns": COLUMNS, "states": ["\ud800"]}, "surrogates"),
        ({"columns": [*COLUMNS, "values", "values"]}, "each once"),
        ({"columns": ["input_ids"]}, "column response_mask is missing"),
        ({"columns": COLUMNS, "entries": ["response_mask"]}, "column response_mask has entry counts"),
    ],
)
def test_names_of_columns_that_no_producer_sends_are_refused(text: dict[str, Any], problem: str) -> None:
    raw = json.dumps(text).encode()
    members = members_in(made([{**KIND, "rewards": {}, "states": ["none"] * 2}]), [50]).table.tobytes()
    rows = struct.pack("<IIII", 2, 1, 1, 1)
    size = 16 + len(members) + len(rows) + len(raw)
    with pytest.raises(WireError, match=problem):
        read_table(struct.pack("<IIII", size, 1, 1, len(raw)) + members + rows + raw)


@pytest.mark.parametrize("field", [0, 4, 8, 12])
def test_announced_sizes_allocate_nothing(field: int) -> None:
    damaged = bytearray(sample())
    struct.pack_into("<I", damaged, field, 0xFFFFFFF0)
    tracemalloc.start()
    with pytest.raises(WireError, match="member table"):
        read_table(bytes(damaged))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("index", 0, "ascending"),
        ("status", 9, "status"),
        ("flags", 64, "flags"),
        ("reward", np.inf, "not finite"),
        ("oldest", 9, "versions"),
        ("oldest", -1, "versions"),
        ("tokens", 4, "sum of the rows"),
        ("trainable", 3, "sum of the rows"),
        ("size", 99, "more than the payload"),
    ],
)
def test_what_cannot_be_true_has_a_reason(field: str, value: float, problem: str) -> None:
    members, _ = read_table(sample())
    table = members.table.copy()
    table[field][1] = value
    text = members_problem(Members(table, members.rows, members.steps, members.states), 100)
    assert text is not None
    assert problem in text


def test_more_tokens_than_bytes_have_a_reason() -> None:
    members, _ = read_table(sample())
    table = members.table.copy()
    table["size"] = 1
    text = members_problem(Members(table, members.rows, members.steps, members.states), 29)
    assert text == "rows have 6 tokens, the payload has 29 bytes"
