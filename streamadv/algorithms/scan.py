"""Reverse discounted scans over packed rows: x_t = a_t + c_t * x_{t+1}, in float64.

Tokens are laid out in blocks of BLOCK, each row from its last token to its first. Inside the blocks the
recurrence runs for all blocks at once, then block ends are combined by doubling. The order of operations
depends on a token's distance from the end of its row alone, so a row's result is the same whatever else is
in the batch. Long rows are safe: no power of a discount beyond the BLOCK-th is ever divided by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK: Final = 64

#: Blocks worked on at a time: few enough for a core's cache, many enough to hide the cost of a call.
SLAB: Final = 4096

#: Discounts from here on may be divided by their powers within a block (1e-4 ** 63 is a normal float64).
SMALLEST_SCALED: Final = 1e-4


class Blocks(NamedTuple):
    """Where the elements of each block are: J blocks, row by row, each row backwards in time.

    A row that does not fill its last block leaves places at the block's end, after all its tokens, so what
    is read there reaches no token. On a CPU the rows come last to first: the blocks then are the packed
    tokens read backwards, with gaps, and no token needs an index.
    """

    rank: Tensor  # [J] int64: 0 for a row's first block (its last tokens)
    max_rank: int
    size: int  # elements of a result
    bounds: list[int]  # where slabs of whole rows start and end, counted in blocks
    tokens: Tensor | None  # [K] int64: positions the scan runs over; None = all
    filled: Tensor  # CPU: [J * BLOCK] bool: places that hold a token
    token_bounds: list[int]  # CPU: `bounds`, counted in tokens
    source: Tensor  # device: [J * BLOCK] int64: position in the packed batch; any where there is no token
    target: Tensor  # device: [J * BLOCK] int64: position in the result; `size` where there is no token


def blocks(offsets: Tensor, num_tokens: int, tokens: Tensor | None = None) -> Blocks:
    """Cut rows into blocks; row r is positions offsets[r] .. offsets[r+1] ([R + 1] int64, empty rows allowed).

    tokens [K] int64, ascending: the scan runs over these positions of the packed batch only, `offsets` count
    them, and results have K elements; None = all N = `num_tokens`. The rows cover 0 .. K.
    """
    lengths = offsets[1:] - offsets[:-1]
    on_cpu = offsets.device.type == "cpu"
    if on_cpu:
        lengths = lengths.flip(0)
    per_row = (lengths + BLOCK - 1) // BLOCK
    ends = torch.cumsum(per_row, 0)
    count = int(ends[-1]) if len(ends) else 0
    rank = torch.arange(count, device=offsets.device)
    rank = rank - torch.repeat_interleave(ends - per_row, per_row, output_size=count)
    size = num_tokens if tokens is None else len(tokens)
    none = offsets.new_zeros(0)
    cut = Blocks(rank, int(per_row.max()) if count else 0, size, [0, count], tokens, none, [], none, none)
    if on_cpu:
        last = _slab_ends(ends)
        spans = torch.stack([lengths, per_row * BLOCK - lengths], 1).view(-1)
        filled = np.repeat(np.arange(len(spans)) % 2 == 0, spans.numpy())
        return cut._replace(
            bounds=[0, *ends[last].tolist()],
            token_bounds=[0, *torch.cumsum(lengths, 0)[last].tolist()],
            filled=torch.from_numpy(filled),
        )
    last = torch.repeat_interleave(offsets[1:] - 1, per_row, output_size=count)
    index = (last - rank * BLOCK)[:, None] - torch.arange(BLOCK, device=offsets.device)
    tail = ends[per_row > 0] - 1  # the blocks that may reach past their row
    reached = index[tail]
    index[tail] = reached.clamp(min=0)
    source = index.clone().view(-1) if tokens is None else tokens.index_select(0, index.view(-1))
    start = offsets[:-1][per_row > 0]
    index[tail] = torch.where(reached >= start[:, None], reached, size)
    return cut._replace(source=source, target=index.view(-1))


def reverse_scan(values: Tensor, coefficients: Tensor | float, cut: Blocks) -> Tensor:
    """x_t = values_t + coefficients_t * x_{t+1} within each row, x = 0 after its end; float64.

    values [N]; coefficients [N] or one number for all. The result has one element per token of `cut`.
    """
    if isinstance(coefficients, Tensor):
        return over_blocks(lambda part, a, c: (scan(a, c, part),), [values, coefficients], cut)[0]
    return over_blocks(lambda part, a: (scan(a, coefficients, part),), [values], cut)[0]


def over_blocks(
    function: Callable[..., Sequence[Tensor]], columns: Sequence[Tensor], cut: Blocks, results: int = 1
) -> list[Tensor]:
    """Apply `function(part, *arranged columns)` slab by slab; each of its `results` comes back packed, float64.

    columns [N] are given in block layout, [J, BLOCK] float64, and the results are expected in it. The
    function may change its arguments.
    """
    if cut.rank.device.type == "cpu":
        return _over_slabs(function, columns, cut, results)
    packed = [torch.empty(cut.size + 1, dtype=torch.float64, device=cut.rank.device) for _ in range(results)]
    arranged = [column.index_select(0, cut.source).view(-1, BLOCK).to(torch.float64) for column in columns]
    for result, found in zip(packed, function(cut, *arranged), strict=True):
        result.scatter_(0, cut.target, found.reshape(-1))
    return [result[:-1] for result in packed]


def _over_slabs(
    function: Callable[..., Sequence[Tensor]], columns: Sequence[Tensor], cut: Blocks, results: int
) -> list[Tensor]:
    packed = [np.empty(cut.size, np.float64) for _ in range(results)]
    slabs = zip(itertools.pairwise(cut.bounds), itertools.pairwise(cut.token_bounds), strict=True)
    for (first, end), (after, before) in slabs:
        here = slice(cut.size - before, cut.size - after)
        filled = cut.filled[first * BLOCK : end * BLOCK].numpy()
        arranged = []
        for column in columns:
            chosen = column[here] if cut.tokens is None else column.index_select(0, cut.tokens[here])
            laid_out = np.zeros(len(filled))
            laid_out[filled] = chosen.numpy()[::-1]
            arranged.append(torch.from_numpy(laid_out).view(-1, BLOCK))
        found = function(cut._replace(rank=cut.rank[first:end]), *arranged)
        for result, values in zip(packed, found, strict=True):
            result[here] = values.reshape(-1).numpy()[filled][::-1]
    return [torch.from_numpy(result) for result in packed]


def add_upcoming(target: Tensor, arranged: Tensor, factor: float, cut: Blocks) -> Tensor:
    """`target` + factor * (`arranged` one token later in the row, 0 after its last), in place; block layout."""
    ends = cut.rank == 0
    alone = target[ends, 0]
    target.view(-1)[1:].add_(arranged.reshape(-1)[:-1], alpha=factor)
    target[ends, 0] = alone
    return target


def upcoming(arranged: Tensor, cut: Blocks) -> Tensor:
    """In block layout, the value one token later in the row; 0 for a row's last token."""
    ahead = torch.empty_like(arranged)
    ahead.view(-1)[1:] = arranged.reshape(-1)[:-1]
    ahead[cut.rank == 0, 0] = 0
    return ahead


