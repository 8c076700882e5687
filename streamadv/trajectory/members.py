"""Members: trajectories of a packet, a group or a batch as arrays, and their form as bytes, the member table.

A member table travels through the streams beside the payload, so that grouping, planning and outcome estimators never
touch a column. It has one fixed-width record per trajectory; behind the records stands what only some of them have:

    size, members, flags, bytes of the text    4 x u4
    MEMBER records
    ROW records                                if a member has several rows (flag MANY_ROWS)
    STEP records                               of all members
    named rewards                              f8, one for each name and member
    entry counts                               u4, one for each name and row: of extra columns that are not per token
    text                                       JSON: names of columns, rewards and entry counts, keys of states

All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import WireError
from ..messages import brief
from .columns import COLUMN_NAME, KNOWN_COLUMNS, MAX_COLUMNS, REQUIRED_COLUMNS, Array
from .schema import MAX_GROUP_SIZE, MAX_ROWS, MAX_STEPS, Role, Row, Status, Trajectory

MAX_ROW_TOKENS: Final = 1 << 27
#: Fewest stored bytes of a token: the two columns that every row has.
MIN_TOKEN_BYTES: Final = sum(KNOWN_COLUMNS[name].itemsize for name in REQUIRED_COLUMNS)
MAX_NAMED_REWARDS: Final = 256
MAX_TEXT_CHARS: Final = 200

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
_ALL_FLAGS: Final = HAS_REWARD | BASELINE | HAS_VERSION
#: Status of a usable trajectory by its number in a table.
STATUSES: Final = (Status.COMPLETED, Status.TRUNCATED)

_HEAD: Final = struct.Struct("<IIII")
_MANY_ROWS: Final = 1
#: Texts up to this size are parsed once: most packets of a run have the same.
_CACHED_TEXT: Final = 1024

Positions = NDArray[np.int64]
_NO_ROWS: Final = np.zeros(0, ROW)
_NO_STEPS: Final = np.zeros(0, STEP)


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """M trajectories with R rows and S steps, each in order; an index into one array says nothing about the others."""

    table: Array  # [M] MEMBER
    rows: Array  # [R] ROW
    steps: Array = field(default_factory=lambda: _NO_STEPS)  # [S] STEP; `row` counts in the trajectory
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
    def longest_row(self) -> Positions:
        """[M]: tokens of the longest row of each."""
        if len(self.rows) == len(self):
            return self.table["tokens"]
        return np.maximum.reduceat(self.rows["tokens"].astype(np.int64), self.first_row[:-1])

    def staleness(self, k: int) -> NDArray[np.float64]:
        """[M]: k minus the oldest version, at least 0; NaN without a version."""
        has_version = (self.table["flags"] & HAS_VERSION) != 0
        return np.where(has_version, np.maximum(0, k - self.table["oldest"]), np.nan)

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
        return _NO_STEPS, ()
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


def members_of(trajectories: Sequence[Trajectory], sizes: Sequence[int]) -> Members:
    """Usable trajectories as members. sizes: payload bytes of each. The trajectories are valid: nothing is checked."""
    table = np.zeros(len(trajectories), MEMBER)
    for record, trajectory, size in zip(table, trajectories, sizes, strict=True):
        versions = trajectory.version_span
        flags = HAS_REWARD * (trajectory.reward is not None) | BASELINE * (trajectory.role is Role.BASELINE)
        record["index"] = trajectory.rollout_index
        record["status"] = STATUSES.index(trajectory.status)
        record["flags"] = flags | HAS_VERSION * (versions is not None)
        record["rows"], record["steps"], record["size"] = len(trajectory.rows), len(trajectory.steps), size
        record["reward"] = 0.0 if trajectory.reward is None else trajectory.reward
        record["oldest"], record["newest"] = versions or (0, 0)
    all_rows = [row for trajectory in trajectories for row in trajectory.rows]
    rows = np.zeros(len(all_rows), ROW)
    rows["tokens"] = [len(row) for row in all_rows]
    rows["trainable"] = [np.count_nonzero(row.response_mask) for row in all_rows]
    first_row = offsets(table["rows"])[:-1]
    if len(table):
        table["tokens"] = np.add.reduceat(rows["tokens"].astype(np.int64), first_row)
        table["trainable"] = np.add.reduceat(rows["trainable"].astype(np.int64), first_row)
    steps, states = _steps_of(trajectories)
    return Members(table, rows, steps, states, _rewards_of(trajectories), _entries_of(all_rows))


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
    return np.array(records, STEP) if records else _NO_STEPS, tuple(numbers)


def _rewards_of(trajectories: Sequence[Trajectory]) -> dict[str, Array]:
    names = dict.fromkeys(chain.from_iterable(trajectory.rewards for trajectory in trajectories))
    return {name: np.array([t.rewards.get(name, np.nan) for t in trajectories]) for name in names}


def _entries_of(rows: Sequence[Row]) -> dict[str, Array]:
    extras = rows[0].extras if rows else {}
    names = [name for name, column in extras.items() if not column.per_token]
    return {name: np.array([len(row.extras[name].data) for row in rows], np.uint32) for name in names}


# Bytes


def encode_table(members: Members, columns: Sequence[str]) -> bytes:
    """The member table. columns: names of the payload's columns."""
    has_many_rows = len(members.rows) != len(members) or bool((members.table["rows"] != 1).any())
    names = (tuple(columns), members.states, tuple(members.rewards), tuple(members.entries))
    text = _text(*names) if members.states else _cached_text(*names)
    parts = [
        members.table.tobytes(),
        members.rows.tobytes() if has_many_rows else b"",
        members.steps.tobytes(),
        *(np.asarray(values, "<f8").tobytes() for values in members.rewards.values()),
        *(np.asarray(counts, "<u4").tobytes() for counts in members.entries.values()),
        text,
    ]
    size = _HEAD.size + sum(map(len, parts))
    return b"".join([_HEAD.pack(size, len(members), _MANY_ROWS * has_many_rows, len(text)), *parts])


