"""Entries of a groups log: what a page of them says is what each says by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.grouping.groups_log import NO_VERSION, LoggedGroup, parse_groups
from streamadv.store.keys import RunKeys
from streamadv.trajectory.members import HAS_REWARD, MEMBER, NO_STATE, ROW, STEP, Members, references_of
from streamadv.trajectory.packet_encoding import encode_table
from streamadv.trajectory.schema import Trajectory
from tests.shares import examples
from tests.support import packets_of, trajectory
from tests.unit.grouping.layouts import random_trajectory

KEYS = RunKeys("r", (0,))
SIZE = 10_000  # bytes of every payload


class Slot(NamedTuple):
    """A member of a packet."""

    index: int
    live: bool
    reward: float
    tokens: int


def table_of(slots: Sequence[Slot], steps: bool = False, reward: bool = True) -> bytes:
    table = np.zeros(len(slots), MEMBER)
    table["rows"], table["steps"], table["flags"] = 1, steps, HAS_REWARD * reward
    table["index"], table["reward"] = [slot.index for slot in slots], [slot.reward for slot in slots]
    table["tokens"] = [slot.tokens for slot in slots]
    rows = np.zeros(len(slots), ROW)
    rows["tokens"] = table["tokens"]
    spans = np.array([(0, 0, slot.tokens, NO_STATE, 0.5) for slot in slots if steps], STEP)
    return encode_table(Members(table, rows, spans), ["input_ids", "response_mask"])


def entry_of(number: int, packets: Sequence[Sequence[Slot]], **changes: Any) -> dict[bytes, bytes]:
    """A group as `lua/lib/close.lua` logs it."""
    steps, reward = changes.pop("steps", False), changes.pop("reward", True)
    lines = [
        f"{KEYS.home.payload(f'{number}-{p}')} {SIZE} {p} {''.join('01'[slot.live] for slot in slots)}"
        for p, slots in enumerate(packets)
    ]
    count = changes.pop("count", sum(slot.live for slots in packets for slot in slots))
    fields: dict[str, Any] = {
        **{"group_id": f"g{number}", "head": f"2 {count} 5 3 0 complete ", "payloads": "\n".join(lines)},
        "tables": b"".join(table_of(slots, steps, reward) for slots in packets),
    }
    fields |= changes
    return {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }


def parse(entries: Sequence[Mapping[bytes, bytes]]) -> list[LoggedGroup]:
    return parse_groups(KEYS, [(0, b"7-%d" % number, fields) for number, fields in enumerate(entries)])


def seen(group: LoggedGroup) -> list[tuple[int, float, int, int, int]]:
    """Index, reward, tokens, packet and position in it of each member."""
    table = group.members.table
    return list(
        zip(
            *(table[name].tolist() for name in ("index", "reward", "tokens")),
            *(np.asarray(places).tolist() for places in (group.packet_of, group.position_of)),
            strict=True,
        )
    )


@st.composite
def some_packets(draw: st.DrawFn) -> list[list[Slot]]:
    indices = draw(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=8))
    slots = [
        Slot(index, draw(st.booleans()), draw(st.floats(-9, 9)), draw(st.integers(1, 90)))
        for index in indices
    ]
    if not any(slot.live for slot in slots):
        slots[0] = slots[0]._replace(live=True)
    cuts = sorted(
        draw(st.sets(st.integers(1, max(1, len(slots) - 1)), max_size=3)) & set(range(1, len(slots)))
    )
    return [sorted(slots[a:b]) for a, b in zip([0, *cuts], [*cuts, len(slots)], strict=True)]


@settings(max_examples=examples(150), deadline=None)
@given(groups=st.lists(some_packets(), min_size=1, max_size=6), steps=st.sets(st.integers(0, 5), max_size=1))
def test_members_of_a_page_are_those_that_count_in_order(
    groups: list[list[list[Slot]]], steps: set[int]
) -> None:
    entries = [entry_of(n, packets, steps=n in steps) for n, packets in enumerate(groups)]
    for number, (group, packets) in enumerate(zip(parse(entries), groups, strict=True)):
        assert group.problem is None
        assert seen(group) == sorted(
            (slot.index, slot.reward, slot.tokens, p, position)
            for p, slots in enumerate(packets)
            for position, slot in enumerate(slots)
            if slot.live
        )
        assert group.count == len(group.members)
        tokens = [slot.tokens for slots in packets for slot in slots if slot.live]
        assert group.sums == (sum(tokens), NO_VERSION, 0, max(tokens))
        assert (group.begun_epoch, group.size_bytes) == (max(3, len(packets) - 1), SIZE * len(packets))
        assert [packet.members.table["index"].tolist() for packet in group.packets] == [
            [slot.index for slot in slots] for slots in packets
        ]
        assert len(group.members.steps) == (len(group.members) if number in steps else 0)


def logged_entry(number: int, trajectories: Sequence[Trajectory], cuts: int) -> dict[bytes, bytes]:
    """A group with the trajectories in packets of `cuts` members each, all but the first of which count."""
    packets = [
        packet
        for start in range(0, len(trajectories), cuts)
        for packet in packets_of(trajectories[start : start + cuts])
    ]
    masks = ["1" * len(packet.indices) for packet in packets]
    masks[0] = masks[0].replace("1", "0", len(trajectories) > 1)
    lines = [
        f"{KEYS.home.payload(f'{number}-{n}')} {packet.size} 0 {mask}"
        for n, (packet, mask) in enumerate(zip(packets, masks, strict=True))
    ]
    count = "".join(masks).count("1")
    return {
        **{b"group_id": b"g%d" % number, b"payloads": "\n".join(lines).encode()},
        **{
            b"head": b"64 %d 5 3 0 complete " % count,
            b"tables": b"".join(packet.table for packet in packets),
        },
    }


def all_of(group: LoggedGroup) -> list[Any]:
    """Members of the group and of its packets in words, and what they know by name."""
    return [
        (
            references_of(members, [("g", None)] * len(members)),
            sorted(members.rewards),
            {name: counts.tolist() for name, counts in members.entries.items()},
        )
        for members in (group.members, *(packet.members for packet in group.packets))
    ]


@pytest.mark.parametrize("seed", range(6))
def test_rows_steps_and_named_numbers_of_a_group_do_not_depend_on_its_page(seed: int) -> None:
    """Neither states nor names of others show, also where another table of the page is damaged."""
    rng = np.random.default_rng(seed)
    groups = [
        [random_trajectory(rng, f"g{number}", index) for index in range(int(rng.integers(1, 6)))]
        for number in range(5)
    ]
    plain = [trajectory("g5", index, 64) for index in range(3)]
    entries = [logged_entry(n, items, int(rng.integers(1, 4))) for n, items in enumerate([*groups, plain])]
    alone = [parse_groups(KEYS, [(0, b"7-0", entry)])[0] for entry in entries]
    assert [group.problem for group in alone] == [None] * 6
    damaged = entries[2] | {b"tables": entries[2][b"tables"][:-1]}
    for page in (entries, [*entries, damaged], [damaged, *entries]):
        found = [group for group in parse(page) if group.problem is None]
        assert list(map(all_of, found)) == list(map(all_of, alone))
        assert [group.sums for group in found] == [group.sums for group in alone]


TWO = [[Slot(0, True, 1.0, 5), Slot(1, True, 2.0, 7)]]
APART = [[Slot(0, True, 1.0, 5)], [Slot(1, True, 2.0, 7)]]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            entry_of(1, TWO, count=3, payloads=f"{KEYS.home.payload('x')} {SIZE} 0 111"),
            "has 2 members, its mask 111",
        ),
        (entry_of(1, TWO, payloads=f"{KEYS.home.payload('x')} 9 0 11"), "12 tokens, the payload has 9 bytes"),
        (entry_of(1, TWO, tables=table_of(TWO[0])[:-1]), "member table of"),
        (entry_of(1, TWO, tables=b""), "0 member tables for 1 packets"),
        (entry_of(1, APART, tables=table_of(APART[0])), "1 member tables for 2 packets"),
        (entry_of(1, APART, tables=b"\x01"), "1 member tables for 2 packets"),
        (entry_of(1, [[Slot(0, True, 1.0, 5)]] * 2), "a rollout_index stands in it twice"),
        (entry_of(1, TWO, reward=False), "a member has no reward"),
        (entry_of(1, TWO, reward=False, scores='{"0":{"reward":1}}'), "a member has no reward"),
        (entry_of(1, TWO, scores='{"0":{"reward":"much"}}'), "reward"),
    ],
)
def test_a_group_that_cannot_be_read_has_a_problem_and_its_neighbours_have_none(
    fields: Mapping[bytes, bytes], problem: str
) -> None:
    before, broken, after = parse([entry_of(0, TWO), fields, entry_of(2, APART)])
    assert broken.problem is not None
    assert problem in broken.problem
    assert (len(broken.members), broken.packets, broken.malformed) == (0, (), False)
    assert broken.group_id == "g1"
    assert seen(before) == [(0, 1.0, 5, 0, 0), (1, 2.0, 7, 0, 1)]
    assert seen(after) == [(0, 1.0, 5, 0, 0), (1, 2.0, 7, 1, 0)]


@pytest.mark.parametrize(
    "changes",
    [
        *({"payloads": "x 1 1 1"}, {"group_id": ""}, {"head": "two 2 5 3 0 complete "}),
        *(
            {"head": "2 2 5 3 0 complete"},
            {"head": "2 2 5 3 - complete "},
            {"count": "-"},
            {"count": "1"},
            {"count": "0", "payloads": f"{KEYS.home.payload('x')} {SIZE} 0 00"},
        ),
    ],
)
def test_what_is_no_group_is_malformed_and_its_neighbours_are_not(changes: dict[str, str]) -> None:
    before, malformed, after = parse([entry_of(0, TWO), entry_of(1, TWO, **changes), entry_of(2, TWO)])
    assert malformed.malformed
    assert malformed.problem
    assert (len(before.members), len(malformed.members), len(after.members)) == (2, 0, 2)


def test_rewards_that_came_after_the_push_are_filled_in() -> None:
    scores = '{"1":{"reward":8.5,"rewards":{"style":0.5}},"0":{"reward":7}}'
    scored, other = parse([entry_of(0, TWO, reward=False, scores=scores), entry_of(1, TWO)])
    assert scored.members.table["reward"].tolist() == [7.0, 8.5]
    assert np.array_equal(scored.members.rewards["style"], [np.nan, 0.5], equal_nan=True)
    assert other.members.table["reward"].tolist() == [1.0, 2.0]
