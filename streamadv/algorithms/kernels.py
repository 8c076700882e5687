"""Compiled loops over tokens on a CPU: plain, row after row, float64 inside.

All arrays are contiguous. `offsets` [R + 1] int64 is the range of a row, `mask` [N] bool says which tokens count. A
row's result depends on its tokens alone. The compiler may not reorder arithmetic (no fastmath), so the bits are the
same on every machine. Kernels write into their last arguments, and round once, to the dtype of those.

Loops exist only where torch is slow: recurrences, where a token waits for the next one, and what reads or writes a
column once where torch goes over it three to ten times: the KL, the statistics, and whitening (half a million tokens:
0.2 ms instead of 2). The function that calls a kernel has the same in torch, for other devices, beside it. numba is
imported with the first call, so a chain can be composed without numba.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..extras import load, torch

if TYPE_CHECKING:
    from torch import Tensor

LANES: Final = 128


def on_cpu(tensor: Tensor) -> bool:
    """Whether these loops can read `tensor`; on other devices torch computes."""
    return tensor.is_cpu


def as_array(tensor: Tensor) -> Any:
    """A CPU tensor as a contiguous array; half precision becomes float32. A view of `tensor` if possible."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return tensor.detach().contiguous().numpy()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call, to run without the GIL, and cache the result on disk."""

    @cache
    def compiled() -> Callable[..., Any]:
        njit = load("numba").njit
        loop: Callable[..., Any]
        try:
            loop = njit(function, cache=True, nogil=True, error_model="numpy")
        except RuntimeError:  # no writable directory for the cache: every process compiles
            loop = njit(function, nogil=True, error_model="numpy")
        return loop

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return compiled()(*arguments)

    return call


@kernel
def scan(values, coefficient, coefficients, mask, offsets, result):
    """x_t = values_t + c_t * x_{t+1} over a row's tokens that count; 0 at the others.

    c is `coefficients`, or `coefficient` if they are None. x_t is computed from x_{t+2}, so that the processor works
    on two tokens side by side.
    """
    for row in range(len(offsets) - 1):
        here = slice(offsets[row], offsets[row + 1])
        value, counted, x = values[here], mask[here], result[here]
        factors = None if coefficients is None else coefficients[here]
        ahead = beyond = next_value = next_c = 0.0  # x_{t+1}, x_{t+2}
        for t in range(len(x) - 1, -1, -1):
            if counted[t]:
                c = coefficient if factors is None else factors[t]
                ahead, beyond = value[t] + c * next_value + c * next_c * beyond, ahead
                next_value, next_c = np.float64(value[t]), c
                x[t] = ahead
            else:
                x[t] = 0


@kernel
def credit(rewards, mask, offsets, result):
    """Rewards at tokens that do not count move to the previous one that does; a NaN there is no reward."""
    for row in range(len(offsets) - 1):
        pending = 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if mask[t]:
                result[t] = rewards[t] + pending
                pending = 0.0
            else:
                result[t] = 0
                if abs(rewards[t]) > 0:
                    pending += rewards[t]


@kernel
def vtrace(
    rewards, values, log_ratio, mask, offsets, gamma, lam, rho_clip, pg_rho_clip, alpha, advantages, targets
):
    """V-trace, see `estimators.vtrace`; without `log_ratio` (None) all ratios are 1, unclipped: GAE."""
    for row in range(len(offsets) - 1):
        here = slice(offsets[row], offsets[row + 1])
        reward, value, counted = rewards[here], values[here], mask[here]
        advantage, target = advantages[here], targets[here]
        ratio = None if log_ratio is None else log_ratio[here]
        error = following = 0.0
        for t in range(len(value) - 1, -1, -1):
            if not counted[t]:
                advantage[t] = target[t] = 0
                continue
            weight = clipped = cut = 1.0
            if ratio is not None:
                rho = math.exp(min(max(np.float64(ratio[t]), -20.0), 20.0))
                weight, clipped, cut = min(pg_rho_clip, rho), min(rho_clip, rho), min(1.0, rho)
                if alpha != 1:
                    clipped, cut = (1 - alpha) * rho + alpha * clipped, (1 - alpha) * rho + alpha * cut
            v = np.float64(value[t])
            delta = reward[t] + gamma * following - v
            advantage[t] = weight * (delta + gamma * lam * error)
            error = clipped * delta + gamma * lam * cut * error
            following = v
            target[t] = v + error


@kernel
def statistics(values, mask):
    """Of the elements that count; see `segments.Summary`.

    In LANES lanes, which the processor works on side by side: in one lane each addition waits for the one before.
    """
    first, end = 0, len(values)
    while first < end and not mask[first]:
        first += 1
    if first == end:
        return 0, 0.0, 0.0, -math.inf, math.inf
    pivot = values[first]  # distances from it, so that equal values give exactly 0
    above, squares = np.zeros(LANES), np.zeros(LANES)
    greatest, least = np.full(LANES, pivot), np.full(LANES, pivot)
    count = 0
    for first in range(0, end, LANES):
        value, counted = values[first : first + LANES], mask[first : first + LANES]
        for lane in range(len(counted)):
            x = value[lane] if counted[lane] else pivot
            greatest[lane] = x if x > greatest[lane] else greatest[lane]
            least[lane] = x if x < least[lane] else least[lane]
            distance = np.float64(x) - np.float64(pivot)
            above[lane] += distance
            squares[lane] += distance * distance
        for lane in range(len(counted)):
            count += counted[lane]
    total = above.sum()
    spread = max(squares.sum() - total * total / count, 0.0)
    return count, pivot + total / count, spread, np.float64(greatest.max()), np.float64(least.min())


@kernel
def rescale(values, mask, centre, scale, result):
    """(value - centre) * scale at tokens that count, 0 elsewhere."""
    for t in range(len(values)):
        result[t] = np.float32((values[t] - centre) * scale) if mask[t] else np.float32(0)


@kernel
def k3(log_probs, ref_log_probs, mask, offsets, rewards, factor, result, sums):
    """exp(x) - 1 - x, x = ref_log_probs - log_probs, bounded as in `kl.approx_kl`; 0 at tokens that do not count.

    sums [R]: of a row. In lanes, as `statistics`. result: `rewards` plus `factor` times it; None = it alone.
    """
    lanes = np.empty(LANES)
    for row in range(len(offsets) - 1):
        lanes[:] = 0
        for first in range(offsets[row], offsets[row + 1], LANES):
            last = min(first + LANES, offsets[row + 1])
            log_prob, ref = log_probs[first:last], ref_log_probs[first:last]
            counted, kept = mask[first:last], result[first:last]
            reward = None if rewards is None else rewards[first:last]
            for lane in range(last - first):
                difference = np.float64(ref[lane] - log_prob[lane])
                x = 20.0 if difference > 20 else -20.0 if difference < -20 else difference  # NaN stays NaN
                # exp(x) - 1 from its series at x / 16, doubled four times: without branches and calls the loop
                # vectorises.
                y = x / 16
                e = y + y * y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720)))))
                for _ in range(4):
                    e *= e + 2
                kl = 10.0 if e - x > 10 else e - x
                kl = kl if counted[lane] else 0.0
                kept[lane] = kl if reward is None else reward[lane] + factor * kl
                lanes[lane] += kl
        sums[row] = lanes.sum()
