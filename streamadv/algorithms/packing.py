"""From trajectories to a packed batch.

`pack` lays the rows of single trajectories end to end and copies each column once. `pack_members` does the same with
arrays of trajectories, as the streams have them, whose columns lie end to end already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import TrajectoryError
from ..extras import torch
from ..trajectory.columns import Array, count_ones
from ..trajectory.members import NO_STATE, Members, Positions, offsets
from ..trajectory.schema import Trajectory
from .labels import numbered, numbered_array
from .packable import Packable
from .packed import PackedBatch, Steps
from .packed_checks import BUILT

if TYPE_CHECKING:
    from torch import Tensor

    from ..grouping.layout import Layout


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
    cu_seqlens = offsets(np.array([n for member in members for n in member.row_lengths], np.int64))
    first_row = offsets(np.array([len(member.row_lengths) for member in members], np.int64))
    is_baseline = np.array([member.is_baseline for member in members], np.bool_)
    rows = _Rows(
        cu_seqlens,
        np.repeat(np.arange(len(members)), np.diff(first_row)),
        np.array([n for member in members for n in member.row_trainable], np.int64),
        is_baseline,
        lambda member: _identity(members[member]),
    )
    device = torch.device(device)
    return _batch(
        rows,
        numbered([member.group_id for member in members])[0],
        [member.reward for member in members],
        [getattr(member, "status", None) == "truncated" for member in members],
        _steps(members, cu_seqlens, first_row),
        _components(members),
        _sources(members),
        {} if columns is None else _columns(members, columns, names, device),
        device,
    )


def pack_trajectories(
    trajectories: Iterable[Trajectory], names: Iterable[str] = ("response_mask",)
) -> PackedBatch:
    """Whole trajectories as a batch, with the columns `names`; sorted, so they may come in any order.

    Raises TrajectoryError for a missing column or reward, and for two trajectories of one group_id and rollout_index.
    """
    members, names = sorted(trajectories, key=_identity), list(dict.fromkeys(names))
    columns: list[dict[str, Array]] = []
    for member in members:
        rows = [row.columns for row in member.rows]
        for name in names:
            if not all(name in row for row in rows):
                raise TrajectoryError(f"{_where(member)} has no column {name}: give it to all rows")
        columns.append({name: np.concatenate([row[name] for row in rows]) for name in names})
    return pack(members, columns)


def pack_members(
    layout: Layout,
    columns: Mapping[str, Array | Tensor] | None = None,
    device: torch.device | str = "cpu",
    rewards: tuple[Array, Array] | None = None,
) -> PackedBatch:
    """The members of `layout` as a batch: `pack` for arrays.

    Args:
      columns: name -> [N], the members' rows end to end, on the host and writable: the batch takes them over without
        a copy. None = a batch without columns.
      device: where the tensors lie.
      rewards: [M] and [S] float64, of trajectories and steps as shaped so far. None = as pushed.

    Raises TrajectoryError as `pack` does.
    """
    _check_members(layout)
    members, table = layout.members, layout.members.table
    cu_seqlens, first_row = offsets(members.rows["tokens"]), members.first_row
    steps = _steps_of(members, cu_seqlens, first_row)
    if rewards is not None and len(steps):
        steps = replace(steps, rewards=_tensor(rewards[1], np.float64))
    rows = _Rows(
        cu_seqlens,
        np.repeat(np.arange(len(members)), table["rows"]),
        members.rows["trainable"].astype(np.int64),
        members.is_baseline,
        layout.identity,
    )
    return _batch(
        rows,
        np.cumsum(np.diff(layout.group, prepend=layout.group[:1]) != 0),
        table["reward"],
        members.is_truncated,
        steps,
        _components_of(members),
        [layout.groups[number].data_source for number in dict.fromkeys(layout.group.tolist())],
        {name: _column(name, column, int(cu_seqlens[-1])) for name, column in (columns or {}).items()},
        torch.device(device),
        None if rewards is None else rewards[0],
    )


class _Rows(NamedTuple):
    """The R rows of M trajectories, laid end to end."""

    cu_seqlens: Positions  # [R + 1]
    trajectory: Positions  # [R]
    trainable: Positions  # [R]: tokens that the mask may have
    is_baseline: Array  # [M]
    identity: Callable[[int], tuple[str, int]]  # of a trajectory, for errors


def _batch(
    rows: _Rows,
    groups: Any,
    scores: Any,
    truncated: Any,
    steps: Steps,
    components: Mapping[str, Any],
    sources: Sequence[str | None],
    columns: Mapping[str, Tensor],
    device: torch.device,
    rewards: Any = None,
) -> PackedBatch:
    """The batch on `device`. scores, rewards: [M], as pushed and as shaped so far (None = likewise)."""
    if "response_mask" in columns:
        _check_mask(columns["response_mask"].numpy(), rows)
    batch = PackedBatch(
        cu_seqlens=torch.from_numpy(rows.cu_seqlens),
        row_trajectory=torch.from_numpy(rows.trajectory),
        row_trainable=torch.from_numpy(np.where(rows.is_baseline[rows.trajectory], 0, rows.trainable)),
        trajectory_group=_tensor(groups, np.int64),
        rewards=_tensor(scores if rewards is None else rewards, np.float64),
        baseline=torch.from_numpy(rows.is_baseline),
        steps=steps,
        num_tokens=int(rows.cu_seqlens[-1]),
        num_groups=int(groups[-1]) + 1 if len(groups) else 0,
        columns=columns if device.type == "cpu" else {},
        components={name: _tensor(values, np.float64) for name, values in components.items()},
        scores=_tensor(scores, np.float64),
        truncated=_tensor(truncated, np.bool_),
        group_sources=sources,
    )
    return batch if device.type == "cpu" else _moved(batch, device, columns)


def _tensor(values: Any, dtype: Any) -> Tensor:
    """A copy of `values`."""
    return torch.from_numpy(np.array(values, dtype))


def _moved(batch: PackedBatch, device: torch.device, columns: Mapping[str, Tensor]) -> PackedBatch:
    """`batch` with `columns` on `device`; the constructor has checked the batch on the host."""
    steps = {f.name: getattr(batch.steps, f.name) for f in fields(Steps) if f.name != "num_tokens"}
    tensors = {f.name: getattr(batch, f.name) for f in fields(PackedBatch)}
    tensors = {name: value.to(device) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    return replace(
        batch,
        **tensors,
        steps=replace(batch.steps, **{name: value.to(device) for name, value in steps.items()}),
        components={name: value.to(device) for name, value in batch.components.items()},
        columns={name: column.to(device, non_blocking=True) for name, column in columns.items()},
        layout=BUILT,
    )


def _check_order(members: Sequence[Packable]) -> None:
    previous: tuple[str, int] | None = None
    for member in members:
        identity = _identity(member)
        if previous is not None and not previous < identity:
            raise TrajectoryError(f"member {identity} follows {previous}: sort by (group_id, rollout_index)")
        _check_reward(identity, member.reward)
        previous = identity


def _check_members(layout: Layout) -> None:
    """`_check_order` for arrays. Members of one group are in the order of their index."""
    table, group = layout.members.table, layout.group.astype(np.int64)
    ids = [layout.groups[number].group_id for number in dict.fromkeys(group.tolist())]
    follows = (np.diff(group) > 0) | ((np.diff(group) == 0) & (np.diff(table["index"].astype(np.int64)) > 0))
    if not follows.all() or any(not before < after for before, after in pairwise(ids)):
        identities = [layout.identity(member) for member in range(len(layout))]
        before, after = next(pair for pair in pairwise(identities) if not pair[0] < pair[1])
        raise TrajectoryError(f"member {after} follows {before}: sort by (group_id, rollout_index)")
    has_reward = layout.members.has_reward
    is_wrong = ~(has_reward & np.isfinite(table["reward"]))
    if is_wrong.any():
        member = int(np.flatnonzero(is_wrong)[0])
        _check_reward(layout.identity(member), float(table["reward"][member]) if has_reward[member] else None)


def _check_reward(identity: tuple[str, int], reward: float | None) -> None:
    if reward is None:
        raise TrajectoryError(f"member {identity} has reward None: leave unscorable members out")
    if not math.isfinite(reward):
        raise TrajectoryError(f"member {identity} has reward {reward}, needs a finite number")


def _components(members: Sequence[Packable]) -> dict[str, list[float]]:
    """Named rewards of members that have them (attribute `rewards`)."""
    named: list[Mapping[str, float]] = [getattr(member, "rewards", {}) for member in members]
    names = sorted({name for rewards in named for name in rewards})
    return {name: [rewards.get(name, 0.0) for rewards in named] for name in names}


def _sources(members: Sequence[Packable]) -> list[str | None]:
    """The data source of each group: that of its first member."""
    sources: dict[str, str | None] = {}
    for member in members:
        sources.setdefault(member.group_id, getattr(member, "data_source", None))
    return list(sources.values())


def _components_of(members: Members) -> dict[str, Array]:
    is_missing = {name: np.isnan(members.rewards[name]) for name in sorted(members.rewards)}
    return {
        name: np.where(mask, 0.0, members.rewards[name])
        for name, mask in is_missing.items()
        if not mask.all()
    }


def _steps(members: Sequence[Packable], cu_seqlens: Positions, first_row: Positions) -> Steps:
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
    return _packed_steps(trajectories, rows, starts, ends, rewards, states)


def _steps_of(members: Members, cu_seqlens: Positions, first_row: Positions) -> Steps:
    """The steps of `members`, counted in the batch. States are numbered in order of appearance."""
    steps = members.steps
    if not len(steps):
        return _no_steps()
    trajectory = np.repeat(np.arange(len(members)), members.table["steps"])
    row = first_row[trajectory] + steps["row"]
    start, end = cu_seqlens[row] + steps["start"], cu_seqlens[row] + steps["end"]
    state = np.full(len(steps), -1, np.int64)
    has_state = steps["state"] != NO_STATE
    state[has_state] = numbered_array(steps["state"][has_state])
    return _packed_steps(trajectory, row, start, end, steps["reward"], state)


def _packed_steps(trajectory: Any, row: Any, start: Any, end: Any, rewards: Any, state: Any) -> Steps:
    return Steps(
        trajectory=_tensor(trajectory, np.int64),
        row=_tensor(row, np.int64),
        start=_tensor(start, np.int64),
        end=_tensor(end, np.int64),
        rewards=_tensor(rewards, np.float64),
        state=_tensor(state, np.int64),
        num_tokens=int(sum(end) - sum(start)),
    )


@cache  # most batches have none
def _no_steps() -> Steps:
    return _packed_steps([], [], [], [], [], [])


def _columns(
    members: Sequence[Packable],
    columns: Sequence[Mapping[str, Array]],
    names: Sequence[str] | None,
    device: torch.device,
) -> dict[str, Tensor]:
    if len(columns) != len(members):
        raise TrajectoryError(f"columns of {len(columns)} members for {len(members)}: one mapping each")
    if names is None:
        names = list(dict.fromkeys(name for mapping in columns for name in mapping))
    shapes = [(sum(member.row_lengths),) for member in members]
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
    return packed


def _column(name: str, column: Array | Tensor, num_tokens: int) -> Tensor:
    if isinstance(column, np.ndarray) and column.dtype.kind not in "biuf":
        raise TrajectoryError(f"{name} has dtype {column.dtype}, needs numbers")
    if tuple(column.shape) != (num_tokens,):
        raise TrajectoryError(f"{name} has shape {tuple(column.shape)}, needs ({num_tokens},)")
    return torch.as_tensor(column)


def empty_column(
    length: int, dtype: np.dtype[Any], device: torch.device, shape: tuple[int, ...] = ()
) -> Tensor:
    """[length, *shape] uninitialised, on the host. For a CUDA device pinned: the copy then runs beside the host."""
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty((length, *shape), dtype=torch_dtype, pin_memory=device.type == "cuda")


def _end_to_end(arrays: Sequence[Array], device: torch.device) -> Tensor:
    if not arrays:
        return torch.zeros(0)
    if device.type != "cuda":
        return torch.from_numpy(np.concatenate(arrays))
    column = empty_column(sum(map(len, arrays)), np.result_type(*arrays), device)
    np.concatenate(arrays, out=column.numpy())
    return column


def _where(member: Packable) -> str:
    return f"member {_identity(member)}"


def _identity(member: Packable) -> tuple[str, int]:
    return member.group_id, member.rollout_index


def _check_mask(mask: Array, rows: _Rows) -> None:
    """Compare the mask with `rows.trainable`, and clear it for baseline members.

    A mask with fewer ones is valid: a step of the chain may have narrowed it.
    """
    has_tokens = np.diff(rows.cu_seqlens) > 0
    ones = np.zeros(len(has_tokens), np.int64)
    if has_tokens.any():
        bounds = np.append(rows.cu_seqlens[:-1][has_tokens], rows.cu_seqlens[-1])
        ones[has_tokens] = count_ones((mask != 0).view(np.uint8), bounds)
    if (ones > rows.trainable).any():
        row = int(np.flatnonzero(ones > rows.trainable)[0])
        member = int(rows.trajectory[row])
        in_member = row - int(np.searchsorted(rows.trajectory, member))
        raise TrajectoryError(
            f"member {rows.identity(member)} row {in_member}: "
            f"response_mask has {ones[row]} ones, row_trainable says {rows.trainable[row]}"
        )
    for row in np.flatnonzero(rows.is_baseline[rows.trajectory]).tolist():
        mask[rows.cu_seqlens[row] : rows.cu_seqlens[row + 1]] = 0
