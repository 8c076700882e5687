"""Loops over tokens, rows and segments; conventions as in `kernels`."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from .compiler import kernel

LANES: Final = 128


@kernel
def count(mask, offsets, counts):
    """counts [R] int64: tokens of a row that count."""
    for row in range(len(offsets) - 1):
        counted = mask[offsets[row] : offsets[row + 1]]
        total = 0
        for t in range(len(counted)):
            total += counted[t] != 0
        counts[row] = total


@kernel
def by_number(numbers, order, offsets):
    """Counting sort; see `labels.by_number`. offsets: zeros."""
    for k in range(len(numbers)):
        offsets[numbers[k] + 1] += 1
    for number in range(1, len(offsets)):
        offsets[number] += offsets[number - 1]
    for k in range(len(numbers)):
        order[offsets[numbers[k]]] = k
        offsets[numbers[k]] += 1
    for number in range(len(offsets) - 1, 0, -1):
        offsets[number] = offsets[number - 1]
    offsets[0] = 0


@kernel
def segment_sum(values, offsets, sums):
    """sums [G] float64: the sum of a segment, element by element."""
    for segment in range(len(offsets) - 1):
        total = 0.0
        for t in range(offsets[segment], offsets[segment + 1]):
            total += values[t]
        sums[segment] = total


@kernel
def row_sum(values, mask, offsets, sums):
    """sums [R] float64: the sum over a row's tokens that count."""
    for row in range(len(offsets) - 1):
        value, counted = values[offsets[row] : offsets[row + 1]], mask[offsets[row] : offsets[row + 1]]
        total = 0.0
        for t in range(len(counted)):
            if counted[t]:
                total += value[t]
        sums[row] = total


@kernel
def moments(values, weight, offsets, results):
    """results [4, K]: weighted statistics of an element's segment; see `segments.Moments`."""
    size, mean, std, centred = results[0], results[1], results[2], results[3]
    for segment in range(len(offsets) - 1):
        start, end = offsets[segment], offsets[segment + 1]
        total, least = 0.0, math.inf
        for t in range(start, end):
            total += weight[t]
            if weight[t] > 0 and not values[t] >= least:
                least = values[t]
        if not total > 0:
            least = 0.0
        above = 0.0
        for t in range(start, end):
            if weight[t] > 0:
                above += (values[t] - least) * weight[t]
        above /= max(total, 1.0)
        squares = 0.0
        for t in range(start, end):
            centred[t] = (values[t] - least) - above
            if weight[t] > 0:
                squares += centred[t] * centred[t] * weight[t]
        size[start:end] = total
        mean[start:end] = least + above
        std[start:end] = math.sqrt(squares / max(total - 1, 1.0))


@kernel
def four_steps(a, b, c, d, factor, ahead):
    """x of four neighbouring tokens, given `ahead`, the x after them.

    Unrolled, so that the processor computes the four side by side: all wait for `ahead`, none for its neighbour.
    """
    c += factor * d
    b += factor * c
    a += factor * b
    square = factor * factor
    return a + square * square * ahead, b + square * factor * ahead, c + square * ahead, d + factor * ahead


@kernel
def four_counted(counted, t):
    """How many of the four tokens before `t` count; with fewer than four tokens 1, which is neither all nor none."""
    return counted[t - 1] + counted[t - 2] + counted[t - 3] + counted[t - 4] if t >= 4 else 1


@kernel
def scan(values, coefficient, mask, offsets, result):
    """x_t = values_t + coefficient * x_{t+1} over a row's tokens that count; 0 at the others."""
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        value, counted, x = values[start:end], mask[start:end], result[start:end]
        ahead = 0.0
        t = end - start
        while t > 0:
            block_count = four_counted(counted, t)
            if block_count == 4:
                t -= 4
                a, b, c, d = four_steps(
                    value[t], value[t + 1], value[t + 2], value[t + 3], coefficient, ahead
                )
                x[t], x[t + 1], x[t + 2], x[t + 3] = a, b, c, d
                ahead = a
            elif block_count == 0:
                t -= 4
                x[t] = x[t + 1] = x[t + 2] = x[t + 3] = 0
            else:
                t -= 1
                if counted[t]:
                    ahead = value[t] + coefficient * ahead
                    x[t] = ahead
                else:
                    x[t] = 0


@kernel
def scan_varying(values, coefficients, mask, offsets, result):
    """`scan` with a coefficient per token."""
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        value, factor = values[start:end], coefficients[start:end]
        counted, x = mask[start:end], result[start:end]
        ahead = 0.0
        for t in range(end - start - 1, -1, -1):
            if counted[t]:
                ahead = value[t] + factor[t] * ahead
                x[t] = ahead
            else:
                x[t] = 0


