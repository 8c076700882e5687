"""Compares what was pushed with what an engine has said on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def check_wire(found: Sequence[Any], said: Sequence[Any], total: int) -> None:
    """Each row's sampled tokens are answers of the engine one after the other, and all answers are somewhere."""
    wire: dict[tuple[int, ...], list[list[float]]] = {}
    for ids, logs, _ in said:
        wire.setdefault(ids, []).append(np.array(logs, "f4").tolist())
    used = 0
    for trajectory in found:
        for ids, logs in turns_of(trajectory):
            assert logs in wire[tuple(ids)]
            wire[tuple(ids)].remove(logs)
            used += 1
    assert used == total == len(said)


def turns_of(trajectory: Any) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and log-probs of the spans of trained tokens that no prompt interrupts."""
    for row in trajectory.rows:
        mask, at = [*row["response_mask"], 0], 0
        while at < len(mask) - 1:
            if not mask[at]:
                at += 1
                continue
            end = at
            while mask[end]:
                end += 1
            yield row["input_ids"][at:end], row["rollout_log_probs"][at:end]
            at = end
