"""Optimal token baseline: the variance-minimal baseline at every position of a group's responses.

As in verl's optimal_token_baseline and tir_optimal_token_baseline: samples weigh by the accumulated squared
norm of the score function, w_t = 1 - 2 pi(a_t) + sum_a pi(a)^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import blocks, reverse_scan
from ..segments import segment_max, segment_sum, spread

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
    mask = batch.column("response_mask")
    before = torch.cumsum(mask.to(torch.int64), 0)
    start = torch.cat([before.new_zeros(1), before])[batch.cu_seqlens[:-1]]
    position = before - 1 - start[batch.token_row]
    return baseline_scan(batch, position, handle_zero_tail)


def baseline_scan(
    batch: PackedBatch, position: Tensor, handle_zero_tail: bool, tail_position: Tensor | None = None
) -> Estimate:
    """The estimate with tokens of a group compared at equal `position` [N] int64.

    tail_position: what is held against row lengths for the zero tail; None = `position`.
    """
    mask = batch.column("response_mask").bool()
    row = batch.token_row
    group = batch.trajectory_group[batch.row_trajectory]
    cut = blocks(batch.cu_seqlens, batch.num_tokens)
    rewards = torch.where(mask, batch.column("token_level_rewards"), 0.0)
    returns = reverse_scan(rewards, 1.0, cut)
    weight = 1 - 2 * batch.column("old_log_probs").double().exp() + batch.column("sum_pi_squared")
    if "rollout_is_weights" in batch.columns:
        weight = weight * batch.column("rollout_is_weights").double().square()
    weight = torch.where(mask, weight, 0.0)
    total = segment_sum(weight, batch.cu_seqlens)
    later = reverse_scan(weight, 1.0, cut)
    accumulated = torch.where(mask, total[row] - later + weight, 0.0)  # from the row's start up to t

    order = torch.argsort(position, stable=True)
    order = order[torch.argsort(group[row][order], stable=True)]
    owner, place = group[row][order], position[order]
    begins = torch.ones(len(order), dtype=torch.bool, device=order.device)
    begins[1:] = (owner[1:] != owner[:-1]) | (place[1:] != place[:-1])
    offsets = torch.searchsorted(
        torch.cumsum(begins, 0) - 1, torch.arange(len(order) + 1, device=order.device)
    )
    numerator = segment_sum((returns * accumulated)[order], offsets)
    denominator = segment_sum(accumulated[order], offsets)
    sorted_baseline = spread(numerator / (denominator + 1e-8), offsets, len(order))
    baseline = torch.empty_like(returns).scatter(0, order, sorted_baseline)

    row_offsets = torch.searchsorted(group, torch.arange(batch.num_groups + 1, device=group.device))
    rows_in_group = (row_offsets[1:] - row_offsets[:-1])[group]
    baseline = torch.where((rows_in_group > 1)[row], baseline, 0.0)
    if handle_zero_tail:
        baseline = torch.where(_zero_tail(batch, row_offsets, position, tail_position), 0.0, baseline)
    return Estimate("token", torch.where(mask, returns - baseline, 0.0), returns)


def _zero_tail(batch: PackedBatch, row_offsets: Tensor, position: Tensor, tail: Tensor | None) -> Tensor:
    """[N] bool: tokens of a group's longest row past the end of its second longest."""
    lengths = batch.row_trainable.double()
    size = len(lengths)
    longest = spread(segment_max(lengths, row_offsets), row_offsets, size)
    is_longest = lengths == longest
    ties = spread(segment_sum(is_longest, row_offsets), row_offsets, size)
    second = spread(segment_max(torch.where(is_longest, -torch.inf, lengths), row_offsets), row_offsets, size)
    limit = torch.where(is_longest & (ties == 1), second.clamp(min=0), torch.inf)
    return (position if tail is None else tail) >= limit[batch.token_row]
