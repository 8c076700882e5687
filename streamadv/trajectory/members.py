"""Members: trajectories of a packet, a group or a batch as arrays. `member_table.py` has their form as bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, Final, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from .columns import Array
from .schema import Role, Row, Status, Trajectory

MEMBER: Final = np.dtype(
    [
        *(("index", "<u2"), ("status", "u1"), ("flags", "u1")),
        *(("rows", "<u4"), ("steps", "<u4"), ("size", "<u4")),  # size: payload bytes
        *(("reward", "<f8"), ("oldest", "<i8"), ("newest", "<i8")),  # versions, over trainable tokens
        *(("tokens", "<i8"), ("trainable", "<i8")),
    ]
)
_RECORD: Final = struct.Struct("<HBBIIIdqqqq")  # a MEMBER
ROW: Final = np.dtype([("tokens", "<u4"), ("trainable", "<u4")])
STEP: Final = np.dtype(
    [("row", "<u4"), ("start", "<u4"), ("end", "<u4"), ("state", "<u4"), ("reward", "<f8")]
)
#: `state` of a step without a state_key.
NO_STATE: Final = 0xFFFFFFFF

HAS_REWARD: Final = 1
BASELINE: Final = 2
HAS_VERSION: Final = 4
EVAL: Final = 8
#: Flag of a role.
ROLE_FLAGS: Final[Mapping[str, int]] = {Role.TRAIN: 0, Role.BASELINE: BASELINE, Role.EVAL: EVAL}
#: Status of a usable trajectory by its number in a table.
STATUSES: Final[tuple[Status, ...]] = (Status.COMPLETED, Status.TRUNCATED)

Positions = NDArray[np.int64]
_NO_ROWS: Final = np.zeros(0, ROW)
NO_STEPS: Final = np.zeros(0, STEP)


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """M trajectories with R rows and S steps, each in order; an index into one array says nothing about the others."""

    table: Array  # [M] MEMBER
    rows: Array  # [R] ROW
    steps: Array = field(default_factory=lambda: NO_STEPS)  # [S] STEP; `row` counts in the trajectory
    states: tuple[str, ...] = ()  # state_key by the `state` of steps
    rewards: Mapping[str, Array] = field(default_factory=dict)  # named rewards, [M] float64; NaN = has none
    entries: Mapping[str, Array] = field(default_factory=dict)  # [R] uint32, see the module

    def __len__(self) -> int:
        return len(self.table)

    @property
    def first_row(self) -> Positions:
        """[M + 1]: the rows of member m are first_row[m] : first_row[m + 1]."""
        return offsets(self.table["rows"])

    @property
    def first_step(self) -> Positions:
        """[M + 1]: likewise of its steps."""
        return offsets(self.table["steps"])

    @property
    def is_baseline(self) -> NDArray[np.bool_]:
        """[M]: role is baseline."""
        mask: NDArray[np.bool_] = (self.table["flags"] & BASELINE) != 0
        return mask

    @property
    def has_reward(self) -> NDArray[np.bool_]:
        """[M]: has a reward by now."""
        mask: NDArray[np.bool_] = (self.table["flags"] & HAS_REWARD) != 0
        return mask

    @property
    def has_version(self) -> NDArray[np.bool_]:
        """[M]: has `oldest` and `newest`."""
        mask: NDArray[np.bool_] = (self.table["flags"] & HAS_VERSION) != 0
        return mask

    @property
    def is_truncated(self) -> NDArray[np.bool_]:
        """[M]: status is truncated."""
        mask: NDArray[np.bool_] = self.table["status"] == STATUSES.index(Status.TRUNCATED)
        return mask

    @property
    def longest_row(self) -> Positions:
        """[M]: tokens of the longest row of each."""
        if len(self.rows) == len(self):
            return self.table["tokens"]
        return np.maximum.reduceat(self.rows["tokens"].astype(np.int64), self.first_row[:-1])

    def staleness(self, k: int) -> NDArray[np.float64]:
        """[M]: k minus the oldest version, at least 0; NaN without a version."""
        return np.where(self.has_version, np.maximum(0, k - self.table["oldest"]), np.nan)

    def parts(self, bounds: Sequence[int]) -> list[Members]:
        """Members bounds[i] : bounds[i + 1] for each i, as views."""
        if len(bounds) == 2 and bounds[1] - bounds[0] == len(self):
            return [self]
        table, rows = self.table, self.rows
        if len(rows) == len(table) and not (len(self.steps) or self.rewards or self.entries):
            return [Members(table[start:stop], rows[start:stop]) for start, stop in pairwise(bounds)]
        return [self.select(np.arange(start, stop)) for start, stop in pairwise(bounds)]

    def select(self, positions: Positions | Sequence[int]) -> Members:
        """The members at these positions, in this order."""
        positions = np.asarray(positions, np.int64)
        of_rows = spans(self.first_row, positions)
        return Members(
            self.table[positions],
            self.rows[of_rows],
            self.steps[spans(self.first_step, positions)] if len(self.steps) else self.steps,
            self.states,
            {name: values[positions] for name, values in self.rewards.items()},
            {name: counts[of_rows] for name, counts in self.entries.items()},
        )

    def with_rewards(self, given: Mapping[int, tuple[float, Mapping[str, float]]]) -> Members:
        """The members with other rewards. given: reward and named ones to set, by position."""
        table = self.table.copy()
        rewards = {name: values.copy() for name, values in self.rewards.items()}
        for position, (reward, named) in given.items():
            table["reward"][position] = reward
            table["flags"][position] |= HAS_REWARD
            for name, value in named.items():
                rewards.setdefault(name, np.full(len(table), np.nan))[position] = value
        return replace(self, table=table, rewards=rewards)

    @staticmethod
    def concat(parts: Sequence[Members]) -> Members:
        """All members of `parts`, in order. A part without a named reward has NaN, one without an entry count 0."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return NO_MEMBERS
        return Members(
            join_records([part.table for part in parts], MEMBER),
            join_records([part.rows for part in parts], ROW),
            *_concat_steps(parts),
            _concat_named(parts, "rewards", np.nan, np.float64, [len(part) for part in parts]),
            _concat_named(parts, "entries", 0, np.uint32, [len(part.rows) for part in parts]),
        )