@kernel
def gae(rewards, values, mask, offsets, gamma, lam, advantages, returns):
    """Generalised advantage estimation; see `estimators.gae`."""
    decay = gamma * lam
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        reward, value, counted = rewards[start:end], values[start:end], mask[start:end]
        advantage, target = advantages[start:end], returns[start:end]
        ahead = following = 0.0
        t = end - start
        while t > 0:
            block_count = four_counted(counted, t)
            if block_count == 4:
                t -= 4
                a, b, c, d = value[t], value[t + 1], value[t + 2], value[t + 3]
                deltas = (
                    reward[t] + gamma * b - a,
                    reward[t + 1] + gamma * c - b,
                    reward[t + 2] + gamma * d - c,
                    reward[t + 3] + gamma * following - d,
                )
                p, q, r, s = four_steps(*deltas, decay, ahead)
                advantage[t], advantage[t + 1], advantage[t + 2], advantage[t + 3] = p, q, r, s
                target[t], target[t + 1], target[t + 2], target[t + 3] = p + a, q + b, r + c, s + d
                ahead, following = p, np.float64(a)
            elif block_count == 0:
                t -= 4
                advantage[t] = advantage[t + 1] = advantage[t + 2] = advantage[t + 3] = 0
                target[t] = target[t + 1] = target[t + 2] = target[t + 3] = 0
            else:
                t -= 1
                if counted[t]:
                    v = np.float64(value[t])
                    ahead = (reward[t] + gamma * following - v) + decay * ahead
                    following = v
                    advantage[t] = ahead
                    target[t] = ahead + v
                else:
                    advantage[t] = 0
                    target[t] = 0


@kernel
def vtrace(
    rewards, values, log_ratio, mask, offsets, gamma, lam, rho_clip, pg_rho_clip, alpha, advantages, targets
):
    """V-trace; see `estimators.vtrace`."""
    for row in range(len(offsets) - 1):
        error = following = 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if not mask[t]:
                advantages[t] = 0
                targets[t] = 0
                continue
            rho = math.exp(min(max(np.float64(log_ratio[t]), -20.0), 20.0))
            clipped, cut = min(rho_clip, rho), min(1.0, rho)
            if alpha != 1:
                clipped, cut = (1 - alpha) * rho + alpha * clipped, (1 - alpha) * rho + alpha * cut
            v = np.float64(values[t])
            advantages[t] = min(pg_rho_clip, rho) * (rewards[t] + gamma * (following + lam * error) - v)
            error = clipped * (rewards[t] + gamma * following - v) + gamma * lam * cut * error
            following = v
            targets[t] = v + error


@kernel
def turn_returns(rewards, mask, offsets, gamma, result):
    """Returns over turns; see `turns.turn_returns`."""
    for row in range(len(offsets) - 1):
        ahead = 0.0
        inside = False
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if mask[t] and not inside:
                ahead = rewards[t] + gamma * ahead
            inside = mask[t]
            result[t] = ahead if inside else 0


@kernel
def turn_mean(values, mask, offsets, result):
    """The mean over a turn, on all its tokens; see `turns.turn_mean`."""
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        while start < end:
            stop, total = start, 0.0
            while stop < end and mask[stop]:
                total += values[stop]
                stop += 1
            for t in range(start, stop):
                result[t] = total / (stop - start)
            if stop < end:
                result[stop] = 0
            start = stop + 1


@kernel
def rescale(values, centre, factor, offset, result):
    """result = (values - centre) * factor + offset."""
    for t in range(len(values)):
        result[t] = (values[t] - centre) * factor + offset


@kernel
def rescale_masked(values, mask, centre, factor, offset, result):
    """`rescale`, 0 at tokens that do not count."""
    for t in range(len(values)):
        scaled = (values[t] - centre) * factor + offset
        result[t] = scaled if mask[t] else 0.0


@kernel
def has_values_outside(values, mask):
    """Whether a token that does not count has a value other than 0."""
    outside = False
    for t in range(len(values)):
        outside |= (values[t] != 0) & (not mask[t])
    return outside


@kernel
def statistics(values, mask):
    """Of the elements that count, and whether another one is not 0; see `whitening.Summary`.

    In LANES lanes, which the processor works on side by side: in one lane each addition waits for the one before.
    """
    first, end = 0, len(values)
    while first < end and not mask[first]:
        first += 1
    if first == end:
        return 0, 0.0, 0.0, -math.inf, math.inf, has_values_outside(values, mask)
    pivot = values[first]  # distances from it, so that equal values give exactly 0
    above, squares = np.zeros(LANES), np.zeros(LANES)
    greatest, least = np.full(LANES, pivot), np.full(LANES, pivot)
    count, is_stray = 0, False
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
        is_stray |= has_values_outside(value, counted)
    total = above.sum()
    spread = max(squares.sum() - total * total / count, 0.0)
    return count, pivot + total / count, spread, np.float64(greatest.max()), np.float64(least.min()), is_stray


@kernel
def copy_masked(values, mask, result):
    """`values` at tokens that count, 0 elsewhere."""
    for t in range(len(values)):
        result[t] = values[t] if mask[t] else 0


@kernel
def spread_rows(values, mask, offsets, result):
    """The row's value where its `mask`, of any dtype, is not 0; returns whether all of `mask` is 0 or 1."""
    # Numbers of one width, so that the loop vectorises well.
    zero, one, nothing, wrong = mask.dtype.type(0), mask.dtype.type(1), np.float32(0), np.int32(0)
    for row in range(len(offsets) - 1):
        counted, spread = mask[offsets[row] : offsets[row + 1]], result[offsets[row] : offsets[row + 1]]
        value = np.float32(values[row])
        for t in range(len(counted)):
            spread[t] = value if counted[t] != zero else nothing
            wrong |= np.int32((one if counted[t] != zero else zero) != counted[t])
    return wrong == 0


@kernel
def nonzero(values, result):
    """result [N] bool: where `values` differ from 0; returns whether all are 0 or 1."""
    are_flags = True
    for t in range(len(values)):
        result[t] = values[t] != 0
        are_flags &= (values[t] == 0) | (values[t] == 1)
    return are_flags
