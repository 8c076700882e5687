"""The settings by which the trainer queue names batches, for the whole job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NamingSettings:
    """Settings that rank 0 names batches by, and writes into the run."""

    batch_groups: int
    min_groups: int  # enough to name a batch
    prefetch: int
    max_staleness: int | None
    drop_after: int | None
    keep_rolled_back: bool
    needs: frozenset[str]  # columns producers must have pushed
    chain: Mapping[str, Any]
    late: tuple[str, ...]
    tokens_per_micro_batch: int | None
    keep_groups: bool = False
    quotas: Mapping[str, float] = field(default_factory=dict)  # data source -> weight of its share of a batch