NO_MEMBERS: Final = Members(np.zeros(0, MEMBER), _NO_ROWS)


def role_of(flags: int) -> Role:
    """The role that a member's flags say."""
    if flags & EVAL:
        return Role.EVAL
    return Role.BASELINE if flags & BASELINE else Role.TRAIN


def offsets(counts: Array) -> Positions:
    """[K + 1] int64: 0, and the running sums of the K `counts`."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def join_records(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Records end to end, read-only. np.concatenate takes microseconds for each array of records."""
    return np.frombuffer(b"".join([np.ascontiguousarray(array).data for array in arrays]), dtype)


def spans(first: Positions, positions: Positions) -> Positions:
    """The indices first[p] : first[p + 1] of all `positions`, one after another."""
    lengths = first[positions + 1] - first[positions]
    if len(lengths) and int(lengths.min()) == int(lengths.max()) == 1:
        return first[positions]
    starts = first[positions] - offsets(lengths)[:-1]
    return np.repeat(starts, lengths) + np.arange(int(lengths.sum()))


def _concat_steps(parts: Sequence[Members]) -> tuple[Array, tuple[str, ...]]:
    """Steps of all parts, with one numbering of their states."""
    if not any(len(part.steps) for part in parts):
        return NO_STEPS, ()
    numbers: dict[str, int] = {}
    steps = []
    for part in parts:
        renumbered = [numbers.setdefault(key, len(numbers)) for key in part.states]
        new_steps = part.steps.copy()
        has_state = new_steps["state"] != NO_STATE
        new_steps["state"][has_state] = np.asarray(renumbered, np.uint32)[new_steps["state"][has_state]]
        steps.append(new_steps)
    return join_records(steps, STEP), tuple(numbers)


