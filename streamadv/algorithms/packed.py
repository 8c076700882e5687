"""The packed batch that every algorithm works on: rows laid end to end, no padding.

Sizes: N tokens in R rows of M trajectories in G groups; S steps. Trajectories are ordered by (group_id, rollout_index),
rows and groups follow that order. So every segment is contiguous, and a sum over a segment visits its members in one
order, whatever else is in the batch: neither the number of workers nor the order of arrival changes a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from ..errors import ArgumentError, OptionError, TrajectoryError
from ..extras import torch
from ..messages import brief
from .packed_checks import BUILT, check_changed, check_shapes, check_steps, layout_of
from .segments import Trainable, segment_sum, tokens_where

if TYPE_CHECKING:
    from torch import Tensor


#: What one value of a result belongs to.
Level = Literal["row", "step", "token"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Steps:
    """The turns of a batch, in time order within a trajectory. All tensors have length S."""

    trajectory: Tensor  # int64: index into trajectories
    row: Tensor  # int64: index into rows
    start: Tensor  # int64: first token, counted from the start of the packed batch
    end: Tensor  # int64: exclusive
    rewards: Tensor  # float64
    state: Tensor  # int64: equal numbers = equal state_key; -1 = no state_key
    num_tokens: int  # tokens in all spans

    def __post_init__(self) -> None:
        check_steps(self)

    def __len__(self) -> int:
        return len(self.trajectory)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows of a batch, or of some of its groups, with everything that an algorithm may read.

    Rewards and other scalars are float64; columns keep their dtype, and the chain rounds results once, at its end.
    The constructor raises ArgumentError for lengths, dtypes, devices or indices that do not fit: algorithms index by
    these tensors and check no bounds.
    """

    cu_seqlens: Tensor  # [R + 1] int64: row r holds tokens cu_seqlens[r] : cu_seqlens[r + 1]
    row_trajectory: Tensor  # [R] int64
    row_trainable: Tensor  # [R] int64: trainable tokens of the row, also where its columns were not fetched
    trajectory_group: Tensor  # [M] int64
    rewards: Tensor  # [M] float64: the trajectory's reward, as the chain has shaped it so far
    baseline: Tensor  # [M] bool: role is baseline
    steps: Steps
    num_tokens: int  # N, on the host: to read it from a device would wait for the device
    num_groups: int  # G: groups are numbered from 0 without gaps
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each [N]; response_mask uint8
    components: Mapping[str, Tensor] = field(default_factory=dict)  # named rewards, [M] float64; absent = 0
    scores: Tensor | None = None  # [M] float64: the trajectory's reward as pushed; None = `rewards`
    truncated: Tensor | None = None  # [M] bool: status is truncated; None = nobody's
    given_mask: Tensor | None = None  # [N] response_mask as packed; None = no step has narrowed it
    group_sources: Sequence[str | None] = ()  # data_source of each of the G groups; () = not known
    #: The tensors whose values were checked; a copy that holds the same objects is not checked again.
    layout: tuple[Any, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout != BUILT:  # else whoever has built it knows
            check_shapes(self)
        layout = layout_of(self)
        check_changed(self, layout)
        object.__setattr__(self, "layout", layout)

    @property
    def num_rows(self) -> int:
        return len(self.row_trajectory)

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectory_group)

    @property
    def device(self) -> torch.device:
        return self.rewards.device

    @property
    def row_lengths(self) -> Tensor:
        """[R] int64: tokens of each row."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def token_row(self) -> Tensor:
        """[N] int64: the row of each token."""
        return torch.repeat_interleave(self.row_lengths, output_size=self.num_tokens)

    @property
    def group_offsets(self) -> Tensor:
        """[G + 1] int64: group g holds trajectories group_offsets[g] : group_offsets[g + 1]."""
        return offsets_of(self.trajectory_group, self.num_groups)

    @property
    def row_offsets(self) -> Tensor:
        """[M + 1] int64: trajectory m holds rows row_offsets[m] : row_offsets[m + 1]."""
        return offsets_of(self.row_trajectory, self.num_trajectories)

    @property
    def trainable_tokens(self) -> Trainable:
        """The tokens with response_mask 1. Raises TrajectoryError without that column."""
        return tokens_where(self.column("response_mask"), self.cu_seqlens)

    @property
    def generated_tokens(self) -> Trainable:
        """The trainable tokens as pushed, those included that a step has masked since."""
        return (
            self.trainable_tokens
            if self.given_mask is None
            else tokens_where(self.given_mask, self.cu_seqlens)
        )

    @property
    def all_tokens(self) -> Trainable:
        """Every token, prompts and observations included."""
        return Trainable(torch.ones(self.num_tokens, dtype=torch.bool, device=self.device), self.cu_seqlens)

    def column(self, name: str) -> Tensor:
        """[N]: the column `name`. Raises TrajectoryError if the batch lacks it, or it has another shape."""
        column = self.columns.get(name)
        if column is None:
            present = ", ".join(self.columns) or "none"
            raise TrajectoryError(f"column {name} is needed, the batch has {present}: supply it")
        if column.shape != (self.num_tokens,):
            raise TrajectoryError(
                f"column {name} has shape {tuple(column.shape)}, needs ({self.num_tokens},): one value per token"
            )
        return column

    def count(self, level: Level) -> int:
        """How many values a result of `level` has: R, S or N. Raises OptionError for an unknown level."""
        if level not in LEVELS:
            raise OptionError(f"level {brief(level)} is unknown: choose one of {', '.join(LEVELS)}")
        return {"row": self.num_rows, "step": len(self.steps), "token": self.num_tokens}[level]

    def with_columns(self, **columns: Tensor) -> PackedBatch:
        """A copy with columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def with_step_rewards(self, rewards: Tensor) -> PackedBatch:
        """A copy with other step rewards, [S] float64."""
        return replace(self, steps=replace(self.steps, rewards=rewards))


