"""From trajectories to a packed batch.

`pack_members` takes them as arrays, as the streams have them, with columns that lie end to end already;
`pack_trajectories` takes whole ones, as files and users have them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TrajectoryError
from ..extras import torch
from ..trajectory.columns import Array
from ..trajectory.members import NO_STATE, Checked, Members, Positions, offsets
from ..trajectory.packet_encoding import members_of
from ..trajectory.schema import Trajectory
from .packed import BUILT, PackedBatch, Steps

if TYPE_CHECKING:
    from torch import Tensor

    from ..grouping.layout import Layout


#: group_id and data_source of a group.
Owner = tuple[str, str | None]


def pack_members(
    layout: Layout,
    columns: Mapping[str, Array | Tensor] | None = None,
    device: torch.device | str = "cpu",
    rewards: tuple[Array, Array] | None = None,
) -> PackedBatch:
    """The members of `layout` as a batch.

    Args:
      layout: in ascending order of (group_id, rollout_index), all with a reward. A baseline member gets no trainable
        tokens, because it is never delivered.
      columns: name -> [N], the members' rows end to end, on the host and writable: the batch takes them over without
        a copy. None = a batch without columns.
      device: where the tensors lie.
      rewards: [M] and [S] float64, of trajectories and steps as shaped so far. None = as pushed.

    Raises TrajectoryError for another order, a missing reward, or a column of another length than the rows. Whoever
    has read a mask has compared it with the members' numbers.
    """
    present, group = np.unique(layout.group, return_inverse=True)
    owners = [(layout.groups[number].group_id, layout.groups[number].data_source) for number in present]
    return _packed(layout.members, group, owners, columns or {}, torch.device(device), rewards)


def pack_trajectories(
    trajectories: Iterable[Trajectory],
    names: Iterable[str] = ("response_mask",),
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Whole trajectories as a batch on `device`, with the columns `names`; sorted, so they may come in any order.

    Raises TrajectoryError for a trajectory that is not usable, a missing column or reward, and for two trajectories of
    one group_id and rollout_index.
    """
    ordered = sorted(trajectories, key=lambda one: (one.group_id, one.rollout_index))
    names = list(dict.fromkeys(names))
    owners: dict[str, Owner] = {}
    for one in ordered:
        owners.setdefault(one.group_id, (one.group_id, one.data_source))
        where = f"member {(one.group_id, one.rollout_index)}"
        if not one.status.usable:
            raise TrajectoryError(f"{where} has status {one.status}: leave unusable members out")
        if missing := [name for name in names if not all(name in row.columns for row in one.rows)]:
            raise TrajectoryError(f"{where} has no column {missing[0]}: give it to all rows")
    numbers = {group_id: number for number, group_id in enumerate(owners)}
    rows = [row.columns for one in ordered for row in one.rows]
    return _packed(
        members_of([Checked.of(one) for one in ordered], [0] * len(ordered)),
        np.array([numbers[one.group_id] for one in ordered], np.int64),
        list(owners.values()),
        {name: np.concatenate([row[name] for row in rows]) if rows else _no_tokens(name) for name in names},
        torch.device(device),
    )


def _packed(
    members: Members,
    group: Positions,
    owners: Sequence[Owner],
    columns: Mapping[str, Array | Tensor],
    device: torch.device,
    rewards: tuple[Array, Array] | None = None,
) -> PackedBatch:
    """The batch of M members. group: [M], the number of each one's group. owners: of the groups."""
    _check_members(members, group, owners)
    table, first_row = members.table, members.first_row
    is_baseline, cu_seqlens = members.is_baseline, offsets(members.rows["tokens"])
    trajectory = np.repeat(np.arange(len(members)), table["rows"])
    num_tokens = int(cu_seqlens[-1])
    laid_out: dict[str, Tensor] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and column.dtype.kind not in "biuf":
            raise TrajectoryError(f"{name} has dtype {column.dtype}, needs numbers")
        if tuple(column.shape) != (num_tokens,):
            raise TrajectoryError(f"{name} has shape {tuple(column.shape)}, needs ({num_tokens},)")
        laid_out[name] = torch.as_tensor(column, device="cpu") if isinstance(column, np.ndarray) else column
    if "response_mask" in laid_out:
        bounds = cu_seqlens[first_row]
        for member in np.flatnonzero(is_baseline).tolist():
            laid_out["response_mask"][bounds[member] : bounds[member + 1]] = 0
    scores = _tensor(table["reward"], np.float64)
    steps = _steps_of(members, cu_seqlens, first_row)
    if rewards is not None and len(steps):
        steps = replace(steps, rewards=_tensor(rewards[1], np.float64))
    batch = PackedBatch(
        cu_seqlens=torch.from_numpy(cu_seqlens),
        row_trajectory=torch.from_numpy(trajectory),
        row_trainable=_tensor(np.where(is_baseline[trajectory], 0, members.rows["trainable"]), np.int64),
        trajectory_group=torch.from_numpy(group),
        rewards=scores if rewards is None else _tensor(rewards[0], np.float64),
        baseline=torch.from_numpy(is_baseline),
        steps=steps,
        num_tokens=num_tokens,
        num_groups=len(owners),
        columns=laid_out if device.type == "cpu" else {},
        components={  # of each named reward that a member has; 0 where one lacks it
            name: _tensor(np.where(np.isnan(values), 0.0, values), np.float64)
            for name, values in sorted(members.rewards.items())
            if not np.isnan(values).all()
        },
        scores=scores,
        truncated=torch.from_numpy(members.is_truncated),
        group_sources=[source for _, source in owners],
    )
    return batch if device.type == "cpu" else _moved(batch, device, laid_out)


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


