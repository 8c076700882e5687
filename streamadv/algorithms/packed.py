"""The packed batch that every algorithm works on: rows laid end to end, no padding.

Sizes: N tokens in R rows of M trajectories in G groups; S steps. Trajectories are ordered by (group_id, rollout_index),
rows and groups follow that order. So every segment is contiguous, and a sum over a segment visits its members in one
order, whatever else is in the batch: neither the number of workers nor the order of arrival changes a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from ..errors import ArgumentError, OptionError, TrajectoryError
from ..extras import torch
from ..messages import brief
from ..trajectory.columns import KNOWN_COLUMNS
from .segments import Trainable, segment_sum, tokens_where

if TYPE_CHECKING:
    from torch import Tensor


#: The layout of a batch that its builder vouches for.
BUILT: tuple[Any, ...] = ()
#: What a tensor of any dtype has to hold.
NUMBERS: Final = "real numbers"

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
        size = _check("steps.trajectory", self.trajectory)
        for name in ("trajectory", "row", "start", "end", "state"):
            _check(f"steps.{name}", getattr(self, name), size, "S", "int64")
        _check("steps.rewards", self.rewards, size, "S", "float64")

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
        is_built, steps = self.layout == BUILT, self.steps
        if not is_built:  # else whoever has built it knows
            _check_shapes(self)
        mask = self.columns.get("response_mask")
        indices = (self.cu_seqlens, self.row_trajectory, self.trajectory_group)
        spans = (steps.trajectory, steps.row, steps.start, steps.end, steps.state)
        # On a device, to read a narrowed mask would make the host wait.
        once = mask if self.rewards.device.type == "cpu" else None
        layout = (*indices, *spans, steps.num_tokens, self.num_tokens, self.num_groups, once)
        # The host waits for a device here, so `packing` checks on the host and passes `BUILT` on.
        if not is_built and not self.rewards.is_meta:
            checked = self.layout or (object(),) * len(layout)
            if any(now is not before for now, before in zip(layout[:-1], checked[:-1], strict=True)):
                _check_indices(self)
            if mask is not None and once is not checked[-1] and mask.dtype != torch.bool and len(mask):
                is_right = mask.max() <= 1 if mask.dtype == torch.uint8 else ((mask == 0) | (mask == 1)).all()
                if not bool(is_right):
                    raise ArgumentError("columns['response_mask'] holds values other than 0 and 1")
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
        return {"row": len(self.row_trajectory), "step": len(self.steps), "token": self.num_tokens}[level]

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


# What must hold of a batch


def _check_shapes(batch: PackedBatch) -> None:
    """Raise ArgumentError unless lengths, dtypes and devices fit; reads no values."""
    offsets, tokens = _check("cu_seqlens", batch.cu_seqlens), batch.num_tokens
    if not offsets:
        raise ArgumentError("cu_seqlens is empty, needs one offset more than there are rows")
    trajectories = _check("trajectory_group", batch.trajectory_group)
    sized: list[tuple[str, Tensor | None, int, str, str]] = [
        ("cu_seqlens", batch.cu_seqlens, offsets, "R + 1", "int64"),
        ("row_trajectory", batch.row_trajectory, offsets - 1, "R", "int64"),
        ("row_trainable", batch.row_trainable, offsets - 1, "R", "int64"),
        ("trajectory_group", batch.trajectory_group, trajectories, "M", "int64"),
        ("rewards", batch.rewards, trajectories, "M", "float64"),
        ("baseline", batch.baseline, trajectories, "M", "bool"),
        ("scores", batch.scores, trajectories, "M", "float64"),
        ("truncated", batch.truncated, trajectories, "M", "bool"),
        ("given_mask", batch.given_mask, tokens, "N", NUMBERS),
        *(
            (f"columns[{name!r}]", column, tokens, "N" if name in KNOWN_COLUMNS else "N, ...", NUMBERS)
            for name, column in batch.columns.items()
        ),
        *(
            (f"components[{name!r}]", values, trajectories, "M", NUMBERS)
            for name, values in batch.components.items()
        ),
    ]
    for name, tensor, length, letter, needed in sized:
        if tensor is not None:
            _check(name, tensor, length, letter, needed)
            if tensor.device != batch.rewards.device:
                raise ArgumentError(
                    f"{name} is on {tensor.device}, rewards on {batch.rewards.device}: give both on one device"
                )
    if len(batch.group_sources) not in (0, batch.num_groups):
        raise ArgumentError(
            f"group_sources has {len(batch.group_sources)} entries, needs one for each of {batch.num_groups} groups"
        )


def _check_indices(batch: PackedBatch) -> None:
    """Raise ArgumentError unless rows, trajectories and groups refer to each other correctly, and steps to rows."""
    steps = batch.steps
    tensors = (batch.cu_seqlens, batch.row_trajectory, batch.trajectory_group, batch.row_trainable)
    offsets, row_trajectory, group, trainable = (tensor.cpu().numpy() for tensor in tensors)
    of_steps = (steps.trajectory, steps.row, steps.start, steps.end, steps.state)
    trajectory, row, start, end, state = (tensor.cpu().numpy() for tensor in of_steps)
    lengths = np.diff(offsets)
    if offsets[0] != 0 or (lengths < 0).any():
        raise ArgumentError(
            "cu_seqlens does not begin with 0 and ascend: give where each row starts, and the end"
        )
    if offsets[-1] != batch.num_tokens:
        raise ArgumentError(
            f"cu_seqlens ends at {offsets[-1]}, num_tokens is {batch.num_tokens}: they are one number"
        )
    for name, labels, count, what in (
        ("row_trajectory", row_trajectory, len(group), "trajectories"),
        ("trajectory_group", group, batch.num_groups, "groups"),
    ):
        if len(labels) and (labels[0] < 0 or labels[-1] >= count or (np.diff(labels) < 0).any()):
            raise ArgumentError(f"{name} does not ascend inside 0 .. {count - 1}, the {what} there are")
    if np.count_nonzero(np.diff(group)) + bool(len(group)) != batch.num_groups:
        raise ArgumentError(
            f"trajectory_group leaves out some of the {batch.num_groups} groups: number without gaps"
        )
    if (trainable < -1).any() or (trainable > lengths).any():
        raise ArgumentError("row_trainable is not in 0 .. length of the row (-1: not known)")
    if not len(steps):
        if steps.num_tokens:
            raise ArgumentError(f"steps.num_tokens is {steps.num_tokens} without steps, needs 0")
        return
    if (row < 0).any() or (row >= len(row_trajectory)).any():
        raise ArgumentError(f"steps.row is not in 0 .. {len(row_trajectory) - 1}")
    if (row_trajectory[row] != trajectory).any():
        raise ArgumentError("steps.trajectory is not that of the step's row")
    if (start < offsets[row]).any() or (end < start).any() or (end > offsets[row + 1]).any():
        raise ArgumentError(
            "steps.start and end are not inside the step's row, counted from the start of the batch"
        )
    if (end - start).sum() != steps.num_tokens:
        raise ArgumentError(f"steps.num_tokens is {steps.num_tokens}, the spans hold {(end - start).sum()}")
    if (state < -1).any():
        raise ArgumentError("steps.state is below -1: number the states from 0, -1 = none")


def _check(name: str, tensor: Any, length: int | None = None, letter: str = "", needed: str = NUMBERS) -> int:
    """The length of a tensor of one dimension, or of any number where `letter` ends with "...".

    Raises ArgumentError for anything else, another length than `length`, or another dtype than `needed`.
    """
    is_tensor = isinstance(tensor, torch.Tensor)
    if not is_tensor or tensor.dim() < 1 or (tensor.dim() > 1 and not letter.endswith("...")):
        what = f"a tensor of shape {list(tensor.shape)}" if is_tensor else f"a {type(tensor).__name__}"
        raise ArgumentError(f"{name} is {what}, needs a tensor of one dimension")
    size: int = tensor.shape[0]
    if length is not None and size != length:
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}, needs [{letter} = {length}]")
    fits = {
        NUMBERS: not tensor.is_complex(),
        "int64": tensor.dtype == torch.int64,
        "float64": tensor.is_floating_point(),
        "bool": tensor.dtype == torch.bool,
    }
    if not fits[needed]:
        raise ArgumentError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, needs {needed}")
    return size
