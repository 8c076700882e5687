"""Foreign data: items in a run's keys that no process of the run has written.

A process that finds such an item removes it in one script, which counts it as `malformed` and lists it with the
reason among the dead letters. The item is not a trajectory, so the other counters of the ledger do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ..messages import log_fields, one_line
from ..trajectory.member_table import cut_tables, list_table
from .run import Shard

logger = logging.getLogger(__name__)

#: How an item is removed from the structures that are no streams.
REMOVALS: Final = {
    "batches": "HDEL",
    "producers": "HDEL",
    "open": "ZREM",
    "garbage": "LREM",
    "scored": "LREM",
}
#: Fields of stream entries with member tables. The size of their payloads is not judged here.
TABLES: Final = (b"table", b"tables")
TABLE_BYTES: Final = 1 << 14  # longer ones are not read
ANY_SIZE: Final = 1 << 62
#: Characters of a removed item that are kept for operators.
TEXT_CHARS: Final = 2000


def reject(
    shard: Shard,
    key: str,
    item: str | bytes,
    problem: str,
    fields: Mapping[bytes, bytes] | None = None,
    *,
    stage: str = "",
) -> None:
    """Remove an item (entry id, field or member) of the structure at `key`; list it with `problem` and its `fields`.

    `stage` is the consumer group that has read the entry, if one has.
    """
    place = key.partition("}:")[2]
    problem = one_line(problem)
    shown = {
        name.decode(errors="backslashreplace")[:100]: _shown(name, value)
        for name, value in list((fields or {}).items())[:20]
    }
    text = repr(shown)[:TEXT_CHARS]
    args = [REMOVALS.get(place, "XDEL"), stage, item, place, problem, text]
    if shard.call("reject", args, place=key):
        extra = log_fields("malformed_removed", run=shard.run, role=stage or None)
        logger.error("removed from %s: %s", place, problem, extra=extra)


def _shown(name: bytes, value: bytes) -> Any:
    """Member tables in words, or why they are none; of anything else the beginning."""
    if name not in TABLES or not 0 < len(value) <= TABLE_BYTES:
        return value[:200]
    return [member for table in cut_tables(value) for member in list_table(table, ANY_SIZE)]
