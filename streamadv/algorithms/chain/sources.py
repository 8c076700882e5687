"""A batch split by the data source of its groups, and the results of the parts put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...extras import torch
from ..chain_metrics import merge_metrics
from ..packed import Level, PackedBatch, Part, part_of
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

    def joined(level: Level, values: Sequence[Tensor | None]) -> Any:
        """The values of all parts; None if one has none."""
        if any(value is None for value in values):
            return None
        return _scattered(batch.count(level), [part.indices[level] for part in parts], values)

    return ChainResult(
        level=level,
        advantages=joined(level, [result.advantages for result in results]),
        returns=joined(level, [result.returns for result in results]),
        rewards=_scattered(
            batch.num_trajectories, [part.trajectories for part in parts], [r.rewards for r in results]
        ),
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


def _scattered(count: int, indices: Sequence[Tensor], values: Sequence[Any]) -> Tensor:
    whole: Tensor = values[0].new_zeros((count, *values[0].shape[1:]))
    for index, part in zip(indices, values, strict=True):
        whole[index] = part
    return whole
