"""From padded [B, T] tensors to the packed batch that the algorithms work on, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..algorithms.arguments import Labels
from ..algorithms.packed import BUILT, PackedBatch, Steps
from ..algorithms.packing import by_number, numbered, numbered_array
from ..algorithms.segments import Trainable, tokens_where


def padded_tokens(mask: Tensor) -> Trainable:
    """The tokens where a padded `mask` [B, T] is not 0, its rows end to end with their padding."""
    rows, width = mask.shape
    return tokens_where(mask.reshape(-1), torch.arange(rows + 1, device=mask.device) * width)


def label_numbers(labels: Labels) -> Tensor:
    """[B] int64 on the host: the number of each label, from 0; the door has numbered those of arguments."""
    return labels if isinstance(labels, Tensor) else torch.from_numpy(numbered(list(labels))[0])


def pair_numbers(first: Labels, second: Labels) -> Tensor:
    """[B] int64 on the host: the number of each pair of labels."""
    numbers, others = label_numbers(first), label_numbers(second)
    size = int(others.max()) + 1 if len(others) else 1
    return torch.from_numpy(numbered_array((numbers * size + others).numpy()))


def group_order(labels: Labels, device: torch.device) -> tuple[Tensor, Tensor]:
    """(order [B], offsets [G + 1]) int64: the rows group by group, inside a group in their order."""
    order, offsets = by_number(label_numbers(labels).numpy())
    return torch.from_numpy(order).to(device), torch.from_numpy(offsets).to(device)


def ungrouped(values: Tensor, order: Tensor) -> Tensor:
    """float32: `values` [B] or [B, T] that are in the `order` [B] of their groups, back in the order of the rows."""
    rounded = values.to(torch.float32)
    return torch.empty_like(rounded).index_copy_(0, order, rounded)


def as_batch(
    mask: Tensor,
    columns: Mapping[str, Tensor] | None = None,
    rewards: Tensor | None = None,
    index: Labels | None = None,
) -> tuple[PackedBatch, Tensor]:
    """A padded batch as a packed one of B one-row trajectories; padding becomes masked tokens.

    Args:
      mask: [B, T] of 0 and 1.
      columns: [B, T] per name; None leaves out response_mask too.
      rewards: [B]; None = 0.
      index: [B] group labels; None = every row is a group.

    Returns:
      The batch, and the order [B] of the padded rows in it, which `ungrouped` needs.
    """
    rows, width = mask.shape
    tokens, device = padded_tokens(mask), mask.device
    row_numbers = torch.arange(rows, device=device)
    order, group, groups = row_numbers, row_numbers, rows
    if index is not None:
        numbers = label_numbers(index).numpy()
        in_order, starts = by_number(numbers)
        order, group = (torch.from_numpy(array).to(device) for array in (in_order, numbers[in_order]))
        groups = len(starts) - 1

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor if index is None else tensor.index_select(0, order)

    counted = tokens.mask.view(torch.uint8).view(rows, width)
    token_columns = {} if columns is None else {"response_mask": counted, **columns}
    row_rewards = torch.zeros(rows, device=device) if rewards is None else rewards
    none = row_numbers[:0]
    batch = PackedBatch(
        cu_seqlens=tokens.offsets,
        row_trajectory=row_numbers,
        row_trainable=laid_out(counted.sum(1, dtype=torch.int32)).to(torch.int64),
        trajectory_group=group,
        rewards=laid_out(row_rewards).to(torch.float64),
        baseline=row_numbers < 0,
        steps=Steps(none, none, none, none, none.double(), none, num_tokens=0),
        num_tokens=rows * width,
        num_groups=groups,
        columns={name: laid_out(column).reshape(-1) for name, column in token_columns.items()},
        layout=BUILT,
    )
    return batch, order