def plain_table(records: Sequence[bytes], columns: tuple[str, ...]) -> bytes:
    """The member table of members with one row each and nothing behind their MEMBER records, given as bytes."""
    text = _cached_text(columns, (), (), ())
    size = _HEAD.size + sum(map(len, records)) + len(text)
    return b"".join([_HEAD.pack(size, len(records), 0, len(text)), *records, text])


def _text(
    columns: tuple[str, ...], states: tuple[str, ...], rewards: tuple[str, ...], entries: tuple[str, ...]
) -> bytes:
    names = {"columns": tuple(sorted(columns)), "states": states, "rewards": rewards, "entries": entries}
    return json.dumps({name: texts for name, texts in names.items() if texts}).encode()


_cached_text: Final = lru_cache(256)(_text)


def decode_table(raw: bytes | memoryview) -> tuple[Members, tuple[str, ...]]:
    """Members and names of columns of a member table, as views of `raw`. Raises WireError.

    Every size is compared with the bytes that are there before an array is made; `members_problem` checks the values.
    """
    if len(raw) < _HEAD.size:
        raise WireError(f"member table has {len(raw)} bytes, needs {_HEAD.size} at least")
    size, count, flags, text_size = _HEAD.unpack_from(raw)
    if size != len(raw) or flags & ~_MANY_ROWS or not 1 <= count <= 2 * MAX_GROUP_SIZE:
        raise WireError(f"member table of {len(raw)} bytes says {size} bytes, {count} members, flags {flags}")
    reader = _Reader(raw, _HEAD.size)
    text_at = size - text_size
    table = reader.take(MEMBER, count, text_at)
    num_rows, num_steps = int(table["rows"].sum(dtype=np.int64)), int(table["steps"].sum(dtype=np.int64))
    if flags & _MANY_ROWS:
        rows = reader.take(ROW, num_rows, text_at)
    elif num_rows == count and bool((table["rows"] == 1).all()):
        rows = np.empty(count, ROW)
        rows["tokens"], rows["trainable"] = table["tokens"], table["trainable"]
    else:
        raise WireError("member table has no rows, and members with several")
    steps = reader.take(STEP, num_steps, text_at) if num_steps else _NO_STEPS
    if text_at < reader.at:
        raise WireError(f"member table has no room for a text of {text_size} bytes")
    text = bytes(raw[text_at:])
    names = _cached_names(text) if len(text) <= _CACHED_TEXT else _parse_names(text)
    rewards = {name: reader.take(np.dtype("<f8"), count, text_at) for name in names.rewards}
    entries = {name: reader.take(np.dtype("<u4"), num_rows, text_at) for name in names.entries}
    if reader.at != text_at:
        raise WireError(f"member table has {text_at - reader.at} bytes that belong to nothing")
    return Members(table, rows, steps, names.states, rewards, entries), names.columns


class _Reader:
    """Takes arrays off bytes, one after another."""

    def __init__(self, raw: bytes | memoryview, at: int) -> None:
        self._raw = raw
        self.at = at

    def take(self, dtype: np.dtype[Any], count: int, end: int) -> Array:
        """`count` records, which must end before `end`. Raises WireError."""
        start, self.at = self.at, self.at + count * dtype.itemsize
        if self.at > end:
            raise WireError(f"member table ends within {count} records of {dtype.itemsize} bytes")
        return np.frombuffer(self._raw, dtype, count, start)


