"""The packed batch every algorithm works on: rows laid end to end, no padding.

Sizes: N tokens in R rows of M trajectories in G groups; S steps. Trajectories are ordered by
(group_id, rollout_index), groups and rows follow, so every segment is contiguous and a sum over a segment
visits its members in the same order whatever else is in the batch: results do not depend on the number of
workers or the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, OptionError, TrajectoryError
from ..messages import brief
from ..trajectory.columns import Array
from .packed_checks import BUILT, check_shapes, check_steps, check_values, layout_of
from .segments import segment_sum
from .trainable import spread_rows, trainable

Level = Literal["row", "step", "token"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)


class StepLike(Protocol):
    """A turn: `schema.Step`, or the compact form it has in a reference."""

    @property
    def row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def reward(self) -> float: ...
    @property
    def state_key(self) -> str | None: ...


class Packable(Protocol):
    """What `pack` needs to know of a trajectory; its columns come separately.

    One with named rewards has an attribute `rewards` too, Mapping[str, float], one with a status `status`.
    """

    @property
    def group_id(self) -> str: ...
    @property
    def rollout_index(self) -> int: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def is_baseline(self) -> bool: ...
    @property
    def row_lengths(self) -> Sequence[int]: ...
    @property
    def row_trainable(self) -> Sequence[int]: ...
    @property
    def steps(self) -> Sequence[StepLike]: ...


@dataclass(frozen=True, slots=True)
class Steps:
    """The turns of a batch, in time order within each trajectory. All tensors have length S."""

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
    """Rows of a batch, or of some of its groups, with everything an algorithm may ask for.

    Scalars that decide numbers are float64; columns are float32 as they came, rounded once at the end. Raises
    ArgumentError for lengths, dtypes, devices or indices that do not fit: nothing behind it checks them again.
    """

    cu_seqlens: Tensor  # [R + 1] int64: row r holds tokens cu_seqlens[r] : cu_seqlens[r + 1]
    row_trajectory: Tensor  # [R] int64
    row_trainable: Tensor  # [R] int64: trainable tokens of the row, known without its columns
    trajectory_group: Tensor  # [M] int64
    rewards: Tensor  # [M] float64: the trajectory's reward, shaped by the steps of the chain
    baseline: Tensor  # [M] bool: role is baseline
    steps: Steps
    num_tokens: int  # N, on the host: reading it from a device would wait for it
    num_groups: int  # G: groups are numbered from 0 without gaps
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # each [N]; response_mask uint8
    components: Mapping[str, Tensor] = field(default_factory=dict)  # named rewards, [M] float64; absent = 0
    scores: Tensor | None = None  # [M] float64: the trajectory's reward as it came; None = `rewards`
    truncated: Tensor | None = None  # [M] bool: status is truncated; None = nobody's
    given_mask: Tensor | None = None  # [N] response_mask as packed; None = no step has narrowed it
    layout: tuple[Any, ...] | None = field(
        default=None, repr=False, compare=False
    )  # as checked; copies keep it

    def __post_init__(self) -> None:
        check_shapes(self)
        layout = layout_of(self)
        if self.layout is None or (
            self.layout and any(own is not known for own, known in zip(layout, self.layout, strict=True))
        ):
            check_values(self)
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

    def column(self, name: str) -> Tensor:
        """[N]: the column `name`. Raises TrajectoryError when the batch is without it, or it has another shape."""
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
        """How many values a result of `level` has: one for each row, step or token. OptionError for another."""
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
    """[count + 1] int64: where each of the ascending labels 0 .. count-1 starts in `labels` ([K] int64)."""
    return torch.searchsorted(labels, torch.arange(count + 1, device=labels.device))


def pack(
    members: Sequence[Packable],
    columns: Sequence[Mapping[str, Array]] | None = None,
    device: torch.device | str = "cpu",
    names: Sequence[str] | None = None,
) -> PackedBatch:
    """Lay `members` end to end; `columns[i][name]` is member i's 1-D array, its rows concatenated.

    names: of the columns to take (None = all). Each column is copied once. Baseline members have no trainable
    tokens: they are never delivered. Raises TrajectoryError if members are not in ascending (group_id, rollout_index)
    order, have no reward, or a column is missing, of another length than the rows, or another mask than
    row_trainable says.
    """
    _check_order(members)
    row_lengths = [length for member in members for length in member.row_lengths]
    cu_seqlens = np.zeros(len(row_lengths) + 1, np.int64)
    np.cumsum(row_lengths, out=cu_seqlens[1:])
    first_row = np.zeros(len(members) + 1, np.int64)
    np.cumsum([len(member.row_lengths) for member in members], out=first_row[1:])
    groups = _codes([member.group_id for member in members])

    def tensor(values: Any, dtype: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype))

    batch = PackedBatch(
        cu_seqlens=tensor(cu_seqlens, np.int64),
        row_trajectory=tensor(np.repeat(np.arange(len(members)), np.diff(first_row)), np.int64),
        row_trainable=tensor(
            [0 if member.is_baseline else n for member in members for n in member.row_trainable], np.int64
        ),
        trajectory_group=tensor(groups, np.int64),
        rewards=tensor([member.reward for member in members], np.float64),
        baseline=tensor([member.is_baseline for member in members], np.bool_),
        steps=_steps(members, cu_seqlens, first_row, tensor),
        num_tokens=int(cu_seqlens[-1]),
        num_groups=groups[-1] + 1 if groups else 0,
        components={name: tensor(values, np.float64) for name, values in _components(members).items()},
        scores=tensor([member.reward for member in members], np.float64),
        truncated=tensor([getattr(member, "status", None) == "truncated" for member in members], np.bool_),
    )
    batch = _moved(batch, torch.device(device))
    return batch if columns is None else replace(batch, columns=_columns(members, columns, names, device))


def _moved(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """`batch`, checked on the host, on `device`."""
    if device.type == "cpu":
        return batch
    steps = {f.name: getattr(batch.steps, f.name) for f in fields(Steps) if f.name != "num_tokens"}
    tensors = {f.name: getattr(batch, f.name) for f in fields(PackedBatch)}
    tensors = {name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)}
    return replace(
        batch,
        **tensors,
        steps=replace(batch.steps, **{name: value.to(device) for name, value in steps.items()}),
        components={name: value.to(device) for name, value in batch.components.items()},
        layout=BUILT,
    )


def expand(batch: PackedBatch, level: Level, values: Tensor) -> Tensor:
    """[N] float32: `values` of a level on the trainable tokens they belong to, 0 elsewhere.

    level "row": [R], on the row's trainable tokens; "step": [S], on those of the span (the later step where
    spans overlap); "token": [N], times the mask. Needs the column response_mask. The result has
    memory of its own and no gradient. Raises ArgumentError for another number of values, OptionError for another
    level.
    """
    count = batch.count(level)
    if not isinstance(values, Tensor) or values.is_complex() or values.device != batch.device:
        what = (
            f"{values.dtype} on {values.device}"
            if isinstance(values, Tensor)
            else f"a {type(values).__name__}"
        )
        raise ArgumentError(f"values is {what}, needs a tensor of real numbers on {batch.device}")
    if values.shape != (count,):
        raise ArgumentError(f"values of level {level!r} have shape {tuple(values.shape)}, need ({count},)")
    given, values = values, values.detach().to(torch.float32)
    if level == "row":
        return spread_rows(values, batch.column("response_mask"), batch.cu_seqlens)
    tokens = trainable(batch)
    if level == "token":
        kept = tokens.only(values)
        return kept.clone() if kept.data_ptr() == given.data_ptr() else kept
    known = torch.cat([values, values.new_zeros(1)])
    return tokens.only(known[token_step(batch)])  # outside all spans -1: the zero


def token_step(batch: PackedBatch) -> Tensor:
    """[N] int64: the step each token belongs to (the later one where spans overlap), -1 outside all spans."""
    owner, position = _span_tokens(batch.steps)
    nothing = torch.full((batch.num_tokens,), -1, dtype=torch.int64, device=batch.device)
    return nothing.scatter_reduce(0, position, owner, "amax")


def span_sum(batch: PackedBatch, values: Tensor) -> Tensor:
    """[S] float64: sum of a column [N] over each step's span."""
    lengths = batch.steps.end - batch.steps.start
    offsets = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
    return segment_sum(values[_span_tokens(batch.steps)[1]], offsets)


