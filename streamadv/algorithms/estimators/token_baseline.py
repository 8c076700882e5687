"""Optimal token baseline: the variance-minimal baseline at every position of a group's responses.

As in verl's optimal_token_baseline and tir_optimal_token_baseline: samples weigh by the accumulated squared
norm of the score function, w_t = 1 - 2 pi(a_t) + sum_a pi(a)^2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...extras import torch
from ..packed import PackedBatch, offsets_of
from ..registry import Estimate, NotNegative, estimator
from ..scan import reverse_scan
from ..segments import keyed_sum, segment_max, segment_min, segment_sum, spread
from ..trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = ("response_mask", "token_level_rewards", "old_log_probs", "sum_pi_squared")


@estimator("optimal_token_baseline", scope="group", level="token", needs=NEEDS)
def optimal_token_baseline(
    batch: PackedBatch,
    *,
    compare: Literal["tokens", "columns"] = "tokens",
    handle_zero_tail: bool = True,
    epsilon: NotNegative = 1e-8,
) -> Estimate:
    """A_t = G_t - b_t, b_t = sum_g(G_t W_t) / (sum_g(W_t) + epsilon), W_t = w_1 + .. + w_t.

    G_t is the undiscounted return from t on. The sums run over the rows of the group with a trainable token at t. If
    the batch has the column rollout_is_weights, w_t is multiplied by its square. A row alone in its group has
    baseline 0.

    Args:
      batch: with response_mask, token_level_rewards, old_log_probs, sum_pi_squared [N].
      compare: what t counts. "tokens": trainable tokens of a row, so turns of different rows line up whatever
        observations are between them (verl: the tir variant). "columns": all tokens of the response (verl's
        optimal_token_baseline), see `response_columns`.
      handle_zero_tail: baseline 0 where only the longest row has tokens left, because it would be the row's return. A
        row's length is its number of trainable tokens.

    Returns:
      Advantages and returns [N] float32. With "tokens" a row without trainable tokens does not keep another row from
      being alone in its group; with "columns" it does, as in verl.
    """
    tokens = batch.trainable_tokens
    if compare == "columns":
        company = (~batch.baseline)[batch.row_trajectory]
        return baseline_scan(batch, tokens, response_columns(batch), company, handle_zero_tail, epsilon)
    counts = tokens.counts
    before = torch.cumsum(counts, 0) - counts  # in the rows above
    ranks = torch.cumsum(tokens.mask, 0) - tokens.mask.to(torch.int64)
    ranks -= spread(before, tokens.offsets, batch.num_tokens)
    return baseline_scan(batch, tokens, ranks, counts > 0, handle_zero_tail, epsilon)


def response_columns(batch: PackedBatch) -> Tensor:
    """[N] int64: the index of a token in its row's response, 0 in the prompt.

    A response begins at the row's first trainable token in the mask as pushed, so a step of the chain that narrows the
    mask moves no column. If a row of the group begins with a trainable token, the group has no prompts.
    """
    mask = batch.column("response_mask") if batch.given_mask is None else batch.given_mask
    offsets, size = batch.cu_seqlens, batch.num_tokens
    index = torch.arange(size, device=batch.device) - spread(offsets[:-1], offsets, size)
    first = segment_min(torch.where(mask != 0, index, torch.inf), offsets)
    group = batch.trajectory_group[batch.row_trajectory]
    least = segment_min(first, offsets_of(group, batch.num_groups))[group]
    start = torch.where((least > 0) & first.isfinite(), first, 0.0).to(torch.int64)
    return (index - spread(start, offsets, size)).clamp(min=0)


def baseline_scan(
    batch: PackedBatch,
    tokens: Trainable,
    position: Tensor,
    compared: Tensor,
    handle_zero_tail: bool,
    epsilon: float,
) -> Estimate:
    """The estimate with tokens of a group compared at equal `position`.

    position [N] int64, below the row's length; compared [R] bool: rows that keep another from being alone in its group.
    """
    row, size = batch.token_row, batch.num_tokens
    group = batch.trajectory_group[batch.row_trajectory]
    returns = reverse_scan(batch.column("token_level_rewards").to(torch.float64), 1.0, tokens)
    weight = 1 - 2 * batch.column("old_log_probs").double().exp_()
    weight += batch.column("sum_pi_squared")
    if "rollout_is_weights" in batch.columns:
        weight *= batch.column("rollout_is_weights").double().square()
    weight = tokens.only(weight)
    later = reverse_scan(weight, 1.0, tokens)
    accumulated = tokens.only(tokens.row_sum(weight)[row] - later + weight)  # from the row's start up to t

    row_offsets = offsets_of(group, batch.num_groups)
    # A group gets as many keys as its rows have tokens: positions fit, and no device has to count them.
    key = batch.cu_seqlens[row_offsets[:-1]][group[row]] + position
    numerator = keyed_sum(returns * accumulated, key, size)
    denominator = keyed_sum(accumulated, key, size)
    baseline = (numerator / (denominator + epsilon))[key]

    rows_in_group = segment_sum(compared, row_offsets)[group]
    without = (rows_in_group < 2)[row]
    if handle_zero_tail:
        without = without | _zero_tail(tokens, row_offsets, position, row)
    advantages = tokens.only(returns - baseline.masked_fill_(without, 0))
    return Estimate("token", advantages.to(torch.float32), returns.to(torch.float32))


def _zero_tail(tokens: Trainable, row_offsets: Tensor, position: Tensor, row: Tensor) -> Tensor:
    """[N] bool: tokens of a group's longest row past the end of its second longest."""
    lengths = tokens.counts.double()
    size = len(lengths)
    longest = spread(segment_max(lengths, row_offsets), row_offsets, size)
    is_longest = lengths == longest
    ties = spread(segment_sum(is_longest, row_offsets), row_offsets, size)
    shorter = torch.where(is_longest, -torch.inf, lengths)
    second = spread(segment_max(shorter, row_offsets), row_offsets, size)
    limit = torch.where(is_longest & (ties == 1), second.clamp(min=0), torch.inf)
    return position >= limit[row]
