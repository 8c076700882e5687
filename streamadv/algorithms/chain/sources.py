"""Parts of a batch: those of its data sources, whose results are put together again, and any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ...extras import torch
from ..chain_metrics import merge_metrics
from ..packed import PackedBatch, Steps, ends_of, offsets_of
from .step import ChainResult

if TYPE_CHECKING:
    from torch import Tensor

#: What groups without a data_source count under.
UNKNOWN: Final = "unknown"


def run_by_source(run: Callable[[str, PackedBatch], ChainResult], batch: PackedBatch) -> ChainResult:
    """`run(source, part)` on the groups of each source, in the order of the sources' names.

    The metrics are those of the whole batch and, as `<source>/<metric>`, those of each source.
    """
    sources, parts = zip(*split_by_source(batch), strict=True)
    results = [run(source, part.batch) for source, part in zip(sources, parts, strict=True)]
    metrics, weights = merge_metrics([(result.metrics, result.weights) for result in results])
    for source, result in zip(sources, results, strict=True):
        metrics |= {f"{source}/{name}": value for name, value in result.metrics.items()}
        weights |= {f"{source}/{name}": weight for name, weight in result.weights.items()}
    level = results[0].level

    def joined(level: str, values: Sequence[Tensor | None]) -> Any:
        """The values of all parts; None if one has none."""
        given = [value for value in values if value is not None]
        if len(given) < len(values):
            return None
        whole = given[0].new_zeros((sum(map(len, given)), *given[0].shape[1:]))
        for part, value in zip(parts, given, strict=True):
            whole[part.indices[level]] = value
        return whole

    return ChainResult(
        level=level,
        advantages=joined(level, [result.advantages for result in results]),
        returns=joined(level, [result.returns for result in results]),
        rewards=joined("trajectory", [result.rewards for result in results]),
        step_rewards=joined("step", [result.step_rewards for result in results]),
        columns={
            name: joined("token", [result.columns[name] for result in results]) for name in results[0].columns
        },
        metrics=metrics,
        weights=weights,
    )


def split_by_source(batch: PackedBatch) -> Iterator[tuple[str, Part]]:
    """The groups of each source, at least of one, sorted by source."""
    names = [source or UNKNOWN for source in batch.group_sources] or [UNKNOWN] * batch.num_groups
    sources = sorted(set(names)) or [UNKNOWN]
    number = torch.tensor([sources.index(name) for name in names], dtype=torch.int64, device=batch.device)
    for k, source in enumerate(sources):
        yield source, part_of(batch, (number == k)[batch.trajectory_group].nonzero().flatten())


@dataclass(frozen=True, slots=True)
class Part:
    """Trajectories of a batch, and where their values stand in the whole one: int64 indices."""

    batch: PackedBatch
    indices: Mapping[str, Tensor]  # by level: of trajectories, rows, steps and tokens


def part_of(batch: PackedBatch, trajectories: Tensor) -> Part:
    """The trajectories [K] int64, in this order; those of a group must follow each other.

    Groups are numbered anew, columns copied. The host waits for a device to know how many rows and tokens there are.
    """
    rows, row_trajectory = _spans(batch.row_offsets, trajectories)
    tokens, _ = _spans(batch.cu_seqlens, rows)
    step_offsets = offsets_of(batch.steps.trajectory, batch.num_trajectories)
    positions, step_trajectory = _spans(step_offsets, trajectories)
    cu_seqlens = ends_of(batch.row_lengths[rows])
    present, groups = torch.unique_consecutive(batch.trajectory_group[trajectories], return_inverse=True)
    part = replace(
        batch,
        cu_seqlens=cu_seqlens,
        row_trajectory=row_trajectory,
        row_trainable=batch.row_trainable[rows],
        trajectory_group=groups,
        rewards=batch.rewards[trajectories],
        baseline=batch.baseline[trajectories],
        steps=_steps(batch, rows, positions, step_trajectory, cu_seqlens),
        num_tokens=len(tokens),
        num_groups=len(present),
        columns={name: column[tokens] for name, column in batch.columns.items()},
        components={name: rewards[trajectories] for name, rewards in batch.components.items()},
        scores=None if batch.scores is None else batch.scores[trajectories],
        truncated=None if batch.truncated is None else batch.truncated[trajectories],
        given_mask=None if batch.given_mask is None else batch.given_mask[tokens],
        group_sources=[batch.group_sources[group] for group in present.tolist()]
        if batch.group_sources
        else (),
    )
    return Part(part, {"trajectory": trajectories, "row": rows, "step": positions, "token": tokens})


def _steps(batch: PackedBatch, rows: Tensor, positions: Tensor, owners: Tensor, cu_seqlens: Tensor) -> Steps:
    """The steps at `positions`, of the trajectories `owners`; rows and cu_seqlens: of the part."""
    steps = batch.steps
    row_in_part = torch.empty_like(batch.row_trajectory)
    row_in_part[rows] = torch.arange(len(rows), device=rows.device)
    row = row_in_part[steps.row[positions]]
    shift = cu_seqlens[row] - batch.cu_seqlens[steps.row[positions]]
    start, end = steps.start[positions] + shift, steps.end[positions] + shift
    return Steps(
        trajectory=owners,
        row=row,
        start=start,
        end=end,
        rewards=steps.rewards[positions],
        state=steps.state[positions],
        num_tokens=int((end - start).sum()),
    )


def _spans(offsets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(the indices offsets[p] : offsets[p + 1] of all `positions`, one after another; of each the number of its p)."""
    lengths = offsets[positions + 1] - offsets[positions]
    owner = torch.repeat_interleave(lengths)
    shift = offsets[positions] - ends_of(lengths)[:-1]
    return shift[owner] + torch.arange(len(owner), device=owner.device), owner