@dataclass(frozen=True, slots=True)
class _Names:
    columns: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()


def _parse_names(text: bytes) -> _Names:
    try:
        names = json.loads(text)
        parsed = _Names(**{name: tuple(texts) for name, texts in names.items()})
        all_texts = [*parsed.columns, *parsed.states, *parsed.rewards, *parsed.entries]
        is_text = all(type(name) is str and len(name) <= MAX_TEXT_CHARS for name in all_texts)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"member table: its text {brief(text)} is none: {error}") from error
    limits = {"columns": 2 * MAX_COLUMNS, "rewards": MAX_NAMED_REWARDS, "entries": 2 * MAX_COLUMNS}
    for name, limit in limits.items():
        texts = getattr(parsed, name)
        if len(texts) > limit or len(set(texts)) != len(texts):
            raise WireError(f"member table: {len(texts)} {name}, needs {limit} at most, each once")
    if not is_text or not all(map(is_stored_column, (*parsed.columns, *parsed.entries))):
        raise WireError(f"member table: its text {brief(text)} holds what is no name")
    return parsed


_cached_names: Final = lru_cache(256)(_parse_names)


def is_stored_column(name: str) -> bool:
    """Whether a payload may have a column of this name: one of a row's fields or an output would be overwritten."""
    return name in KNOWN_COLUMNS or (COLUMN_NAME.fullmatch(name) is not None and name not in Row.model_fields)


def members_problem(members: Members, size: int) -> str | None:
    """Why these are not the members of a payload of `size` bytes, or None. Readers allocate memory by their numbers."""
    table, rows = members.table, members.rows
    flags = table["flags"]
    tokens = rows["tokens"].astype(np.int64)
    checks = (
        ("index", bool((np.diff(table["index"].astype(np.int64)) > 0).all()), "is not in ascending order"),
        ("status", bool((table["status"] < len(STATUSES)).all()), "is unknown"),
        ("flags", bool((flags <= _ALL_FLAGS).all()), "are unknown"),
        ("rows", bool(((table["rows"] >= 1) & (table["rows"] <= MAX_ROWS)).all()), "is not 1..4096"),
        (
            "tokens",
            bool(((tokens >= 1) & (tokens <= MAX_ROW_TOKENS)).all()),
            "of a row is none of its lengths",
        ),
        ("trainable", bool((rows["trainable"] <= rows["tokens"]).all()), "is above the row's tokens"),
        ("reward", bool(np.isfinite(table["reward"]).all()), "is not finite"),
        (
            "versions",
            bool(((table["oldest"] >= 0) & (table["oldest"] <= table["newest"])).all()),
            "end before they start",
        ),
        ("steps", bool((table["steps"] <= MAX_STEPS).all()), f"are more than {MAX_STEPS}"),
        ("size", int(table["size"].sum(dtype=np.int64)) <= size, "is more than the payload has"),
    )
    for name, is_right, problem in checks:
        if not is_right:
            return f"{name} {problem}"
    first_row = members.first_row[:-1]
    sums_agree = (np.add.reduceat(tokens, first_row) == table["tokens"]).all() and (
        np.add.reduceat(rows["trainable"].astype(np.int64), first_row) == table["trainable"]
    ).all()
    if not sums_agree:
        return "tokens are not the sum of the rows"
    if int(tokens.sum()) * MIN_TOKEN_BYTES > size:
        return f"rows have {int(tokens.sum())} tokens, the payload has {size} bytes"
    if any(np.isinf(values).any() for values in members.rewards.values()):
        return "a named reward is not finite"
    return _steps_problem(members) if len(members.steps) else None


def _steps_problem(members: Members) -> str | None:
    steps, table = members.steps, members.table
    owner = np.repeat(np.arange(len(table)), table["steps"])
    if not (steps["row"] < table["rows"][owner]).all():
        return "a step is in a row that its trajectory does not have"
    length = members.rows["tokens"][members.first_row[owner] + steps["row"]]
    if not ((steps["start"] < steps["end"]) & (steps["end"] <= length)).all():
        return "a step is a span that its row does not have"
    if not np.isfinite(steps["reward"]).all():
        return "the reward of a step is not finite"
    if not ((steps["state"] < len(members.states)) | (steps["state"] == NO_STATE)).all():
        return "a step has a state_key that the table lacks"
    return None
