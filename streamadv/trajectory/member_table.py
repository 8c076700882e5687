"""The member table: members as bytes, and whether they can be true.

It travels through the streams beside the payload, so that grouping, planning and outcome estimators never touch a
column. It has one fixed-width record per trajectory; behind the records stands what only some of them have:

    size, members, flags, bytes of the text    4 x u4
    MEMBER records
    ROW records                                if a member has several rows (flag MANY_ROWS)
    STEP records                               of all members
    named rewards                              f8, one for each name and member
    entry counts                               u4, one for each name and row: of extra columns that are not per token
    text                                       JSON: names of columns, rewards and entry counts, keys of states
    trace context                              25 bytes, if the packet's trace is recorded (flag TRACED): `tracing.py`

All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import WireError
from ..messages import brief
from ..tracing import CONTEXT_BYTES
from .columns import COLUMN_NAME, KNOWN_COLUMNS, MAX_COLUMNS, REQUIRED_COLUMNS, Array
from .fields import MAX_SHORT_TEXT
from .members import (
    BASELINE,
    EVAL,
    HAS_REWARD,
    HAS_VERSION,
    MEMBER,
    NO_STATE,
    NO_STEPS,
    ROW,
    STATUSES,
    STEP,
    Members,
    offsets,
)
from .schema import MAX_GROUP_SIZE, MAX_ROWS, MAX_STEPS, Row

MAX_ROW_TOKENS: Final = 1 << 27
#: Fewest stored bytes of a token: the two columns that every row has.
MIN_TOKEN_BYTES: Final = sum(KNOWN_COLUMNS[name].itemsize for name in REQUIRED_COLUMNS)
MAX_NAMED_REWARDS: Final = 256

_HEAD: Final = struct.Struct("<IIII")
_SIZE_BYTES: Final = 4  # of the first field
# Flags of a table.
_MANY_ROWS: Final = 1
_TRACED: Final = 2
# Flags of a member.
_ALL_FLAGS: Final = HAS_REWARD | BASELINE | HAS_VERSION | EVAL
#: Texts up to this size are parsed once: most packets of a run have the same.
_CACHED_TEXT: Final = 1024


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
    size = _HEAD.size + len(records) * MEMBER.itemsize + len(text)
    return b"".join([_HEAD.pack(size, len(records), 0, len(text)), *records, text])


def plain_parts(table: bytes) -> tuple[bytes, bytes] | None:
    """The record and the names in a `plain_table` of one member; None for any other table."""
    _, count, flags, text_size = _HEAD.unpack_from(table) if table else (0, 0, 0, 0)
    end = _HEAD.size + MEMBER.itemsize
    is_plain = count == 1 and not flags and len(table) == end + text_size
    return (table[_HEAD.size : end], table[end:]) if is_plain else None


def _text(
    columns: tuple[str, ...], states: tuple[str, ...], rewards: tuple[str, ...], entries: tuple[str, ...]
) -> bytes:
    names = {"columns": tuple(sorted(columns)), "states": states, "rewards": rewards, "entries": entries}
    return json.dumps({name: texts for name, texts in names.items() if texts}).encode()


_cached_text: Final = lru_cache(256)(_text)


def with_trace(table: bytes, context: bytes | None) -> bytes:
    """The member table, which has no trace context, with this one."""
    if context is None:
        return table
    size, count, flags, text_size = _HEAD.unpack_from(table)
    head = _HEAD.pack(size + CONTEXT_BYTES, count, flags | _TRACED, text_size)
    return b"".join([head, table[_HEAD.size :], context])


def trace_of(table: bytes | memoryview) -> bytes | None:
    """The trace context in a member table, also in one that is none otherwise."""
    if len(table) < _HEAD.size + CONTEXT_BYTES or not _HEAD.unpack_from(table)[2] & _TRACED:
        return None
    return bytes(table[-CONTEXT_BYTES:])


def decode_table(raw: bytes | memoryview) -> tuple[Members, tuple[str, ...]]:
    """Members and names of columns of a member table, as views of `raw`. Raises WireError.

    Every size is compared with the bytes that are there before an array is made; `members_problem` checks the values.
    """
    if len(raw) < _HEAD.size:
        raise WireError(f"member table has {len(raw)} bytes, needs {_HEAD.size} at least")
    size, count, flags, text_size = _HEAD.unpack_from(raw)
    if size != len(raw) or flags & ~(_MANY_ROWS | _TRACED) or not 1 <= count <= 2 * MAX_GROUP_SIZE:
        raise WireError(f"member table of {len(raw)} bytes says {size} bytes, {count} members, flags {flags}")
    reader = _Reader(raw, _HEAD.size)
    text_end = size - _trace_size(flags)
    text_at = text_end - text_size
    table = reader.take(MEMBER, count, text_at)
    num_rows, num_steps = int(table["rows"].sum(dtype=np.int64)), int(table["steps"].sum(dtype=np.int64))
    if flags & _MANY_ROWS:
        rows = reader.take(ROW, num_rows, text_at)
    elif num_rows == count and bool((table["rows"] == 1).all()):
        rows = _single_rows(table)
    else:
        raise WireError("member table has no rows, and members with several")
    steps = reader.take(STEP, num_steps, text_at) if num_steps else NO_STEPS
    if text_at < reader.at:
        raise WireError(f"member table has no room for a text of {text_size} bytes")
    text = bytes(raw[text_at:text_end])
    names = _cached_names(text) if len(text) <= _CACHED_TEXT else _parse_names(text)
    rewards = {name: reader.take(np.dtype("<f8"), count, text_at) for name in names.rewards}
    entries = {name: reader.take(np.dtype("<u4"), num_rows, text_at) for name in names.entries}
    if reader.at != text_at:
        raise WireError(f"member table has {text_at - reader.at} bytes that belong to nothing")
    return Members(table, rows, steps, names.states, rewards, entries), names.columns


def read_table(raw: bytes | memoryview, size: int) -> tuple[Members, tuple[str, ...]]:
    """Members and names of columns of a payload of `size` bytes. Raises WireError for what no producer has written."""
    members, columns = decode_table(raw)
    if problem := members_problem(members, size):
        raise WireError(f"member table: {problem}")
    return members, columns


def cut_tables(tables: bytes) -> list[memoryview]:
    """Member tables that stand one after another, each of which begins with its size; what is none comes last."""
    cut, rest = [], memoryview(tables)
    while rest:
        size = int.from_bytes(rest[:_SIZE_BYTES], "little")
        if not _SIZE_BYTES <= size <= len(rest):
            size = len(rest)
        cut.append(rest[:size])
        rest = rest[size:]
    return cut


class Tables(NamedTuple):
    """Many member tables: their members end to end, how many each has, and its names of columns."""

    members: Members
    counts: list[int]
    columns: list[tuple[str, ...]]


def decode_tables(raws: Sequence[bytes | memoryview]) -> Tables | None:
    """What `decode_table` makes of each, in a tenth of the time.

    None unless each is whole and has nothing but MEMBER records and names of columns, as most have.
    """
    records, counts, columns = [], [], []
    for raw in raws:
        size, count, flags, text_size = _HEAD.unpack_from(raw) if len(raw) >= _HEAD.size else (0, 0, 0, 0)
        text_at = _HEAD.size + count * MEMBER.itemsize
        text_end = text_at + text_size
        is_plain = size == len(raw) == text_end + _trace_size(flags) and not flags & ~_TRACED
        is_plain = is_plain and text_size <= _CACHED_TEXT
        if not is_plain or not 1 <= count <= 2 * MAX_GROUP_SIZE:
            return None
        try:
            names = _cached_names(bytes(raw[text_at:text_end]))
        except WireError:
            return None
        if names.states or names.rewards or names.entries:
            return None
        records.append(raw[_HEAD.size : text_at])
        counts.append(count)
        columns.append(names.columns)
    table = np.frombuffer(b"".join(records), MEMBER)
    if (table["rows"] != 1).any() or table["steps"].any():
        return None
    return Tables(Members(table, _single_rows(table)), counts, columns)


def _trace_size(flags: int) -> int:
    return CONTEXT_BYTES if flags & _TRACED else 0


def _single_rows(table: Array) -> Array:
    rows = np.empty(len(table), ROW)
    rows["tokens"], rows["trainable"] = table["tokens"], table["trainable"]
    return rows


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
        json.dumps(names, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        parsed = _Names(**{name: tuple(texts) for name, texts in names.items()})
        all_texts = [*parsed.columns, *parsed.states, *parsed.rewards, *parsed.entries]
        is_text = all(type(name) is str and len(name) <= MAX_SHORT_TEXT for name in all_texts)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"member table: its text {brief(text)} is none: {error}") from error
    if not is_text or not all(map(is_stored_column, (*parsed.columns, *parsed.entries))):
        raise WireError(f"member table: its text {brief(text)} holds what is no name")
    limits = {"columns": 2 * MAX_COLUMNS, "rewards": MAX_NAMED_REWARDS, "entries": 2 * MAX_COLUMNS}
    for name, limit in limits.items():
        texts = getattr(parsed, name)
        if len(texts) > limit or len(set(texts)) != len(texts):
            raise WireError(f"member table: {len(texts)} {name}, needs {limit} at most, each once")
    # Of the members of many packets together, counts of one packet would hold for all.
    known = KNOWN_COLUMNS.keys() & set(parsed.entries)
    if known:
        raise WireError(f"member table: column {min(known)} has entry counts, it has one value per token")
    lacking = [name for name in REQUIRED_COLUMNS if name not in parsed.columns]
    if lacking:
        raise WireError(f"member table: column {lacking[0]} is missing")
    return parsed


_cached_names: Final = lru_cache(256)(_parse_names)


def is_stored_column(name: str) -> bool:
    """Whether a payload may have a column of this name: one of a row's fields or an output would be overwritten."""
    return name in KNOWN_COLUMNS or (COLUMN_NAME.fullmatch(name) is not None and name not in Row.model_fields)


