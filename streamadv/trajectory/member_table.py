"""Reads the member table: members as bytes, and whether they can be true.

It travels through the streams beside the payload, so that grouping, planning and outcome estimators never touch a
column. It has one fixed-width record per trajectory; behind the records stands what only some of them have:

    size, members, flags, bytes of the text    4 x u4
    MEMBER records
    ROW records                                if a member has several rows (flag MANY_ROWS)
    STEP records                               of all members
    named rewards                              f8, one for each name and member
    entry counts                               u4, one for each name and row: of extra columns that are not per token
    text                                       JSON: names of columns, rewards and entry counts, keys of states
    25 bytes that nobody reads                 if a producer of an earlier release has traced it (flag TRACED)

All numbers are little-endian. `packet_encoding.encode_table` writes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import WireError
from ..messages import brief, one_line
from .columns import COLUMN_NAME, KNOWN_COLUMNS, MAX_COLUMNS, REQUIRED_COLUMNS
from .fields import MAX_SHORT_TEXT
from .members import (
    BASELINE,
    EVAL,
    HAS_REWARD,
    HAS_VERSION,
    MEMBER,
    ROW,
    STATUSES,
    STEP,
    Members,
    Named,
    join_named,
    join_steps,
    offsets,
    references_of,
)
from .packet import MAX_PACKET_MEMBERS
from .schema import MAX_GROUP_SIZE, MAX_REWARDS, MAX_ROWS, MAX_STEPS, Row

MAX_ROW_TOKENS: Final = 1 << 27
#: Fewest stored bytes of a token: the two columns that every row has.
MIN_TOKEN_BYTES: Final = sum(KNOWN_COLUMNS[name].itemsize for name in REQUIRED_COLUMNS)
#: Each member of a packet may have its own.
MAX_NAMED_REWARDS: Final = MAX_PACKET_MEMBERS * MAX_REWARDS

HEAD: Final = struct.Struct("<IIII")
_SIZE_BYTES: Final = 4  # of the first field
# Flags of a table.
MANY_ROWS: Final = 1
_TRACED: Final = 2
_CONTEXT_BYTES: Final = 25
# Flags of a member.
_ALL_FLAGS: Final = HAS_REWARD | BASELINE | HAS_VERSION | EVAL
#: Texts up to this size are parsed once: most packets of a run have the same.
_CACHED_TEXT: Final = 1024


def read_table(raw: bytes | memoryview, size: int | None = None) -> tuple[Members, tuple[str, ...]]:
    """Members and names of columns of one, as `read_tables`. size: bytes of its payload."""
    tables = read_tables([raw], None if size is None else [size])
    return tables.members, tables.columns[0]


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
    """Member tables: their members end to end, and of each how many it has, and its names of columns."""

    members: Members
    counts: list[int]
    columns: list[tuple[str, ...]]
    names: list[Named]


def read_tables(raws: Sequence[bytes | memoryview], sizes: Sequence[int] | None = None) -> Tables:
    """All member tables together: arrays are checked and cut as quickly for hundreds as for one. Raises WireError.

    Every size is compared with the bytes that are there before an array is made. sizes: bytes of each payload; given
    them, WireError is also raised for values that no producer has written.
    """
    heads = [_read_head(raw) for raw in raws]
    counts = [head.members for head in heads]
    table = np.frombuffer(b"".join([head.records for head in heads]), MEMBER)
    first = offsets(counts)
    num_rows, num_steps = (
        np.add.reduceat(table[name], first[:-1], dtype=np.int64).tolist() for name in ("rows", "steps")
    )
    has_rows = np.repeat([head.has_rows for head in heads], counts)
    if (table["rows"] != 1)[~has_rows].any():
        raise WireError("member table has no rows, and members with several")
    # Of each table: bytes of the rows and of the steps, of the named rewards and of the entry counts by name.
    rows_of, steps_of, rewards_of, entries_of = [], [], [], []
    for head, in_rows, in_steps in zip(heads, num_rows, num_steps, strict=True):
        names = head.names
        lengths = [in_rows * ROW.itemsize * head.has_rows, in_steps * STEP.itemsize]
        lengths += [head.members * 8] * len(names.rewards) + [in_rows * 4] * len(names.entries)
        if sum(lengths) != len(head.rest):
            raise WireError(
                f"member table has {len(head.rest)} bytes behind its records, which say {sum(lengths)}"
            )
        own_rows, own_steps, *named = [
            head.rest[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))
        ]
        rows_of.append(own_rows)
        steps_of.append(own_steps)
        rewards_of.append(dict(zip(names.rewards, named, strict=False)))
        entries_of.append(dict(zip(names.entries, named[len(names.rewards) :], strict=True)))
    rows = np.empty(len(table), ROW)  # as of members with one row each
    rows["tokens"], rows["trainable"] = table["tokens"], table["trainable"]
    if has_rows.any():
        single = [rows[start:stop].tobytes() for start, stop in pairwise(first.tolist())]
        rows = np.frombuffer(
            b"".join([own or other for own, other in zip(rows_of, single, strict=True)]), ROW
        )
    steps, states = join_steps(steps_of, num_steps, [head.names.states for head in heads])
    rewards = join_named(rewards_of, "<f8", np.nan, counts)
    entries = join_named(entries_of, "<u4", 0, num_rows)
    members = Members(table, rows, steps, states, rewards, entries)
    if sizes is not None and (problem := packets_problem(members, sizes, counts)):
        raise WireError(f"member table: {problem}")
    return Tables(
        members,
        counts,
        [head.names.columns for head in heads],
        [Named(head.names.rewards, head.names.entries) for head in heads],
    )


class _Head(NamedTuple):
    """A member table as far as its head and its text tell."""

    members: int
    has_rows: bool
    records: bytes | memoryview  # MEMBER
    rest: bytes | memoryview  # what stands between the records and the text
    names: _Names


def _read_head(raw: bytes | memoryview) -> _Head:
    """Raises WireError."""
    if len(raw) < HEAD.size:
        raise WireError(f"member table has {len(raw)} bytes, needs {HEAD.size} at least")
    size, count, flags, text_size = HEAD.unpack_from(raw)
    if size != len(raw) or flags & ~(MANY_ROWS | _TRACED) or not 1 <= count <= 2 * MAX_GROUP_SIZE:
        raise WireError(f"member table of {len(raw)} bytes says {size} bytes, {count} members, flags {flags}")
    text_end = size - (_CONTEXT_BYTES if flags & _TRACED else 0)
    text_at, rest_at = text_end - text_size, HEAD.size + count * MEMBER.itemsize
    if text_at < rest_at:
        raise WireError(f"member table of {size} bytes has no room for {count} members and their names")
    text = bytes(raw[text_at:text_end])
    names = _cached_names(text) if text_size <= _CACHED_TEXT else _parse_names(text)
    return _Head(count, bool(flags & MANY_ROWS), raw[HEAD.size : rest_at], raw[rest_at:text_at], names)


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
        raise WireError(f"member table: its text {brief(text)} is none: {one_line(str(error))}") from error
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


def packets_problem(members: Members, sizes: Sequence[int], counts: Sequence[int]) -> str | None:
    """Why these are not the members of packets, or None. Readers allocate memory by their numbers.

    members: of all packets, end to end. sizes, counts: payload bytes and members of each, one member at least.
    """
    table, rows = members.table, members.rows
    tokens = rows["tokens"].astype(np.int64)
    first = offsets(counts)[:-1]  # of each payload
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
    return None


def list_table(table: bytes | memoryview, size: int) -> list[dict[str, Any]]:
    """Each member of the payload of `size` bytes as a JSON object; one with the `problem` if they cannot be read."""
    try:
        members, _ = read_table(table, size)
    except WireError as error:
        return [{"problem": str(error)}]
    return [
        {
            "index": member.rollout_index,
            "status": str(member.status),
            "role": str(member.role),
            "rows": len(member.row_lengths),
            "tokens": member.num_tokens,
            "trainable": sum(member.row_trainable),
            "reward": member.reward,
            **({"rewards": member.rewards} if member.rewards else {}),
            "versions": None if member.versions is None else list(member.versions),
            "steps": len(member.steps),
        }
        for member in references_of(members, repeat(("", None), len(members)))
    ]