def _span_tokens(steps: Steps) -> tuple[Tensor, Tensor]:
    """The tokens of all spans, span by span: which step, which position in the batch (int64 each)."""
    lengths = steps.end - steps.start
    owner = torch.repeat_interleave(lengths, output_size=steps.num_tokens)
    begins = torch.cumsum(lengths, 0) - lengths
    place = torch.arange(steps.num_tokens, device=owner.device)
    return owner, place + (steps.start - begins)[owner]


def _check_order(members: Sequence[Packable]) -> None:
    previous: tuple[str, int] | None = None
    for member in members:
        identity = (member.group_id, member.rollout_index)
        if previous is not None and not previous < identity:
            raise TrajectoryError(f"member {identity} follows {previous}: sort by (group_id, rollout_index)")
        if member.reward is None:
            raise TrajectoryError(f"member {identity} has reward None: leave unscorable members out")
        if not math.isfinite(member.reward):
            raise TrajectoryError(f"member {identity} has reward {member.reward}, needs a finite number")
        previous = identity


def _components(members: Sequence[Packable]) -> dict[str, list[float]]:
    """Named rewards of members that have them (attribute `rewards`)."""
    given: list[Mapping[str, float]] = [getattr(member, "rewards", {}) for member in members]
    names = dict.fromkeys(sorted({name for rewards in given for name in rewards}))
    return {name: [rewards.get(name, 0.0) for rewards in given] for name in names}


