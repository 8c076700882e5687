"""A test for a user's estimator: does it read only what its scope allows?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import EstimatorError
from ..packed import PackedBatch, Steps
from ..registry import get_estimator
from . import ChainResult, build_chain, run_chain


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
    bounds = batch.group_offsets.tolist() if scope == "group" else range(batch.num_trajectories + 1)
    parts = [run_chain(chain, _part(batch, *pair)) for pair in itertools.pairwise(bounds)]
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


def _part(batch: PackedBatch, first: int, last: int) -> PackedBatch:
    """The trajectories first .. last - 1 as a batch."""
    row, end_row = batch.row_offsets[[first, last]].tolist()
    token, end_token = batch.cu_seqlens[[row, end_row]].tolist()
    members, rows, tokens = slice(first, last), slice(row, end_row), slice(token, end_token)
    groups = batch.trajectory_group[members]
    groups = groups - groups[0]
    return replace(
        batch,
        cu_seqlens=batch.cu_seqlens[row : end_row + 1] - token,
        row_trajectory=batch.row_trajectory[rows] - first,
        row_trainable=batch.row_trainable[rows],
        trajectory_group=groups,
        rewards=batch.rewards[members],
        baseline=batch.baseline[members],
        steps=_steps(batch.steps, first, last, row, token),
        num_tokens=end_token - token,
        num_groups=int(groups[-1]) + 1,
        columns={name: column[tokens] for name, column in batch.columns.items()},
        components={name: rewards[members] for name, rewards in batch.components.items()},
        scores=None if batch.scores is None else batch.scores[members],
        truncated=None if batch.truncated is None else batch.truncated[members],
        given_mask=None if batch.given_mask is None else batch.given_mask[tokens],
    )


def _steps(steps: Steps, first: int, last: int, row: int, token: int) -> Steps:
    inside = (steps.trajectory >= first) & (steps.trajectory < last)
    start, end = steps.start[inside] - token, steps.end[inside] - token
    return Steps(
        trajectory=steps.trajectory[inside] - first,
        row=steps.row[inside] - row,
        start=start,
        end=end,
        rewards=steps.rewards[inside],
        state=steps.state[inside],
        num_tokens=int((end - start).sum()),
    )


def _split(together: Tensor, alone: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(alone, torch.split(together, [len(part) for part in alone]), strict=True))


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding: a sum may run in another order."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
