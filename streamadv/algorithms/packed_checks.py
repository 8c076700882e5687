"""What must hold of a packed batch: algorithms index by its tensors and check no bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import ArgumentError
from ..extras import torch
from ..trajectory.columns import KNOWN_COLUMNS, Array

if TYPE_CHECKING:
    from torch import Tensor

    from .packed import PackedBatch, Steps

#: The layout of a batch that its builder vouches for.
BUILT: tuple[Any, ...] = ()

#: What a tensor may have to hold: for people, and the test of it.
DTYPES: Final[Mapping[str, tuple[str, Callable[[Tensor], bool]]]] = {
    "": ("real numbers", lambda tensor: not tensor.is_complex()),
    "whole": ("int64", lambda tensor: tensor.dtype == torch.int64),
    "floating": ("float64", lambda tensor: tensor.is_floating_point()),
    "bool": ("bool", lambda tensor: tensor.dtype == torch.bool),
}


def layout_of(batch: PackedBatch) -> tuple[Any, ...]:
    """The objects whose values are checked: a copy of a checked batch that holds the same ones needs no check."""
    steps = batch.steps
    indices = (batch.cu_seqlens, batch.row_trajectory, batch.trajectory_group)
    spans = (steps.trajectory, steps.row, steps.start, steps.end, steps.state)
    # On a device, to read a narrowed mask would make the host wait.
    mask = batch.columns.get("response_mask") if batch.rewards.device.type == "cpu" else None
    return (*indices, *spans, steps.num_tokens, batch.num_tokens, batch.num_groups, mask)


def check_steps(steps: Steps) -> None:
    """Raise ArgumentError unless all tensors of `steps` have one length."""
    size = _length("steps.trajectory", steps.trajectory)
    for name in ("trajectory", "row", "start", "end", "state"):
        _check(f"steps.{name}", getattr(steps, name), size, "S", "whole")
    _check("steps.rewards", steps.rewards, size, "S", "floating")


def check_shapes(batch: PackedBatch) -> None:
    """Raise ArgumentError unless lengths, dtypes and devices fit; reads no values."""
    offsets, tokens = _length("cu_seqlens", batch.cu_seqlens), batch.num_tokens
    if not offsets:
        raise ArgumentError("cu_seqlens is empty, needs one offset more than there are rows")
    trajectories = _length("trajectory_group", batch.trajectory_group)
    sized: list[tuple[str, Tensor | None, int, str, str]] = [
        ("cu_seqlens", batch.cu_seqlens, offsets, "R + 1", "whole"),
        ("row_trajectory", batch.row_trajectory, offsets - 1, "R", "whole"),
        ("row_trainable", batch.row_trainable, offsets - 1, "R", "whole"),
        ("trajectory_group", batch.trajectory_group, trajectories, "M", "whole"),
        ("rewards", batch.rewards, trajectories, "M", "floating"),
        ("baseline", batch.baseline, trajectories, "M", "bool"),
        ("scores", batch.scores, trajectories, "M", "floating"),
        ("truncated", batch.truncated, trajectories, "M", "bool"),
        ("given_mask", batch.given_mask, tokens, "N", ""),
        *(
            (f"columns[{name!r}]", column, tokens, "N" if name in KNOWN_COLUMNS else "N, ...", "")
            for name, column in batch.columns.items()
        ),
        *(
            (f"components[{name!r}]", values, trajectories, "M", "")
            for name, values in batch.components.items()
        ),
    ]
    for name, tensor, length, letter, dtype in sized:
        if tensor is not None:
            _check(name, tensor, length, letter, dtype)
            if tensor.device != batch.rewards.device:
                raise ArgumentError(
                    f"{name} is on {tensor.device}, rewards on {batch.rewards.device}: give both on one device"
                )
    if len(batch.group_sources) not in (0, batch.num_groups):
        raise ArgumentError(
            f"group_sources has {len(batch.group_sources)} entries, needs one for each of {batch.num_groups} groups"
        )


def check_changed(batch: PackedBatch, layout: tuple[Any, ...]) -> None:
    """Check the values of what is not the object that was checked already. layout: of `batch`.

    The host waits for a device here, so `packing` checks on the host and passes `BUILT` on.
    """
    if batch.layout == BUILT or batch.rewards.is_meta:
        return
    checked = batch.layout or (object(),) * len(layout)
    if any(now is not before for now, before in zip(layout[:-1], checked[:-1], strict=True)):
        _check_indices(batch)
    if layout[-1] is not checked[-1]:
        _check_mask(batch)


def _check_indices(batch: PackedBatch) -> None:
    """Raise ArgumentError unless rows, trajectories, groups and steps refer to each other correctly."""
    offsets, row_trajectory, group, trainable = _arrays(
        (batch.cu_seqlens, batch.row_trajectory, batch.trajectory_group, batch.row_trainable)
    )
    lengths = np.diff(offsets)
    if offsets[0] != 0 or (lengths < 0).any():
        raise ArgumentError(
            "cu_seqlens does not begin with 0 and ascend: give where each row starts, and the end"
        )
    if offsets[-1] != batch.num_tokens:
        raise ArgumentError(
            f"cu_seqlens ends at {offsets[-1]}, num_tokens is {batch.num_tokens}: they are one number"
        )
    _ascending("row_trajectory", row_trajectory, len(group), "trajectories")
    _ascending("trajectory_group", group, batch.num_groups, "groups")
    if np.count_nonzero(np.diff(group)) + bool(len(group)) != batch.num_groups:
        raise ArgumentError(
            f"trajectory_group leaves out some of the {batch.num_groups} groups: number without gaps"
        )
    if (trainable < -1).any() or (trainable > lengths).any():
        raise ArgumentError("row_trainable is not in 0 .. length of the row (-1: not known)")
    _check_spans(batch, offsets, row_trajectory)


def _check_mask(batch: PackedBatch) -> None:
    mask = batch.columns.get("response_mask")
    if mask is None or mask.dtype == torch.bool or not len(mask):
        return
    is_right = mask.max() <= 1 if mask.dtype == torch.uint8 else ((mask == 0) | (mask == 1)).all()
    if not bool(is_right):
        raise ArgumentError("columns['response_mask'] holds values other than 0 and 1")


def _check_spans(batch: PackedBatch, offsets: Array, row_trajectory: Array) -> None:
    steps = batch.steps
    if not len(steps):
        if steps.num_tokens:
            raise ArgumentError(f"steps.num_tokens is {steps.num_tokens} without steps, needs 0")
        return
    trajectory, row, start, end, state = _arrays(
        (steps.trajectory, steps.row, steps.start, steps.end, steps.state)
    )
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


def _ascending(name: str, labels: Array, count: int, what: str) -> None:
    if len(labels) and (labels[0] < 0 or labels[-1] >= count or (np.diff(labels) < 0).any()):
        raise ArgumentError(f"{name} does not ascend inside 0 .. {count - 1}, the {what} there are")


def _arrays(tensors: Iterable[Tensor]) -> Iterator[Array]:
    return (tensor.cpu().numpy() for tensor in tensors)


def _length(name: str, tensor: Any, entries: bool = False) -> int:
    """Length of a tensor of one dimension; entries: of one whose entries may have dimensions of their own."""
    is_tensor = isinstance(tensor, torch.Tensor)
    if not is_tensor or tensor.dim() < 1 or (tensor.dim() > 1 and not entries):
        what = f"a tensor of shape {list(tensor.shape)}" if is_tensor else f"a {type(tensor).__name__}"
        raise ArgumentError(f"{name} is {what}, needs a tensor of one dimension")
    length: int = tensor.shape[0]
    return length


def _check(name: str, tensor: Any, length: int, letter: str, dtype: str) -> None:
    if _length(name, tensor, letter.endswith("...")) != length:
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}, needs [{letter} = {length}]")
    needed, fits = DTYPES[dtype]
    if not fits(tensor):
        raise ArgumentError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, needs {needed}")
