"""Members: trajectories of a packet, a group or a batch as arrays. `member_table.py` has their form as bytes.

A `Reference` is one of them as users see it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import isnan
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import WireError
from .columns import KNOWN_COLUMNS, Array
from .schema import Column, Role, Row, Status, Step, Trajectory

MEMBER: Final = np.dtype(
    [
        *(("index", "<u2"), ("status", "u1"), ("flags", "u1")),
        *(("rows", "<u4"), ("steps", "<u4"), ("size", "<u4")),  # size: payload bytes
        *(("reward", "<f8"), ("oldest", "<i8"), ("newest", "<i8")),  # versions, over trainable tokens
        *(("tokens", "<i8"), ("trainable", "<i8")),
    ]
)
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


class Named(NamedTuple):
    """Names of what members may have."""

    rewards: Collection[str]
    entries: Collection[str]


NO_STEPS: Final = np.zeros(0, STEP)


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """M trajectories with R rows and S steps, each in order; an index into one array says nothing about the others."""

    table: Array  # [M] MEMBER
    rows: Array  # [R] ROW
    steps: Array = field(default_factory=lambda: NO_STEPS)  # [S] STEP; `row` counts in the trajectory
    states: tuple[str, ...] = ()  # state_key by the `state` of steps
    rewards: Mapping[str, Array] = field(default_factory=dict)  # named rewards, [M] float64; NaN = has none
    # [R] uint32: entries of each extra column that is not per token.
    entries: Mapping[str, Array] = field(default_factory=dict)

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

    def parts(self, bounds: Sequence[int], names: Sequence[Named]) -> list[Members]:
        """Members bounds[i] : bounds[i + 1] for each i, as views, with the named rewards and entry counts `names`."""
        table, rows, steps, states = self.table, self.rows, self.steps, self.states
        of_rows, of_steps = self.first_row[bounds].tolist(), self.first_step[bounds].tolist()
        return [
            Members(
                table[a:b],
                rows[c:d],
                steps[e:f],
                states,
                {name: self.rewards[name][a:b] for name in of_rewards},
                {name: self.entries[name][c:d] for name in of_entries},
            )
            for (a, b), (c, d), (e, f), (of_rewards, of_entries) in zip(
                pairwise(bounds), pairwise(of_rows), pairwise(of_steps), names, strict=True
            )
        ]

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
            *join_steps(
                [part.steps for part in parts],
                [len(part.steps) for part in parts],
                [part.states for part in parts],
            ),
            join_named([part.rewards for part in parts], "<f8", np.nan, [len(part) for part in parts]),
            join_named([part.entries for part in parts], "<u4", 0, [len(part.rows) for part in parts]),
        )


NO_MEMBERS: Final = Members(np.zeros(0, MEMBER), np.zeros(0, ROW))


def offsets(counts: Array | Sequence[int]) -> Positions:
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


def join_steps(
    parts: Sequence[Any], counts: Sequence[int], states: Sequence[tuple[str, ...]]
) -> tuple[Array, tuple[str, ...]]:
    """Steps end to end, and the states that they count in; those of each part count in its own `states`.

    parts: STEP records, as arrays or bytes. counts: of each. Raises WireError for a state that is none.
    """
    if not any(counts):
        return NO_STEPS, ()
    steps = np.frombuffer(bytearray().join(parts), STEP)
    distinct = {id(keys): keys for keys in states}  # groups of one page have theirs in common
    first = dict(zip(distinct, offsets([len(keys) for keys in distinct.values()]).tolist(), strict=False))
    numbers: dict[str, int] = {}
    joined = [numbers.setdefault(key, len(numbers)) for keys in distinct.values() for key in keys]
    has_state = steps["state"] != NO_STATE
    number, owner = steps["state"][has_state], np.repeat(np.arange(len(states)), counts)[has_state]
    if (number >= np.array([len(keys) for keys in states])[owner]).any():
        raise WireError("member table: a step has a state_key that the table lacks")
    of_part = np.array([first[id(keys)] for keys in states])
    steps["state"][has_state] = np.array(joined, np.uint32)[of_part[owner] + number]
    return steps, tuple(numbers)


def join_named(
    parts: Sequence[Mapping[str, Any]], dtype: str, missing: float, counts: Sequence[int]
) -> dict[str, Array]:
    """Numbers by name, end to end; `missing` for a part without the name. parts: arrays or their bytes."""
    return {
        name: np.frombuffer(
            b"".join(
                [
                    own.get(name, np.full(count, missing, dtype))
                    for own, count in zip(parts, counts, strict=True)
                ]
            ),
            dtype,
        )
        for name in dict.fromkeys(chain.from_iterable(parts))
    }


# From trajectories with checked fields: validated ones, or plain records that a producer has checked


class StepSpan(NamedTuple):
    """A `schema.Step`, compact."""

    row: int
    start: int
    end: int
    reward: float
    state_key: str | None

    @classmethod
    def of(cls, step: Step) -> Self:
        return cls(step.row, step.start, step.end, step.reward, step.state_key)


class CheckedRow(NamedTuple):
    """A `schema.Row` without what the pipeline computes: what an earlier run computed is not stored."""

    columns: Mapping[str, Array]  # known ones, in the order of writing
    extras: Mapping[str, Column] = {}
    agent: str | None = None
    reward: float | None = None

    @classmethod
    def of(cls, row: Row) -> Self:
        fields = row.__dict__  # attribute access goes through pydantic
        columns = {name: array for name in KNOWN_COLUMNS if (array := fields[name]) is not None}
        return cls(columns, row.extras, fields["agent"], fields["reward"])


class Checked(NamedTuple):
    """The fields of a `schema.Trajectory` that is pushed."""

    group_id: str
    group_size: int
    rollout_index: int
    rows: Sequence[CheckedRow]
    reward: float | None = None
    scored: bool = False  # see `Trajectory.scored`
    reward_later: bool = False
    rewards: Mapping[str, float] = {}
    status: str = Status.COMPLETED
    role: str = Role.TRAIN
    model_version: int | tuple[int, int] | None = None
    data_source: str | None = None
    metadata: Mapping[str, Any] = {}
    steps: Sequence[StepSpan] = ()

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        fields = {name: value for name, value in trajectory.__dict__.items() if name in cls._fields}
        fields["rows"] = [CheckedRow.of(row) for row in trajectory.rows]
        fields["steps"] = [StepSpan.of(step) for step in trajectory.steps]
        return cls(**fields, scored=trajectory.scored)


# One by one


@dataclass(frozen=True, slots=True)
class Reference:
    """One trajectory, of a batch or for a scorer, with everything known about it except its columns."""

    group_id: str
    rollout_index: int
    row_lengths: tuple[int, ...]  # tokens
    row_trainable: tuple[int, ...]  # tokens with response_mask 1
    status: Status = Status.COMPLETED
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    role: Role = Role.TRAIN
    versions: tuple[int, int] | None = None  # oldest and newest over trainable tokens
    data_source: str | None = None
    steps: tuple[StepSpan, ...] = ()

    @property
    def is_baseline(self) -> bool:
        return self.role is Role.BASELINE

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    def staleness(self, k: int) -> int | None:
        """`k` minus the oldest version over trainable tokens, at least 0; None without a version."""
        return None if self.versions is None else max(0, k - self.versions[0])


def references_of(members: Members, owners: Iterable[tuple[str, str | None]]) -> list[Reference]:
    """The members one by one. owners: group_id and data_source of each."""
    rows, first_row = members.rows.tolist(), members.first_row.tolist()
    steps, first_step = members.steps.tolist(), members.first_step.tolist()
    named = [(name, values.tolist()) for name, values in members.rewards.items()]
    references = []
    for member, (record, owner) in enumerate(zip(members.table.tolist(), owners, strict=True)):
        index, status, flags, _, _, _, reward, oldest, newest, _, _ = record
        own_rows = rows[first_row[member] : first_row[member + 1]]
        own_steps = steps[first_step[member] : first_step[member + 1]]
        reference = Reference(
            group_id=owner[0],
            rollout_index=index,
            row_lengths=tuple(tokens for tokens, _ in own_rows),
            row_trainable=tuple(trainable for _, trainable in own_rows),
            status=STATUSES[status],
            reward=reward if flags & HAS_REWARD else None,
            rewards={name: values[member] for name, values in named if not isnan(values[member])},
            role=Role.EVAL if flags & EVAL else Role.BASELINE if flags & BASELINE else Role.TRAIN,
            versions=(oldest, newest) if flags & HAS_VERSION else None,
            data_source=owner[1],
            steps=tuple(
                StepSpan(row, start, end, step_reward, None if state == NO_STATE else members.states[state])
                for row, start, end, state, step_reward in own_steps
            ),
        )
        references.append(reference)
    return references