def offsets_of(labels: Tensor, count: int) -> Tensor:
    """[count + 1] int64: where each label 0 .. count - 1 starts in the ascending `labels` ([K] int64)."""
    return torch.searchsorted(labels, torch.arange(count + 1, device=labels.device))


def ends_of(lengths: Tensor) -> Tensor:
    """[K + 1]: the offsets of segments of these `lengths` [K] that lie end to end."""
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])


def expand(batch: PackedBatch, level: Level, values: Tensor) -> Tensor:
    """Spread `values` of a level over the trainable tokens that they belong to.

    Args:
      level: "row": a value per row, for its trainable tokens; "step": per step, for those of its span (the later step
        where spans overlap); "token": per token.
      values: [R], [S] or [N], real numbers on the batch's device.

    Returns:
      [N] float32, 0 at all other tokens; memory of its own, no gradient.

    Raises ArgumentError for another number of values, OptionError for an unknown level,
    TrajectoryError if the batch lacks the column response_mask.
    """
    count = batch.count(level)
    if not isinstance(values, torch.Tensor) or values.is_complex() or values.device != batch.device:
        is_tensor = isinstance(values, torch.Tensor)
        kind = f"{values.dtype} on {values.device}" if is_tensor else f"a {type(values).__name__}"
        raise ArgumentError(f"values is {kind}, needs a tensor of real numbers on {batch.device}")
    if values.shape != (count,):
        raise ArgumentError(f"values of level {level!r} have shape {tuple(values.shape)}, need ({count},)")
    rounded = values.detach().to(torch.float32)
    tokens = batch.trainable_tokens
    if level == "row":
        return tokens.spread(rounded)
    if level == "token":
        return tokens.only(rounded)
    # Outside all spans a token's step is -1: the zero at the end.
    with_zero = torch.cat([rounded, rounded.new_zeros(1)])
    return tokens.only(with_zero[token_step(batch)])


def token_step(batch: PackedBatch) -> Tensor:
    """[N] int64: the step of each token (the later one where spans overlap), -1 outside all spans."""
    step, position = _span_tokens(batch.steps)
    no_step = torch.full((batch.num_tokens,), -1, dtype=torch.int64, device=batch.device)
    return no_step.scatter_reduce(0, position, step, "amax")


def span_sum(batch: PackedBatch, values: Tensor) -> Tensor:
    """[S] float64: sum of a column [N] over each step's span."""
    offsets = ends_of(batch.steps.end - batch.steps.start)
    return segment_sum(values[_span_tokens(batch.steps)[1]], offsets)


def _span_tokens(steps: Steps) -> tuple[Tensor, Tensor]:
    """(step, position in the batch) of the tokens of all spans, span by span; int64."""
    lengths = steps.end - steps.start
    step = torch.repeat_interleave(lengths, output_size=steps.num_tokens)
    before = torch.cumsum(lengths, 0) - lengths  # tokens of earlier spans
    index = torch.arange(steps.num_tokens, device=step.device)
    return step, index + (steps.start - before)[step]


@dataclass(frozen=True, slots=True)
class Part:
    """Trajectories of a batch, and where their values stand in the whole one: int64 indices."""

    batch: PackedBatch
    trajectories: Tensor
    indices: Mapping[Level, Tensor]  # of rows, steps and tokens


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
    return Part(part, trajectories, {"row": rows, "step": positions, "token": tokens})


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