def _codes(keys: Sequence[str]) -> list[int]:
    """Equal text, equal number, counted from 0 in order of appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _steps(members: Sequence[Packable], cu_seqlens: Array, first_row: Array, tensor: Any) -> Steps:
    numbers: dict[str, int] = {}
    rows, starts, ends, rewards, states, trajectories = [], [], [], [], [], []
    for index, member in enumerate(members):
        for step in member.steps:
            if not 0 <= step.row < len(member.row_lengths):
                raise TrajectoryError(
                    f"{_where(member)}: a step is in row {step.row} of {len(member.row_lengths)}"
                )
            row = int(first_row[index]) + step.row
            trajectories.append(index)
            rows.append(row)
            starts.append(int(cu_seqlens[row]) + step.start)
            ends.append(int(cu_seqlens[row]) + step.end)
            rewards.append(step.reward)
            key = step.state_key
            states.append(-1 if key is None else numbers.setdefault(key, len(numbers)))
    return Steps(
        trajectory=tensor(trajectories, np.int64),
        row=tensor(rows, np.int64),
        start=tensor(starts, np.int64),
        end=tensor(ends, np.int64),
        rewards=tensor(rewards, np.float64),
        state=tensor(states, np.int64),
        num_tokens=sum(ends) - sum(starts),
    )


def _columns(
    members: Sequence[Packable],
    columns: Sequence[Mapping[str, Array]],
    names: Sequence[str] | None,
    device: torch.device | str,
) -> dict[str, Tensor]:
    if len(columns) != len(members):
        raise TrajectoryError(f"columns of {len(columns)} members for {len(members)}: one mapping each")
    if names is None:
        names = list(dict.fromkeys(name for mapping in columns for name in mapping))
    shapes = [(sum(member.row_lengths),) for member in members]
    device = torch.device(device)
    packed: dict[str, Tensor] = {}
    for name in names:
        arrays: list[Array] = []
        for member, mapping, shape in zip(members, columns, shapes, strict=True):
            array = mapping.get(name)
            if array is not None and np.asarray(array).dtype.kind not in "biuf":
                raise TrajectoryError(f"{_where(member)}: {name} has dtype {array.dtype}, needs numbers")
            if array is None:
                raise TrajectoryError(
                    f"{_where(member)} has no column {name}, others have: supply it for all"
                )
            if array.shape != shape:
                raise TrajectoryError(f"{_where(member)}: {name} has shape {array.shape}, needs {shape}")
            arrays.append(array)
        packed[name] = _end_to_end(arrays, device)
    if "response_mask" in packed:
        _check_mask(members, packed["response_mask"].numpy())
    return {name: column.to(device, non_blocking=True) for name, column in packed.items()}


def empty_column(length: int, dtype: np.dtype[Any], device: torch.device) -> Tensor:
    """[length] on the host, to be filled; from pinned memory a CUDA device copies while the host goes on."""
    known = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(length, dtype=known, pin_memory=device.type == "cuda")


def _end_to_end(arrays: Sequence[Array], device: torch.device) -> Tensor:
    if not arrays:
        return torch.zeros(0)
    if device.type != "cuda":
        return torch.from_numpy(np.concatenate(arrays))
    column = empty_column(sum(map(len, arrays)), np.result_type(*arrays), device)
    np.concatenate(arrays, out=column.numpy())
    return column


def _where(member: Packable) -> str:
    return f"member {(member.group_id, member.rollout_index)}"


def _check_mask(members: Sequence[Packable], mask: Array) -> None:
    """Compare the mask with the announced row_trainable, and clear it for baseline members.

    It may have fewer ones: a step of the chain has narrowed it.
    """
    start = 0
    for member in members:
        for row, (length, announced) in enumerate(zip(member.row_lengths, member.row_trainable, strict=True)):
            found = int(np.count_nonzero(mask[start : start + length]))
            if found > announced:
                raise TrajectoryError(
                    f"{_where(member)} row {row}: response_mask has {found} ones, row_trainable says {announced}"
                )
            if member.is_baseline:
                mask[start : start + length] = 0
            start += length
