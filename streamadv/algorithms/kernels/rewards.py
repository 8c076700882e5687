"""Compiled loops over rewards and what is taken off them, on a CPU; conventions as in `kernels`."""

from __future__ import annotations

import math

import numpy as np

from . import kernel


@kernel
def place(rewards, start, end, mask, result):
    """Each reward added at the last token that counts in start .. end, if there is one; 0 elsewhere."""
    result[:] = 0
    place, total = -1, 0.0
    for k in range(len(rewards)):
        for t in range(end[k] - 1, start[k] - 1, -1):
            if mask[t]:
                total = rewards[k] + (total if t == place else result[t])  # rounded once for neighbours
                place = t
                result[t] = total
                break


@kernel
def credit(rewards, mask, offsets, result):
    """Rewards at tokens that do not count are added to the one that counts before them; NaN there is no reward."""
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
def k3(log_probs, ref_log_probs, result):
    """exp(x) - 1 - x, x = ref_log_probs - log_probs; held in as `kl.approx_kl` does."""
    for t in range(len(result)):
        apart = np.float64(ref_log_probs[t] - log_probs[t])
        x = 20.0 if apart > 20 else -20.0 if apart < -20 else apart  # NaN stays NaN
        # exp - 1 by its series at x / 16, then doubled four times: no branch and no call, so several tokens at once
        y = x / 16
        e = y + y * y * (1 / 2 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y / 720))))
        for _ in range(4):
            e *= e + 2
        kl = e - x
        result[t] = 10.0 if kl > 10 else kl


@kernel
def charge(values, amounts, factor, mask, offsets, result, sums):
    """result = values - factor * amounts at tokens that count, values elsewhere; sums [R] of the amounts there."""
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        value, amount = values[start:end], amounts[start:end]
        counted, less = mask[start:end], result[start:end]
        total = 0.0
        for t in range(len(counted)):
            if counted[t]:
                total += amount[t]
                less[t] = value[t] - factor * amount[t]
            else:
                less[t] = value[t]
        sums[row] = total


@kernel
def even_sum(values):
    """The sum of `values`, in four parts side by side: one sum would wait for each addition."""
    a = b = c = d = 0.0
    end = len(values) - len(values) % 4
    for t in range(0, end, 4):
        a += values[t]
        b += values[t + 1]
        c += values[t + 2]
        d += values[t + 3]
    for t in range(end, len(values)):
        a += values[t]
    return (a + b) + (c + d)


@kernel
def row_rewards(rewards, mask, sums):
    """sums [B] float64: the sum of each row of `rewards` [B, T]; NaN is none where nothing counts."""
    for row in range(len(rewards)):
        reward = rewards[row]
        whole = len(reward) - len(reward) % 128
        total = even_sum(reward[whole:])
        for first in range(0, whole, 128):
            block = reward[first : first + 128]
            given = np.int32(0)  # as wide as the rewards: more of them at once
            for t in range(128):
                given += np.int32(block[t] != 0)
            if given:  # most rewards are 0
                total += even_sum(block)
        if math.isnan(total):
            total = 0.0
            for t in range(len(reward)):
                if mask[row, t] != 0 or not math.isnan(reward[t]):
                    total += reward[t]
        sums[row] = total
