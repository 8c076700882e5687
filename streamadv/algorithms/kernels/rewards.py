"""Compiled loops over rewards and the KL, on a CPU; conventions as in `kernels`."""

from __future__ import annotations

import math

import numpy as np

from .compiler import kernel
from .tokens import LANES


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

    sums [R]: of a row. In lanes, as `tokens.statistics`. result: `rewards` plus `factor` times it; None = it alone.
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


@kernel
def even_sum(values):
    """The sum of `values`, in four partial sums that the processor adds side by side."""
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
def row_rewards(rewards, bits, mask, sums):
    """sums [B] float64: row sums of `rewards` [B, T]; a NaN outside the mask is no reward. `bits`: of the rewards."""
    for row in range(len(rewards)):
        reward, bit = rewards[row], bits[row]
        whole = len(reward) - len(reward) % 128
        total = even_sum(reward[whole:])
        for first in range(0, whole, 128):
            block = bit[first : first + 128]
            nonzero = block[0]
            for t in range(128):
                nonzero |= block[t]
            if nonzero != 0:  # most rewards are 0
                total += even_sum(reward[first : first + 128])
        if math.isnan(total):
            total = 0.0
            for t in range(len(reward)):
                if mask[row, t] != 0 or not math.isnan(reward[t]):
                    total += reward[t]
        sums[row] = total