def members_problem(members: Members, size: int) -> str | None:
    """Why these are not the members of a payload of `size` bytes, or None. Readers allocate memory by their numbers."""
    return packets_problem(members, [size], [len(members)])


def packets_problem(members: Members, sizes: Sequence[int], counts: Sequence[int]) -> str | None:
    """`members_problem` of many packets together.

    members: of all packets, end to end. sizes, counts: payload bytes and members of each, one member at least.
    """
    table, rows = members.table, members.rows
    tokens = rows["tokens"].astype(np.int64)
    first = offsets(np.asarray(counts))[:-1]  # of each payload
    ascends = np.diff(table["index"].astype(np.int64), prepend=-1) > 0
    ascends[first] = True
    sizes_fit = np.add.reduceat(table["size"].astype(np.int64), first) <= sizes
    checks = {
        "index is not in ascending order": ascends,
        "status is unknown": table["status"] < len(STATUSES),
        "flags are unknown": table["flags"] <= _ALL_FLAGS,
        f"rows is not 1..{MAX_ROWS}": (table["rows"] >= 1) & (table["rows"] <= MAX_ROWS),
        "tokens of a row is none of its lengths": (tokens >= 1) & (tokens <= MAX_ROW_TOKENS),
        "trainable is above the row's tokens": rows["trainable"] <= rows["tokens"],
        "reward is not finite": np.isfinite(table["reward"]),
        "versions end before they start": (table["oldest"] >= 0) & (table["oldest"] <= table["newest"]),
        f"steps are more than {MAX_STEPS}": table["steps"] <= MAX_STEPS,
        "size is more than the payload has": sizes_fit,
    }
    for problem, is_right in checks.items():
        if not is_right.all():
            return problem
    first_row = members.first_row[:-1]
    for name, of_rows in (("tokens", tokens), ("trainable", rows["trainable"].astype(np.int64))):
        if (np.add.reduceat(of_rows, first_row) != table[name]).any():
            return "tokens are not the sum of the rows"
    if (np.add.reduceat(table["tokens"], first) * MIN_TOKEN_BYTES > sizes).any():
        return f"rows have {int(tokens.sum())} tokens, the payload has {sum(sizes)} bytes"
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
