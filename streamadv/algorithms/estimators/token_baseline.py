"""Optimal token baseline: the variance-minimal baseline at every position of a group's responses.

As in verl's optimal_token_baseline and tir_optimal_token_baseline: samples weigh by the accumulated squared
norm of the score function, w_t = 1 - 2 pi(a_t) + sum_a pi(a)^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed import PackedBatch, offsets_of
from ..registry import Estimate, estimator
from ..scan import reverse_scan
from ..segments import keyed_sum, segment_max, segment_sum, spread
from ..trainable import Trainable, trainable

NEEDS = ("response_mask", "token_level_rewards", "old_log_probs", "sum_pi_squared")


@estimator("optimal_token_baseline", scope="group", level="token", needs=NEEDS)
def optimal_token_baseline(batch: PackedBatch, *, handle_zero_tail: bool = True) -> Estimate:
    """A_t = G_t - b_t with b_t = sum_g(G_t W_t) / sum_g(W_t), W_t = w_1 + .. + w_t (importance-weighted).

    G_t is the undiscounted return from t on; t counts trainable tokens of a row, so turns of different
    samples line up whatever observations lie between (verl: the tir variant). The sums run over the rows of
    the group that reach position t. With the column rollout_is_weights each w_t is multiplied by its
    square. A group of one row has baseline 0. handle_zero_tail: where only the longest row is left, its
    baseline would be its own return, so it is 0 there.
    """
    tokens = trainable(batch)
    return baseline_scan(batch, tokens, _rank(tokens), handle_zero_tail)


def baseline_scan(
    batch: PackedBatch, tokens: Trainable, position: Tensor, handle_zero_tail: bool
) -> Estimate:
    """The estimate with tokens of a group compared at equal `position`, [K] int64 like the result."""
    row = spread(torch.arange(batch.num_rows, device=position.device), tokens.offsets, len(position))
    group = batch.trajectory_group[batch.row_trajectory]
    cut = tokens.blocks
    returns = reverse_scan(batch.column("token_level_rewards"), 1.0, cut)
    weight = 1 - 2 * tokens.pick(batch.column("old_log_probs")).double().exp_()
    weight += tokens.pick(batch.column("sum_pi_squared"))
    if "rollout_is_weights" in batch.columns:
        weight *= tokens.pick(batch.column("rollout_is_weights")).double().square()
    later = reverse_scan(tokens.spread(weight), 1.0, cut)
    total = segment_sum(weight, tokens.offsets)
    accumulated = total[row] - later + weight  # from the row's start up to t

    row_offsets = offsets_of(group, batch.num_groups)
    # Every group has as many keys as its positions go.
    row_reach = segment_max(position, tokens.offsets) + 1
    width = segment_max(row_reach, row_offsets).clamp(min=0).to(torch.int64)
    key = (torch.cumsum(width, 0) - width)[group[row]] + position
    size = int(width.sum())
    numerator = keyed_sum(returns * accumulated, key, size)
    denominator = keyed_sum(accumulated, key, size)
    baseline = (numerator / (denominator + 1e-8))[key]

    rows_in_group = (row_offsets[1:] - row_offsets[:-1])[group]
    without = (rows_in_group < 2)[row]
    if handle_zero_tail:
        without = without | _zero_tail(tokens, row_offsets, position, row)
    advantages = returns - baseline.masked_fill_(without, 0)
    return Estimate("token", advantages, returns)


def _rank(tokens: Trainable) -> Tensor:
    """[K] int64: how many trainable tokens of its row come before each."""
    count = len(tokens.position)
    number = torch.arange(count, device=tokens.position.device)
    return number - spread(tokens.offsets[:-1], tokens.offsets, count)


def _zero_tail(tokens: Trainable, row_offsets: Tensor, position: Tensor, row: Tensor) -> Tensor:
    """[K] bool: tokens of a group's longest row past the end of its second longest."""
    lengths = tokens.counts.double()
    size = len(lengths)
    longest = spread(segment_max(lengths, row_offsets), row_offsets, size)
    is_longest = lengths == longest
    ties = spread(segment_sum(is_longest, row_offsets), row_offsets, size)
    shorter = torch.where(is_longest, -torch.inf, lengths)
    second = spread(segment_max(shorter, row_offsets), row_offsets, size)
    limit = torch.where(is_longest & (ties == 1), second.clamp(min=0), torch.inf)
    return position >= limit[row]
