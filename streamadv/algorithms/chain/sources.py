"""A batch split by the data source of its groups, and the results of the parts put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ...extras import torch
from ..chain_metrics import merge_metrics
from ..packed import Level, PackedBatch
from ..parts import Part, part_of
from .result import ChainResult

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
    return ChainResult(
        level=level,
        advantages=_joined(batch.count(level), parts, level, [result.advantages for result in results]),
        returns=_joined(batch.count(level), parts, level, [result.returns for result in results]),
        rewards=_scattered(
            batch.num_trajectories, [p.trajectories for p in parts], [r.rewards for r in results]
        ),
        step_rewards=_scattered(
            len(batch.steps), [part.indices["step"] for part in parts], [r.step_rewards for r in results]
        ),
        columns={
            name: _scattered(
                batch.num_tokens,
                [part.indices["token"] for part in parts],
                [r.columns[name] for r in results],
            )
            for name in results[0].columns
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


def _joined(
    count: int, parts: Sequence[Part], level: Level, values: Sequence[Tensor | None]
) -> Tensor | None:
    given = [value for value in values if value is not None]
    if len(given) < len(values):
        return None
    return _scattered(count, [part.indices[level] for part in parts], given)


def _scattered(count: int, indices: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    whole = values[0].new_zeros((count, *values[0].shape[1:]))
    for index, part in zip(indices, values, strict=True):
        whole[index] = part
    return whole
