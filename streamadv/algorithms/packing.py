"""From trajectories to a packed batch: `pack` lays their rows end to end and copies each column once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import TrajectoryError
from ..trajectory.columns import Array
from .packed import PackedBatch, Steps
from .packed_checks import BUILT


class StepLike(Protocol):
    """A turn: a `schema.Step`, or a `reference.StepSpan`."""

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
    """What `pack` reads of a trajectory; its columns come separately.

    A trajectory with named rewards also has `rewards`, Mapping[str, float]; one with a status has `status`.
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


def pack(
    members: Sequence[Packable],
    columns: Sequence[Mapping[str, Array]] | None = None,
    device: torch.device | str = "cpu",
    names: Sequence[str] | None = None,
) -> PackedBatch:
    """Lay `members` end to end.

    Args:
      members: in ascending order of (group_id, rollout_index), all with a reward. A baseline member gets no trainable
        tokens, because it is never delivered.
      columns: a mapping per member: name -> 1-D array, the member's rows end to end. None = a batch without columns.
      device: where the tensors lie.
      names: the columns to copy; None = all.

    Returns:
      The batch, with memory of its own: every column is copied once.

    Raises TrajectoryError for another order, a missing reward, a missing column, a column of another length than the
    rows, or a mask with more ones than row_trainable.
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
    """`batch` on `device`; the constructor has checked it on the host."""
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
    named: list[Mapping[str, float]] = [getattr(member, "rewards", {}) for member in members]
    names = sorted({name for rewards in named for name in rewards})
    return {name: [rewards.get(name, 0.0) for rewards in named] for name in names}


def _codes(keys: Sequence[str]) -> list[int]:
    """The number of each text: equal texts share one, counted from 0 in order of appearance."""
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
    """[length] uninitialised, on the host. For a CUDA device pinned, so that the copy runs beside the host."""
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(length, dtype=torch_dtype, pin_memory=device.type == "cuda")


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

    A mask with fewer ones is valid: a step of the chain may have narrowed it.
    """
    start = 0
    for member in members:
        for row, (length, announced) in enumerate(zip(member.row_lengths, member.row_trainable, strict=True)):
            ones = int(np.count_nonzero(mask[start : start + length]))
            if ones > announced:
                raise TrajectoryError(
                    f"{_where(member)} row {row}: response_mask has {ones} ones, row_trainable says {announced}"
                )
            if member.is_baseline:
                mask[start : start + length] = 0
            start += length
