"""The counters of a run's ledger, of all shards together."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..store.replies import as_count
from .run import Run


def read_counters(run: Run) -> Counter[str]:
    """Read every shard's ledger; a counter that is no number counts as 0."""
    pipe: Any = run.connection.scripts.pipeline(transaction=False)
    for keys in run.keys.shards:
        pipe.hgetall(keys.ledger)
    counters = Counter[str]()
    for ledger in pipe.execute():
        for name, value in ledger.items():
            counters[name.decode(errors="replace")] += as_count(value)
    return counters
