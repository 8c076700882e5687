"""Estimators over tokens: returns, values, and baselines for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ...extras import torch
from .. import kernels
from ..packed import PackedBatch, offsets_of
from ..registry import Estimate, NotNegative, Positive, Share, estimator
from ..scan import reverse_scan, scan_blocks, upcoming
from ..segments import Trainable, keyed_sum, segment_max, segment_min, segment_sum, spread

if TYPE_CHECKING:
    from torch import Tensor


@estimator("gae", scope="row", level="token", needs=("response_mask", "values", "token_level_rewards"))
def gae(batch: PackedBatch, *, gamma: Share = 1.0, lam: Share = 0.95, mask_aware: bool = True) -> Estimate:
    """delta_t = R_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; returns A + V.

    Generalised advantage estimation, Schulman et al., arXiv:1506.02438, eq. 16.

    Args:
      batch: with response_mask, values and token_level_rewards [N].
      gamma: discount.
      lam: weight of longer returns, 0 .. 1.
      mask_aware: t runs over trainable tokens only (verl, AReaL). False lets t run over all tokens, so the last action
        bootstraps from the value of an observation or padding token (ROLL, SkyRL, slime).

    Returns:
      Advantages and returns [N] float32. The value after a row's last token is 0.
    """
    tokens = batch.trainable_tokens if mask_aware else batch.all_tokens
    rewards, values = batch.column("token_level_rewards"), batch.column("values")
    return Estimate("token", *vtrace_scan(rewards, values, None, tokens, gamma, lam=lam))


VTRACE_NEEDS = ("response_mask", "values", "token_level_rewards", "old_log_probs", "rollout_log_probs")


@estimator("vtrace", scope="row", level="token", needs=VTRACE_NEEDS)
def vtrace(
    batch: PackedBatch,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    rho_clip: Positive = 1.0,
    pg_rho_clip: Positive = 1.0,
    alpha: float = 1.0,
) -> Estimate:
    """e_t = rho'_t (R_t + gamma V_{t+1} - V_t) + gamma c_t e_{t+1}; returns vs_t = V_t + e_t.

    Values and advantages corrected for data from another policy, Espeholt et al., arXiv:1802.01561.

    A_t = min(pg_rho_clip, rho_t) (R_t + gamma (lam vs_{t+1} + (1 - lam) V_{t+1}) - V_t), with rho_t = pi_old /
    pi_rollout, rho'_t = min(rho_clip, rho_t), c_t = lam * min(1, rho_t). t runs over trainable tokens; the value after
    the last one is 0. The log-ratio is held in -20 .. 20.

    Args:
      batch: with response_mask, values, token_level_rewards, old_log_probs, rollout_log_probs [N].
      rho_clip: bound of the ratio in the value target.
      pg_rho_clip: bound of the ratio in the advantage.
      alpha: below 1 is leaky V-trace: every min(x, rho) in e_t becomes (1 - alpha) rho + alpha min(x, rho).

    Returns:
      Advantages and returns [N] float32.
    """
    advantages, returns = vtrace_scan(
        batch.column("token_level_rewards"),
        batch.column("values"),
        batch.column("old_log_probs") - batch.column("rollout_log_probs"),
        batch.trainable_tokens,
        gamma,
        lam=lam,
        rho_clip=rho_clip,
        pg_rho_clip=pg_rho_clip,
        alpha=alpha,
    )
    return Estimate("token", advantages, returns)


def vtrace_scan(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor | None,
    tokens: Trainable,
    gamma: float,
    *,
    lam: float,
    rho_clip: float = 1.0,
    pg_rho_clip: float = 1.0,
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [N] float32: V-trace of columns [N] over the tokens that count, 0 elsewhere.

    log_ratio None: all ratios are 1, as of data from the policy itself, which is GAE.
    """
    if kernels.on_cpu(values):
        columns = map(kernels.as_array, (rewards, values))
        ratios = None if log_ratio is None else kernels.as_array(log_ratio)
        options = map(float, (gamma, lam, rho_clip, pg_rho_clip, alpha))
        results = [np.empty(len(values), np.float32) for _ in range(2)]
        kernels.vtrace(*columns, ratios, *map(kernels.as_array, tokens), *options, *results)
        return torch.from_numpy(results[0]), torch.from_numpy(results[1])
    v_t = values.to(torch.float64)
    rho = torch.ones_like(v_t) if log_ratio is None else log_ratio.to(torch.float64).clamp(-20, 20).exp()
    bootstrap = upcoming(v_t, tokens)
    e_t = vtrace_errors(rewards, v_t, bootstrap, rho, gamma, tokens, lam=lam, rho_clip=rho_clip, alpha=alpha)
    target = bootstrap + lam * upcoming(e_t, tokens)
    a_t = rho.clamp(max=pg_rho_clip) * (rewards + gamma * target - v_t)
    return tokens.only(a_t).to(torch.float32), tokens.only(e_t + v_t).to(torch.float32)


def vtrace_errors(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    rho: Tensor,
    discount: Tensor | float,
    tokens: Trainable,
    *,
    lam: float,
    rho_clip: float,
    alpha: float = 1.0,
) -> Tensor:
    """e_t = vs_t - V_t [N] float64, in torch; a token that does not count takes the e of the next one that does."""
    clipped, cut = ((1 - alpha) * rho + alpha * rho.clamp(max=limit) for limit in (rho_clip, 1.0))
    delta = clipped * (rewards + discount * next_values - values)
    return scan_blocks(delta, discount * lam * cut, tokens)


BASELINE_NEEDS = ("response_mask", "token_level_rewards", "old_log_probs", "sum_pi_squared")


@estimator("optimal_token_baseline", scope="group", level="token", needs=BASELINE_NEEDS)
def optimal_token_baseline(
    batch: PackedBatch,
    *,
    compare: Literal["tokens", "columns"] = "tokens",
    handle_zero_tail: bool = True,
    epsilon: NotNegative = 1e-8,
) -> Estimate:
    """A_t = G_t - b_t, b_t = sum_g(G_t W_t) / (sum_g(W_t) + epsilon), W_t = w_1 + .. + w_t.

    The variance-minimal baseline, as in verl's optimal_token_baseline and tir_optimal_token_baseline: samples weigh by
    the accumulated squared norm of the score function, w_t = 1 - 2 pi(a_t) + sum_a pi(a)^2.

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
