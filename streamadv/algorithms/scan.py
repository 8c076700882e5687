"""Reverse discounted scans over packed rows: x_t = a_t + c_t * x_{t+1}, in float64.

Rows are cut into blocks of BLOCK tokens counted from the row's end. Inside the blocks the recurrence runs
for all blocks at once, then block heads are combined by doubling. No power of a discount is ever divided
by, so nothing underflows into 0/0, and the order of operations depends on a token's distance from the end
of its row alone: a row's result is the same whatever else is in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64


class Blocks(NamedTuple):
    """Where the tokens of each block are. J blocks, listed per row from its last one to its first."""

    token: Tensor  # [BLOCK, J] int64: token in the packed batch; N where a block reaches before its row
    rank: Tensor  # [J] int64: 0 for the last block of a row, counting towards its start
    max_rank: int  # upper bound of rank
    num_tokens: int  # N


def blocks(cu_seqlens: Tensor, num_tokens: int) -> Blocks:
    """Cut rows [R] given by `cu_seqlens` [R + 1] (empty rows allowed) into blocks."""
    device = cu_seqlens.device
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    per_row = (lengths + BLOCK - 1) // BLOCK
    ends = torch.cumsum(per_row, 0)
    # On a device the number of blocks is unknown without waiting; the bound adds a few empty ones.
    on_host = device.type == "cpu"
    count = int(ends[-1]) if on_host and len(ends) else num_tokens // BLOCK + len(lengths)
    number = torch.arange(count, device=device)
    row = torch.searchsorted(ends, number, right=True).clamp(max=max(len(lengths) - 1, 0))
    rank = number - (ends - per_row)[row]
    first = cu_seqlens[1:][row] - (rank + 1) * BLOCK
    index = first + torch.arange(BLOCK, device=device)[:, None]
    index = torch.where((index >= cu_seqlens[:-1][row]) & (rank < per_row[row]), index, num_tokens)
    max_rank = int(per_row.max()) if on_host and len(ends) else count
    return Blocks(index, rank, max_rank, num_tokens)


def reverse_scan(values: Tensor, coefficients: Tensor | float, cut: Blocks) -> Tensor:
    """[N] float64: x_t = values_t + coefficients_t * x_{t+1} within each row, x = 0 after its end.

    values [N]; coefficients [N] or one number for all.
    """
    width = cut.token.shape[1]
    if width == 0:
        return values.to(torch.float64)
    result = _gather(values, cut)
    if isinstance(coefficients, Tensor):
        product = _gather(coefficients, cut)
        for i in range(BLOCK - 2, -1, -1):
            torch.addcmul(result[i], product[i], result[i + 1], out=result[i])
            product[i] *= product[i + 1]
    else:
        for i in range(BLOCK - 2, -1, -1):
            torch.add(result[i], result[i + 1], alpha=coefficients, out=result[i])
        exponent = torch.arange(BLOCK, 0, -1, device=values.device, dtype=torch.float64)
        product = (coefficients**exponent)[:, None].expand(BLOCK, width)
    carry = _carry(result[0], product[0], cut)
    result = torch.addcmul(result, product, carry)
    scattered = result.new_empty(cut.num_tokens + 1).scatter_(0, cut.token.view(-1), result.view(-1))
    return scattered[:-1]


def next_in_row(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N]: the value one token later in the same row, 0 for a row's last token."""
    ahead = torch.cat([values[1:], values.new_zeros(1)]) if len(values) else values
    is_last = torch.zeros(len(values) + 1, dtype=torch.bool, device=values.device)
    is_last[cu_seqlens[1:]] = True  # empty rows at the start mark index 0, which the shift drops
    return torch.where(is_last[1:], torch.zeros_like(ahead), ahead)


def _gather(values: Tensor, cut: Blocks) -> Tensor:
    padded = torch.cat([values, values.new_zeros(1)])
    return padded[cut.token].to(torch.float64)


def _carry(head: Tensor, product: Tensor, cut: Blocks) -> Tensor:
    """[J]: what each block receives from the blocks after it in its row."""
    head, product = head.clone(), product.clone()
    step = 1
    while step < cut.max_rank:
        reaches = cut.rank[step:] >= step
        further = torch.where(reaches, product[step:] * head[:-step], 0.0)
        product = torch.cat([product[:step], torch.where(reaches, product[step:] * product[:-step], 0.0)])
        head = torch.cat([head[:step], head[step:] + further])
        step *= 2
    return torch.where(cut.rank > 0, torch.cat([head.new_zeros(1), head[:-1]]), 0.0)
