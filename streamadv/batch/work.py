"""How a batch is cut into work for the advantage workers."""

from __future__ import annotations

from ..algorithms.chain import cut_chain
from .record import BatchRecord


def batch_scope(record: BatchRecord) -> bool:
    """Whether the workers' part of the batch's chain has to see the whole batch."""
    return cut_chain(record.chain, record.late)[0].scope == "batch"
