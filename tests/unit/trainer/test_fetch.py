"""A rank gets the columns of its trajectories in its order, however groups were cut into packets."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamadv.errors import UndecodableGroupError
from streamadv.grouping.layout import Layout
from streamadv.run import Run
from streamadv.run.packets import REPLY_BYTES
from streamadv.store.connection import Connection
from streamadv.store.keys import EntryKeys
from streamadv.trainer import fetch as module
from streamadv.trainer.fetch import FetchedShare
from streamadv.trainer.plan import Rank, Share, share_of
from streamadv.trajectory.columns import Array
from streamadv.trajectory.schema import Trajectory
from tests.support import CPU, join
from tests.unit.grouping.layouts import StoredGroups

NAMES = ("input_ids", "response_mask", "rollout_log_probs", "ref_log_probs")


@pytest.fixture
def joined(fake: Connection) -> Run:
    """A run that has registered the extra column of `StoredGroups`."""
    run = join(fake, "r")
    fake.scripts.hset(EntryKeys("r").manifest, "column.pictures", '["<i8", [2], false]')
    return run


def store(run: Run, stored: StoredGroups) -> None:
    for key, columns in stored.columns.items():
        fields: dict[Any, Any] = {name: array.tobytes() for name, array in columns.items()}
        run.connection.scripts.hset(key, mapping={"header": b'{"group_size": 64}', **fields})


def fetched_share(run: Run, share: Share) -> FetchedShare:
    fetched = FetchedShare(run, share, CPU)
    assert fetched.read(run) == {}
    return fetched


def trajectories_of(stored: StoredGroups, share: Share) -> list[Trajectory]:
    by_identity = {(t.group_id, t.rollout_index): t for group in stored.trajectories for t in group}
    return [by_identity[share.own.identity(member)] for member in range(len(share.own))]


def end_to_end(trajectories: list[Trajectory], name: str) -> Array:
    parts = [getattr(row, name) for trajectory in trajectories for row in trajectory.rows]
    return np.concatenate(parts) if parts else np.zeros(0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world_size", [1, 3, 40])
def test_columns_are_those_of_the_trajectories(joined: Run, seed: int, world_size: int) -> None:
    stored = StoredGroups(seed, 6)
    store(joined, stored)
    batch = Layout.of(stored.groups)
    for number in range(world_size):
        share = share_of(batch, None, Rank(number, world_size, CPU))
        fetched = fetched_share(joined, share)
        trajectories = trajectories_of(stored, share)
        assert sorted(fetched.columns) == sorted(NAMES), "the same on a rank that has no trajectory"
        for name in NAMES:
            np.testing.assert_array_equal(fetched.columns[name].numpy(), end_to_end(trajectories, name))
        pictures = [row.extras["pictures"].data for each in trajectories for row in each.rows]
        rows = fetched.row_extras()["pictures"]
        assert len(rows) == len(pictures)
        for row, picture in zip(rows, pictures, strict=True):
            np.testing.assert_array_equal(row, picture)


def test_each_packet_is_read_once_by_a_rank(joined: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    replies = module.fetch_replies

    def spy(run: Run, hashes: Any) -> Any:
        asked.extend(key for key, *_ in hashes)
        return replies(run, hashes)

    monkeypatch.setattr(module, "fetch_replies", spy)
    stored = StoredGroups(0, 6)
    store(joined, stored)
    share = share_of(Layout.of(stored.groups), None, Rank(0, 1, CPU))
    ahead = FetchedShare(joined, share, CPU)
    assert ahead.read(joined, max_bytes=sum(packet.size for packet in share.own.packets) // 2) == {}
    assert ahead.missing
    assert ahead.read(joined) == {}
    packets = [share.own.packets[number].key for number in dict.fromkeys(share.own.packet.tolist())]
    assert asked == packets


def test_reading_stops_between_two_replies(joined: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamadv.run.packets.REPLY_BYTES", 1)
    assert REPLY_BYTES > 1
    stored = StoredGroups(0, 6)
    store(joined, stored)
    ahead = FetchedShare(joined, share_of(Layout.of(stored.groups), None, Rank(0, 1, CPU)), CPU)
    before, stop = len(ahead.missing), threading.Event()
    stop.set()
    ahead.read(joined, stop=stop)
    assert len(ahead.missing) == before - 1


SPOILT: dict[str, Any] = {
    "gone": (None, "payload is gone, or is no hash"),
    "header": ({"header": b"["}, "payload header: "),
    "size": ({"input_ids": b"123"}, "column input_ids has 3 bytes, its packet says "),
    "extra": ({"pictures": b"123"}, "column pictures has 3 bytes, its packet says "),
}


@pytest.mark.parametrize("what", SPOILT)
def test_every_trajectory_of_a_spoilt_packet_is_named(joined: Run, what: str) -> None:
    stored = StoredGroups(1, 6)
    store(joined, stored)
    share = share_of(Layout.of(stored.groups), None, Rank(0, 1, CPU))
    number = int(share.own.packet[0])
    key = share.own.packets[number].key
    fields, problem = SPOILT[what]
    if fields is None:
        joined.connection.scripts.delete(key)
    else:
        joined.connection.scripts.hset(key, mapping=fields)
    problems = FetchedShare(joined, share, CPU).read(joined)
    lost = [share.own.identity(member) for member in np.flatnonzero(share.own.packet == number)]
    assert sorted(problems) == sorted(lost)
    for (_, index), text in problems.items():
        assert text.startswith(f"rollout {index}: {problem}")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("rollout_log_probs", np.nan, "column rollout_log_probs is nan at token"),
        ("ref_log_probs", -np.inf, "column ref_log_probs is -inf at token"),
        ("response_mask", 7, "column response_mask is 7 at token"),
        ("response_mask", None, "column response_mask has other numbers of ones than its packet says"),
    ],
)
def test_only_the_trajectory_with_a_wrong_value_is_named(
    joined: Run, name: str, value: Any, problem: str
) -> None:
    stored = StoredGroups(2, 6)
    share = share_of(Layout.of(stored.groups), None, Rank(0, 1, CPU))
    member = len(share.own) // 2
    packet = share.own.packets[int(share.own.packet[member])]
    starts = np.concatenate([[0], np.cumsum(packet.members.table["tokens"])])
    last = int(starts[int(share.own.position[member]) + 1]) - 1
    column = stored.columns[packet.key][name]
    column[last] = 1 - column[last] if value is None else value
    store(joined, stored)
    problems = FetchedShare(joined, share, CPU).read(joined)
    ((identity, text),) = problems.items()
    assert identity == share.own.identity(member)
    assert text.startswith(f"rollout {identity[1]}: {problem}")


def test_a_packet_that_announces_more_than_its_bytes_is_refused_before_memory_is_allocated(
    joined: Run,
) -> None:
    stored = StoredGroups(0, 2)
    joined.connection.scripts.hset(
        EntryKeys("r").manifest, "column.pictures", '["<f8", [1000000, 1000], true]'
    )
    share = share_of(Layout.of(stored.groups), None, Rank(0, 1, CPU))
    with pytest.raises(UndecodableGroupError, match="columns are larger than the payload"):
        FetchedShare(joined, share, CPU)


def test_no_memory_is_allocated_for_bytes_that_a_packet_only_announces(joined: Run) -> None:
    stored = StoredGroups(0, 2)
    store(joined, stored)
    groups = [
        replace(group, packets=tuple(replace(packet, size=1 << 39) for packet in group.packets))
        for group in stored.groups
    ]
    share = share_of(Layout.of(groups), None, Rank(0, 1, CPU))
    fetched = fetched_share(joined, share)
    ids = end_to_end(trajectories_of(stored, share), "input_ids")
    np.testing.assert_array_equal(fetched.columns["input_ids"].numpy(), ids)
