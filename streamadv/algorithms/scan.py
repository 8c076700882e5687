"""Reverse scans over rows laid end to end: x_t = a_t + c_t * x_{t+1} over the tokens that count, x = 0 after a row.

The state is float64, results have the dtype of the values. On a CPU compiled loops run row by row; on a device torch
works on blocks of tokens side by side, and the host does not wait. Turns of an agent are the longest stretches of
consecutive trainable tokens in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..extras import torch
from . import kernels
from .segments import Trainable, keyed_sum

if TYPE_CHECKING:
    from torch import Tensor


BLOCK: Final = 64


def reverse_scan(values: Tensor, coefficients: Tensor | float, tokens: Trainable) -> Tensor:
    """[N]: x_t = values_t + coefficients_t * x_{t+1}, t running over the tokens that count; 0 elsewhere.

    values [N] float32 or float64; coefficients [N] or one number for all.
    """
    if not kernels.on_cpu(values):
        return tokens.only(scan_blocks(values, coefficients, tokens)).to(values.dtype)
    array, *others = map(kernels.as_array, (values, *tokens))
    each = kernels.as_array(coefficients) if isinstance(coefficients, torch.Tensor) else None
    factor = float(coefficients) if each is None else 0.0
    scanned = np.empty_like(array)
    kernels.scan(array, factor, each, *others, scanned)
    return torch.from_numpy(scanned)


def scan_segments(values: Tensor, coefficient: float, offsets: Tensor) -> Tensor:
    """[K]: `reverse_scan` over all elements of segments with `offsets` [G + 1]."""
    every_element = torch.ones(len(values), dtype=torch.bool, device=values.device)
    return reverse_scan(values, coefficient, Trainable(every_element, offsets))


def scan_blocks(values: Tensor, coefficients: Tensor | float, tokens: Trainable) -> Tensor:
    """[N] float64: `reverse_scan` on any device; a token that does not count takes the x of the next one that does."""
    factors = torch.as_tensor(coefficients, dtype=torch.float64, device=values.device)
    factors = torch.where(tokens.mask, factors, 1.0).masked_fill(ends_row(tokens), 0)
    return _recurrence(tokens.only(values.to(torch.float64)).flip(0), factors.flip(0)).flip(0)


def upcoming(values: Tensor, tokens: Trainable) -> Tensor:
    """[N] float64: the value of the next token in the row that counts, 0 after the last."""
    at_or_after = scan_blocks(values, 0.0, tokens)
    return at_or_after.roll(-1).masked_fill(ends_row(tokens), 0)


def ends_row(tokens: Trainable) -> Tensor:
    """[N] bool: the last token of a row."""
    last = torch.zeros(len(tokens.mask) + 1, dtype=torch.bool, device=tokens.mask.device)
    last[tokens.offsets[1:]] = True  # empty rows at the start mark index 0, which the shift drops
    return last[1:]


def _recurrence(values: Tensor, factors: Tensor) -> Tensor:
    """[N] float64: x_k = values_k + factors_k * x_{k-1}; a factor of 0 stops everything before it, NaN too."""
    count = len(values)
    padding = (0, -count % BLOCK)
    x, reach = (
        torch.nn.functional.pad(tensor, padding).view(-1, BLOCK).t().contiguous()
        for tensor in (values, factors)
    )
    for k in range(1, BLOCK):  # one step of all blocks at a time
        x[k] += torch.where(reach[k] == 0, 0.0, reach[k] * x[k - 1])
        reach[k] *= reach[k - 1]
    if x.shape[1] > 1:
        received = _recurrence(x[-1].clone(), reach[-1].clone()).roll(1)
        received[0] = 0
        x += torch.where(reach == 0, 0.0, reach * received)
    return x.t().reshape(-1)[:count]


def turn_mean(values: Tensor, tokens: Trainable) -> Tensor:
    """[N] float64: the mean of `values` [N] over a turn, on all its tokens; 0 outside."""
    turn = torch.cumsum(_ends_turn(tokens), 0) - _ends_turn(tokens).to(torch.int64)  # number of turns before
    sums, counts = (keyed_sum(tokens.only(x), turn, len(values)) for x in (values, tokens.mask))
    return tokens.only((sums / counts.clamp(min=1))[turn])


def turn_returns(rewards: Tensor, tokens: Trainable, gamma: float) -> Tensor:
    """[N]: G = reward at the turn's last token + gamma * G of the row's next turn, on all its tokens; 0 outside.

    The return of ROLL's agentic_reinforce: time advances by one per turn. `rewards` [N] at other tokens do not count.
    Same dtype as the rewards.
    """
    last = _ends_turn(tokens)
    steps = torch.ones(len(last), dtype=torch.float64, device=last.device).masked_fill(last, gamma)
    return reverse_scan(torch.where(last, rewards, 0.0), steps, tokens)


def _ends_turn(tokens: Trainable) -> Tensor:
    """[N] bool: tokens that count, and are the last of their row or stand before one that does not count."""
    return tokens.mask & (~tokens.mask.roll(-1) | ends_row(tokens))
