"""Reverse discounted scans over packed rows: x_t = a_t + c_t * x_{t+1}, in float64.

Tokens are laid out in blocks of BLOCK, each row from its last token to its first. Inside the blocks the
recurrence runs for all blocks at once, then block ends are combined by doubling. The order of operations
depends on a token's distance from the end of its row alone, so a row's result is the same whatever else is
in the batch. Long rows are safe: no power of a discount beyond the BLOCK-th is ever divided by.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

BLOCK: Final = 64

#: Discounts from here on may be divided by their powers within a block (1e-4 ** 63 is a normal float64).
SMALLEST_SCALED: Final = 1e-4


class Blocks(NamedTuple):
    """Where the elements of each block are: J blocks, row by row, each row backwards in time."""

    position: Tensor  # [J, BLOCK] int64: in the packed batch; N where a row does not fill its last block
    rank: Tensor  # [J] int64: 0 for a row's first block (its last tokens)
    max_rank: int
    num_tokens: int  # N


def blocks(offsets: Tensor, num_tokens: int, tokens: Tensor | None = None) -> Blocks:
    """Cut rows into blocks; row r is positions offsets[r] .. offsets[r+1] ([R + 1] int64, empty rows allowed).

    tokens [K] int64, ascending: the scan runs over these positions of the packed batch only, and `offsets`
    count them; None = all N.
    """
    lengths = offsets[1:] - offsets[:-1]
    per_row = (lengths + BLOCK - 1) // BLOCK
    ends = torch.cumsum(per_row, 0)
    count = int(ends[-1]) if len(ends) else 0
    rank = torch.arange(count, device=offsets.device)
    rank = rank - torch.repeat_interleave(ends - per_row, per_row, output_size=count)
    last = torch.repeat_interleave(offsets[1:] - 1, per_row, output_size=count)
    within = torch.arange(BLOCK, device=offsets.device)
    index = (last - rank * BLOCK)[:, None] - within
    nothing = num_tokens if tokens is None else len(tokens)
    tail = ends[per_row > 0] - 1
    start = offsets[:-1][per_row > 0]
    index[tail] = torch.where(index[tail] >= start[:, None], index[tail], nothing)
    if tokens is not None:
        index = torch.cat([tokens, tokens.new_full((1,), num_tokens)])[index]
    return Blocks(index, rank, int(per_row.max()) if count else 0, num_tokens)


def reverse_scan(values: Tensor, coefficients: Tensor | float, cut: Blocks) -> Tensor:
    """[N] float64: x_t = values_t + coefficients_t * x_{t+1} within each row, x = 0 after its end.

    values [N]; coefficients [N] or one number for all. Positions outside the blocks are 0.
    """
    factors = arrange(coefficients, cut) if isinstance(coefficients, Tensor) else coefficients
    return put_back(scan(arrange(values, cut), factors, cut), cut)


def arrange(values: Tensor, cut: Blocks) -> Tensor:
    """[J, BLOCK] float64: `values` [N] in block layout, 0 where there is no token."""
    padded = torch.cat([values, values.new_zeros(1)])
    return padded.index_select(0, cut.position.view(-1)).view(cut.position.shape).to(torch.float64)


def put_back(arranged: Tensor, cut: Blocks) -> Tensor:
    """[N]: from block layout to packed positions, 0 at positions outside the blocks."""
    packed = arranged.new_zeros(cut.num_tokens + 1)
    return packed.scatter_(0, cut.position.view(-1), arranged.reshape(-1))[:-1]


def upcoming(arranged: Tensor, cut: Blocks) -> Tensor:
    """[J, BLOCK]: in block layout, the value one token later in the row; 0 for a row's last token."""
    ahead = torch.empty_like(arranged)
    ahead[:, 1:] = arranged[:, :-1]
    ahead[1:, 0] = arranged[:-1, -1]
    ahead[cut.rank == 0, 0] = 0
    return ahead


def scan(arranged: Tensor, coefficients: Tensor | float, cut: Blocks) -> Tensor:
    """[J, BLOCK] float64: the recurrence in block layout; `coefficients` likewise, or one number."""
    if isinstance(coefficients, Tensor):
        return _scan_varying(arranged, coefficients, cut)
    if coefficients == 0:
        return arranged
    if coefficients < SMALLEST_SCALED:
        return _scan_varying(arranged, torch.full_like(arranged, coefficients), cut)
    exponent = torch.arange(BLOCK, device=arranged.device, dtype=torch.float64)
    powers = coefficients**exponent
    # x_k = c^k * (sum of a_j / c^j up to k): every term keeps its sign, nothing cancels.
    sums = arranged.cumsum(1) if coefficients == 1 else (arranged / powers).cumsum_(1)
    ends = sums[:, -1] * powers[-1]
    carry = _carry(ends, torch.full_like(ends, coefficients**BLOCK), cut)
    sums += (coefficients * carry)[:, None]
    return sums if coefficients == 1 else sums.mul_(powers)


def next_in_row(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N]: the value one token later in the same row, 0 for a row's last token."""
    ahead = torch.cat([values[1:], values.new_zeros(1)]) if len(values) else values
    is_last = torch.zeros(len(values) + 1, dtype=torch.bool, device=values.device)
    is_last[cu_seqlens[1:]] = True  # empty rows at the start mark index 0, which the shift drops
    return ahead.masked_fill(is_last[1:], 0)


def _scan_varying(arranged: Tensor, coefficients: Tensor, cut: Blocks) -> Tensor:
    # One step for all blocks at a time, on contiguous slices.
    result, product = (
        tensor.t().clone(memory_format=torch.contiguous_format) for tensor in (arranged, coefficients)
    )
    for k in range(1, BLOCK):
        result[k].addcmul_(product[k], result[k - 1])
        product[k] *= product[k - 1]
    carry = _carry(result[-1], product[-1], cut)
    return torch.addcmul(result, product, carry).t()


def _carry(ends: Tensor, product: Tensor, cut: Blocks) -> Tensor:
    """[J]: what each block receives from the block before it in its row, from its own end and product."""
    step = 1
    while step < cut.max_rank:
        reaches = cut.rank[step:] >= step
        further = torch.where(reaches, product[step:] * ends[:-step], 0.0)
        product = torch.cat([product[:step], torch.where(reaches, product[step:] * product[:-step], 0.0)])
        ends = torch.cat([ends[:step], ends[step:] + further])
        step *= 2
    received = torch.cat([ends.new_zeros(1), ends[:-1]]) if len(ends) else ends
    return torch.where(cut.rank > 0, received, 0.0)
