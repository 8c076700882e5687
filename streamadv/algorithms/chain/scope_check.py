"""A test for a user's estimator: does it read only what its scope allows, and is it a function of the batch?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import EstimatorError
from ...extras import torch
from ..packed import PackedBatch
from ..registry import Estimate, find_estimator
from . import build_chain, run_chain
from .sources import part_of
from .step import ChainResult

if TYPE_CHECKING:
    from torch import Tensor


def check_estimator(
    estimator: str | Callable[..., Estimate], batch: PackedBatch, **options: Any
) -> ChainResult:
    """Run an estimator on `batch` again, on its parts, and on its groups in another order; return the first result.

    The pipeline calls an estimator of scope "group" with any groups of a batch, and one of scope "row" with any
    trajectories, and computes again what a worker did not finish. So the numbers of a group or trajectory must not
    depend on the others, on the order of the groups, or on earlier calls.

    Args:
      estimator: the function, or its name.
      batch: several uneven groups (`pack_trajectories`), with the columns that the estimator needs.
      options: the estimator's.

    Raises EstimatorError if numbers differ or a result is no valid `Estimate` (level, lengths, finite numbers),
    SettingError for a wrong option and for a function that is not registered.
    """
    definition = find_estimator(estimator)
    chain = build_chain({"estimator": definition.name, "options": options})
    whole = run_chain(chain, batch)
    every = torch.arange(batch.num_trajectories, device=batch.device)

    def compare(trajectories: Tensor, problem: str) -> None:
        part = part_of(batch, trajectories)
        alone = run_chain(chain, part.batch)
        for field in ("advantages", "returns"):
            together, values = getattr(whole, field), getattr(alone, field)
            expected = None if together is None else together[part.indices[whole.level]]
            # Equal up to rounding: a sum may run in another order.
            if expected is not None and not (
                values.shape == expected.shape
                and torch.allclose(values, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
            ):
                raise EstimatorError(f"estimator {definition.name}: {field} {problem}")

    compare(every, "differ in another call with the same batch: it must depend on nothing else")
    groups = [every[batch.trajectory_group == group] for group in range(batch.num_groups)]
    if definition.scope != "batch":
        parts = groups if definition.scope == "group" else list(every[:, None])
        what = "group" if definition.scope == "group" else "trajectory"
        for number, trajectories in enumerate(parts):
            problem = f"of {what} {number} differ when it is alone in the batch"
            compare(trajectories, f"{problem}: scope {definition.scope!r} is too narrow")
    backwards = torch.cat(groups[::-1]) if groups else every
    compare(backwards, "differ when the groups come in another order: no group may depend on its place")
    return whole
