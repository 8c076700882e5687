"""Loops over tokens, compiled by numba; conventions as in `kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...extras import load

njit = load("numba").njit
LANES: Final = 128


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call, to run without the GIL, and cache the result on disk."""
    compiled: Callable[..., Any]
    try:
        compiled = njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # no writable directory for the cache: every process compiles
        compiled = njit(function, nogil=True, error_model="numpy")
    return compiled


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
    """Returns over turns; see `scan.turn_returns`."""
    for row in range(len(offsets) - 1):
        ahead = 0.0
        inside = False
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if mask[t] and not inside:
                ahead = rewards[t] + gamma * ahead
            inside = mask[t]
            result[t] = ahead if inside else 0


@kernel
def statistics(values, mask):
    """Of the elements that count; see `whitening.Summary`.

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
def place(rewards, start, end, mask, result):
    """A reward is added at the last token that counts in start .. end, if the span has one; 0 elsewhere."""
    result[:] = 0
    last, total = -1, 0.0
    for k in range(len(rewards)):
        for t in range(end[k] - 1, start[k] - 1, -1):
            if mask[t]:
                # Successive rewards on one token are summed in float64 and rounded once.
                total = rewards[k] + (total if t == last else result[t])
                last = t
                result[t] = total
                break


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
