"""Member tables in words, for people: dead letters, notes about foreign data, findings of an audit."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ..errors import WireError
from .member_table import decode_table, members_problem
from .members import BASELINE, HAS_REWARD, HAS_VERSION, STATUSES, Members
from .schema import Role

_SIZE: Final = struct.Struct("<I")


def read_table(table: bytes, size: int) -> Members:
    """The members of a payload of `size` bytes. Raises WireError for a table that no producer has written."""
    members, _ = decode_table(table)
    if problem := members_problem(members, size):
        raise WireError(f"member table: {problem}")
    return members


def list_table(table: bytes, size: int) -> list[dict[str, Any]]:
    """Each member of the payload of `size` bytes as a JSON object; one with the `problem` if they cannot be read."""
    try:
        return list_members(read_table(table, size))
    except WireError as error:
        return [{"problem": str(error)}]


def list_members(members: Members) -> list[dict[str, Any]]:
    """Each member as a JSON object."""
    rewards = {name: values.tolist() for name, values in members.rewards.items()}
    listed = []
    for position, record in enumerate(members.table):
        flags = int(record["flags"])
        named = {name: values[position] for name, values in rewards.items() if not np.isnan(values[position])}
        listed.append(
            {
                "index": int(record["index"]),
                "status": str(STATUSES[int(record["status"])]),
                "role": str(Role.BASELINE if flags & BASELINE else Role.TRAIN),
                "rows": int(record["rows"]),
                "tokens": int(record["tokens"]),
                "trainable": int(record["trainable"]),
                "reward": float(record["reward"]) if flags & HAS_REWARD else None,
                **({"rewards": named} if named else {}),
                "versions": [int(record["oldest"]), int(record["newest"])] if flags & HAS_VERSION else None,
                "steps": int(record["steps"]),
            }
        )
    return listed


def cut_tables(tables: bytes) -> Iterator[bytes]:
    """Member tables that stand one after another, each of which begins with its size; what is none comes last."""
    at = 0
    while at < len(tables):
        size = _SIZE.unpack_from(tables, at)[0] if len(tables) - at >= _SIZE.size else 0
        stop = at + size if _SIZE.size <= size <= len(tables) - at else len(tables)
        yield tables[at:stop]
        at = stop
