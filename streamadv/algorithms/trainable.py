"""The trainable tokens of a batch: most work is done on them alone, observations and prompts left out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .packed import PackedBatch
from .scan import Blocks, blocks


class Trainable(NamedTuple):
    """Positions of trainable tokens, row by row."""

    position: Tensor  # [K] int64, ascending positions in the packed batch
    offsets: Tensor  # [R + 1] int64: row r has position[offsets[r]] .. position[offsets[r + 1] - 1]
    num_tokens: int  # N

    @property
    def counts(self) -> Tensor:
        """[R] int64: trainable tokens of each row."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def blocks(self) -> Blocks:
        """Layout for scans in which time runs over trainable tokens only; their results have K elements."""
        return blocks(self.offsets, self.num_tokens, self.position)

    def pick(self, values: Tensor) -> Tensor:
        """[K]: `values` [N] of the trainable tokens."""
        return values.index_select(0, self.position)

    def spread(self, values: Tensor) -> Tensor:
        """[N]: `values` [K] at their tokens, 0 elsewhere."""
        return values.new_zeros(self.num_tokens).scatter_(0, self.position, values)

    def last_before(self, end: Tensor) -> Tensor:
        """[E] int64: the last trainable token before each position of `end`, -1 if there is none."""
        number = torch.searchsorted(self.position, end)
        return torch.cat([self.position.new_full((1,), -1), self.position])[number]


def trainable(batch: PackedBatch) -> Trainable:
    """The trainable tokens of `batch`. Needs the column response_mask."""
    return trainable_tokens(batch.column("response_mask"), batch.cu_seqlens)


def trainable_tokens(mask: Tensor, cu_seqlens: Tensor) -> Trainable:
    """The tokens where `mask` [N] is not 0, in the rows given by `cu_seqlens` [R + 1]."""
    position = positions(mask.view(torch.bool) if mask.dtype == torch.uint8 else mask != 0)
    return Trainable(position, torch.searchsorted(position, cu_seqlens), len(mask))


def positions(chosen: Tensor) -> Tensor:
    """[K] int64, ascending: where `chosen` [N] bool is set."""
    if chosen.device.type == "cpu":  # several times faster than nonzero
        return torch.from_numpy(np.flatnonzero(chosen.numpy()))
    return chosen.nonzero().squeeze(1)


def padded_tokens(mask: Tensor) -> Trainable:
    """The tokens where a padded `mask` [B, T] is not 0, as positions in its flattened form."""
    rows, width = mask.shape
    return trainable_tokens(mask.reshape(-1), torch.arange(rows + 1, device=mask.device) * width)
