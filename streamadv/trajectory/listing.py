"""Member tables in words, for people: dead letters, notes about foreign data, findings of an audit."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import WireError
from .member_table import read_table
from .members import HAS_REWARD, HAS_VERSION, STATUSES, Members, role_of


def list_table(table: bytes | memoryview, size: int) -> list[dict[str, Any]]:
    """Each member of the payload of `size` bytes as a JSON object; one with the `problem` if they cannot be read."""
    try:
        return list_members(read_table(table, size)[0])
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
                "role": str(role_of(flags)),
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