def _check_members(members: Members, group: Positions, owners: Sequence[Owner]) -> None:
    """Raise TrajectoryError unless the members ascend by (group_id, rollout_index), all with a reward."""
    table = members.table
    follows = (np.diff(group) > 0) | ((np.diff(group) == 0) & (np.diff(table["index"].astype(np.int64)) > 0))
    is_ordered = follows.all() and all(before < after for (before, _), (after, _) in pairwise(owners))
    is_wrong = ~(members.has_reward & np.isfinite(table["reward"]))
    if is_ordered and not is_wrong.any():
        return
    group_ids = [owners[number][0] for number in group.tolist()]
    identities = list(zip(group_ids, table["index"].tolist(), strict=True))
    for before, after in pairwise(identities):
        if not before < after:
            raise TrajectoryError(f"member {after} follows {before}: sort by (group_id, rollout_index)")
    member = int(np.flatnonzero(is_wrong)[0])
    if not members.has_reward[member]:
        raise TrajectoryError(f"member {identities[member]} has reward None: leave unscorable members out")
    reward = table["reward"][member]
    raise TrajectoryError(f"member {identities[member]} has reward {reward}, needs a finite number")


def _steps_of(members: Members, cu_seqlens: Positions, first_row: Positions) -> Steps:
    """The steps of `members`, counted in the batch. States are numbered in order of appearance."""
    steps = members.steps
    trajectory = np.repeat(np.arange(len(members)), members.table["steps"])
    row = first_row[trajectory] + steps["row"]
    start, end = cu_seqlens[row] + steps["start"], cu_seqlens[row] + steps["end"]
    state = np.full(len(steps), -1, np.int64)
    has_state = steps["state"] != NO_STATE
    state[has_state] = numbered_array(steps["state"][has_state])
    return Steps(
        trajectory=_tensor(trajectory, np.int64),
        row=_tensor(row, np.int64),
        start=_tensor(start, np.int64),
        end=_tensor(end, np.int64),
        rewards=_tensor(steps["reward"], np.float64),
        state=_tensor(state, np.int64),
        num_tokens=int((end - start).sum()),
    )


def _no_tokens(name: str) -> Array:
    return np.empty(0, np.uint8 if name == "response_mask" else np.float32)


def empty_column(
    length: int, dtype: np.dtype[Any], device: torch.device, shape: tuple[int, ...] = ()
) -> Tensor:
    """[length, *shape] uninitialised, on the host. For a CUDA device pinned: the copy then runs beside the host."""
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty((length, *shape), dtype=torch_dtype, device="cpu", pin_memory=device.type == "cuda")


def numbered(labels: Collection[Hashable]) -> tuple[Positions, list[Hashable]]:
    """(the number of each label, [K]; the labels by number); equal labels share one. TypeError for an unhashable."""
    numbers = defaultdict[Hashable, int](itertools.count().__next__)
    return np.fromiter(map(numbers.__getitem__, labels), np.int64, len(labels)), list(numbers)


def numbered_array(labels: Array) -> Positions:
    """The number of each label of an array [K] of whole numbers."""
    _, first, label = np.unique(labels, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[label]


def by_number(numbers: Positions) -> tuple[Positions, Positions]:
    """(order [K]: the elements number after number, those of one in their order; offsets [G + 1] of the numbers)."""
    return np.argsort(numbers, kind="stable"), np.append(0, np.cumsum(np.bincount(numbers)))
