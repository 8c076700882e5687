"""Prints member tables for people: dead letters, notes about foreign data, findings of an audit."""

from __future__ import annotations

from itertools import repeat
from typing import Any

from ..errors import WireError
from .member_table import read_table
from .reference import references_of


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