def scan(arranged: Tensor, coefficients: Tensor | float, cut: Blocks) -> Tensor:
    """[J, BLOCK] float64: the recurrence in block layout; `coefficients` likewise, or one number.

    May overwrite `arranged`.
    """
    if isinstance(coefficients, Tensor):
        return _scan_varying(arranged, coefficients, cut)
    if coefficients == 0:
        return arranged
    if coefficients < SMALLEST_SCALED:
        return _scan_varying(arranged, torch.full_like(arranged, coefficients), cut)
    exponent = torch.arange(BLOCK, device=arranged.device, dtype=torch.float64)
    powers = coefficients**exponent
    # x_k = c^k * (sum of a_j / c^j up to k): every term keeps its sign, nothing cancels.
    sums = (arranged if coefficients == 1 else arranged.mul_(powers.reciprocal())).cumsum_(1)
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


def _slab_ends(ends: Tensor) -> Tensor:
    """[R] bool: the rows that are the last of a slab, which is as many whole rows as start within SLAB blocks."""
    slab = (ends - 1) // SLAB
    last = torch.ones_like(slab, dtype=torch.bool)
    last[:-1] = slab[1:] != slab[:-1]  # rows without blocks repeat an end
    return last & (ends > 0)


def _scan_varying(arranged: Tensor, coefficients: Tensor, cut: Blocks) -> Tensor:
    # One step for all blocks at a time, on contiguous slices.
    result, product = (
        tensor.t().clone(memory_format=torch.contiguous_format) for tensor in (arranged, coefficients)
    )
    for k in range(1, BLOCK):
        result[k].addcmul_(product[k], result[k - 1])
        product[k] *= product[k - 1]
    carry = _carry(result[-1].clone(), product[-1].clone(), cut)
    return result.addcmul_(product, carry).t()


def _carry(ends: Tensor, product: Tensor, cut: Blocks) -> Tensor:
    """[J]: what each block receives from the block before it in its row; changes its arguments."""
    step = 1
    while step < cut.max_rank:
        reaches = cut.rank[step:] >= step
        further = product[step:] * ends[:-step]
        combined = product[step:] * product[:-step]
        ends[step:] += further.masked_fill_(~reaches, 0)
        product[step:] = combined.masked_fill_(~reaches, 0)
        step *= 2
    received = torch.zeros_like(ends)
    received[1:] = ends[:-1]
    return received.masked_fill_(cut.rank == 0, 0)