def _concat_named(
    parts: Sequence[Members], attribute: str, missing: float, dtype: Any, lengths: Sequence[int]
) -> dict[str, Array]:
    named: list[Mapping[str, Array]] = [getattr(part, attribute) for part in parts]
    names = dict.fromkeys(chain.from_iterable(named))
    return {
        name: np.concatenate(
            [
                values[name] if name in values else np.full(length, missing, dtype)
                for values, length in zip(named, lengths, strict=True)
            ]
        )
        for name in names
    }


# From trajectories


def pack_record(
    index: int,
    status: str,
    role: str,
    reward: float | None,
    versions: tuple[int, int] | None,
    size: int,
    tokens: int,
    trainable: SupportsIndex,
    rows: int = 1,
    steps: int = 0,
) -> bytes:
    """A MEMBER. versions: oldest and newest. None: it has no reward, or no versions."""
    flags = ROLE_FLAGS[role] | HAS_REWARD * (reward is not None) | HAS_VERSION * (versions is not None)
    oldest, newest = versions or (0, 0)
    reward = 0.0 if reward is None else reward
    numbers = (rows, steps, size, reward, oldest, newest, tokens, trainable)
    return _RECORD.pack(index, STATUSES.index(status), flags, *numbers)


def record_of(trajectory: Trajectory, size: int, mask: Array) -> bytes:
    """The MEMBER of a usable trajectory. size: payload bytes. mask: response_mask, rows end to end."""
    fields = trajectory.__dict__  # attribute access goes through pydantic
    return pack_record(
        fields["rollout_index"],
        fields["status"],
        fields["role"],
        fields["reward"],
        trajectory.version_span,
        size,
        len(mask),
        np.count_nonzero(mask),
        len(fields["rows"]),
        len(fields["steps"]),
    )


def members_of(trajectories: Sequence[Trajectory], sizes: Sequence[int]) -> Members:
    """Usable trajectories as members. sizes: payload bytes of each. The trajectories are valid: nothing is checked."""
    records = [
        record_of(trajectory, size, np.concatenate([row.response_mask for row in trajectory.rows]))
        for trajectory, size in zip(trajectories, sizes, strict=True)
    ]
    rows = [
        lengths
        for trajectory in trajectories
        for lengths in zip(trajectory.row_lengths, trajectory.row_trainable, strict=True)
    ]
    steps, states = _steps_of(trajectories)
    return Members(
        np.frombuffer(b"".join(records), MEMBER),
        np.array(rows, ROW),
        steps,
        states,
        _rewards_of(trajectories),
        _entries_of([row for trajectory in trajectories for row in trajectory.rows]),
    )


def _steps_of(trajectories: Sequence[Trajectory]) -> tuple[Array, tuple[str, ...]]:
    numbers: dict[str, int] = {}
    records = [
        (
            *(step.row, step.start, step.end),
            NO_STATE if step.state_key is None else numbers.setdefault(step.state_key, len(numbers)),
            step.reward,
        )
        for trajectory in trajectories
        for step in trajectory.steps
    ]
    return np.array(records, STEP) if records else NO_STEPS, tuple(numbers)


def _rewards_of(trajectories: Sequence[Trajectory]) -> dict[str, Array]:
    names = dict.fromkeys(chain.from_iterable(trajectory.rewards for trajectory in trajectories))
    return {name: np.array([t.rewards.get(name, np.nan) for t in trajectories]) for name in names}


def _entries_of(rows: Sequence[Row]) -> dict[str, Array]:
    extras = rows[0].extras if rows else {}
    names = [name for name, column in extras.items() if not column.per_token]
    return {name: np.array([len(row.extras[name].data) for row in rows], np.uint32) for name in names}
