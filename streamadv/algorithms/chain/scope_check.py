"""A test for a user's estimator: does it read only what its scope allows?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import EstimatorError
from ..packed import PackedBatch
from ..parts import part_of
from ..registry import get_estimator
from . import build_chain, run_chain
from .result import ChainResult


def check_estimator(name: str, batch: PackedBatch, **options: Any) -> ChainResult:
    """Run the estimator `name` on `batch` and on its parts, compare, and return the result for the whole batch.

    The pipeline calls an estimator of scope "group" with any groups of a batch, and one of scope "row" with any
    trajectories. So a group's or trajectory's numbers must not depend on the others: this runs every part alone. Pass a
    batch of several uneven groups (`pack`) with the columns that the estimator needs, and the estimator's options.

    Raises EstimatorError if the numbers differ or the result is no valid `registry.Estimate`, SettingError for a wrong
    option.
    """
    chain = build_chain({"estimator": name, "options": options})
    scope = get_estimator(name).scope
    whole = run_chain(chain, batch)
    if scope == "batch":
        return whole
    number = batch.trajectory_group if scope == "group" else torch.arange(batch.num_trajectories)
    count = batch.num_groups if scope == "group" else batch.num_trajectories
    parts = [run_chain(chain, part_of(batch, number == k).batch) for k in range(count)]
    for field in ("advantages", "returns"):
        together = getattr(whole, field)
        alone = [getattr(part, field) for part in parts]
        if together is not None and not _alike(torch.cat(alone), together):
            part = next(i for i, pair in enumerate(_split(together, alone)) if not _alike(*pair))
            what = "group" if scope == "group" else "trajectory"
            raise EstimatorError(
                f"estimator {name}: {field} of {what} {part} differ when it is alone in the batch: "
                f"scope {scope!r} is too narrow"
            )
    return whole


def _split(together: Tensor, alone: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(alone, torch.split(together, [len(part) for part in alone]), strict=True))


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding: a sum may run in another order."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
