"""Estimators on padded tensors, under verl's names: [B, T] in, (advantages, returns) [B, T] float32 out.

Column t of every array is the same token. `index` holds one label per row; equal labels are one prompt group, in any
order. `peer_quirks="verl"` reproduces verl 0.9.1 where it differs from streamadv, "verl-2026-01" verl of January 2026;
the docstrings name the differences, and docs/estimators.md lists them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..algorithms.arguments import Labels, Mask, NotNegative, Positive, Rows, Share, TokenRewards, Tokens
from ..algorithms.estimators.gae import gae_scan
from ..algorithms.estimators.singleton import Singleton
from ..algorithms.estimators.token_baseline import baseline_scan, optimal_token_baseline
from ..algorithms.packed import PackedBatch
from ..algorithms.quirks import PeerQuirks
from ..algorithms.registry import Estimate, get_estimator
from ..algorithms.scan import reverse_scan
from ..algorithms.token_rewards import credited, row_rewards
from ..algorithms.trainable import spread_rows
from ..algorithms.whitening import whiten
from .entrance import checked, unchecked
from .layout import as_batch, to_padded
from .rewards import group_mean_std, group_scores
from .token_rewards import finite_rewards

Pair = tuple[Tensor, Tensor]
#: Outcome estimators that read how many trainable tokens a row has.
COUNTING: Final = frozenset({"opo", "reinforce_plus_plus_baseline"})


@checked
def compute_gae_advantage_return(
    token_level_rewards: TokenRewards,
    values: Tokens,
    response_mask: Mask,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """GAE over trainable tokens, advantages whitened over the batch; see `algorithms.estimators.gae`.

    Rewards on masked tokens move to the action before, and both results are 0 there. verl loses such rewards and leaves
    carried-over values outside the mask.
    """
    batch = _token_batch(response_mask, token_level_rewards, peer_quirks, values=values)
    tokens, value = batch.trainable_tokens, batch.column("values")
    advantages, returns = gae_scan(batch.column("token_level_rewards"), value, tokens, gamma, lam)
    if peer_quirks:  # a masked token takes over what the next action has
        carried = reverse_scan(advantages, (~tokens.mask).to(torch.float32), batch.all_tokens)
        advantages, returns = whiten(carried, tokens, everywhere=True), carried + value
    else:
        advantages = whiten(advantages, tokens)
    return advantages.view(response_mask.shape), returns.view(response_mask.shape)


@checked
def compute_grpo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    epsilon: NotNegative = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """(r - mean(group)) / (std(group) + epsilon) on trainable tokens, r = sum of a row's rewards, std with ddof 1.

    A group of one gives 0 (verl: its reward). norm_adv_by_std_in_grpo False is Dr.GRPO: r - mean(group).
    """
    return _outcome(
        "grpo",
        token_level_rewards,
        response_mask,
        index,
        norm_by_std=norm_adv_by_std_in_grpo,
        epsilon=epsilon,
        singleton=_singleton(peer_quirks),
    )


@checked
def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    epsilon: NotNegative = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """As `compute_grpo_outcome_advantage`, with a std of at least sqrt(epsilon).

    verl has no such bound. verl of January 2026 has it, with mean and std of `group_mean_std` with its peer_quirks.
    """
    if peer_quirks == "verl-2026-01":
        scores = finite_rewards(token_level_rewards, response_mask).sum(1)
        mean, std, _ = unchecked(group_mean_std)(scores, index, epsilon, peer_quirks=peer_quirks)
        rows = (scores - mean) / (std + epsilon) if norm_adv_by_std_in_grpo else scores - mean
        advantages = rows[:, None] * response_mask
        return advantages, advantages
    return _outcome(
        "grpo",
        token_level_rewards,
        response_mask,
        index,
        norm_by_std=norm_adv_by_std_in_grpo,
        epsilon=epsilon,
        least_std=0.0 if peer_quirks else epsilon**0.5,
        singleton=_singleton(peer_quirks),
    )


@checked
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    epsilon: NotNegative = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> Pair:
    """(r_best - r_second) / (std(group) + epsilon) for a group's best row; 0 for others and alone (verl raises)."""
    return _outcome(
        "grpo_passk",
        token_level_rewards,
        response_mask,
        index,
        norm_by_std=norm_adv_by_std_in_grpo,
        epsilon=epsilon,
    )


@checked
def compute_rloo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """r minus the mean of the group's other rows; a group of one gives 0 (verl's rloo: its reward, vectorized: 0)."""
    return _outcome("rloo", token_level_rewards, response_mask, index, singleton=_singleton(peer_quirks))


@checked
def compute_opo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """r minus the group's length-weighted mean reward.

    A group of one gives 0 (verl: its reward), and so does a group without trainable tokens (verl: NaN).
    """
    advantages, returns = _outcome(
        "opo", token_level_rewards, response_mask, index, singleton=_singleton(peer_quirks)
    )
    if peer_quirks is None:
        return advantages, returns
    lengths, size = group_scores((response_mask != 0).sum(1), None, index)
    advantages = advantages.masked_fill(((lengths == 0) & (size > 1))[:, None], torch.nan)
    return advantages, advantages


@checked
def compute_gpg_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    f_norm: Positive = 1.0,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """alpha (r - mean(group)) / f_norm, alpha = B / rows with r != mean(group) (verl: rows with r != 0)."""
    return _outcome(
        "gpg",
        token_level_rewards,
        response_mask,
        index,
        f_norm=f_norm,
        counted="rewards" if peer_quirks else "advantages",
        singleton=_singleton(peer_quirks),
    )


@checked
def compute_maxrl_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    epsilon: NotNegative = 1e-6,
    *,
    negative_means: bool = False,
    singleton: Singleton = "zero",
) -> Pair:
    """(r - mean(group)) / (mean(group) + epsilon), 0 where the mean is not positive; negative_means divides (SkyRL)."""
    return _outcome(
        "maxrl",
        token_level_rewards,
        response_mask,
        index,
        epsilon=epsilon,
        negative_means=negative_means,
        singleton=singleton,
    )


@checked
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """r - mean(group) on trainable tokens, whitened over them; a group of one has 0 before whitening (verl: r)."""
    return _outcome(
        "reinforce_plus_plus_baseline",
        token_level_rewards,
        response_mask,
        index,
        singleton=_singleton(peer_quirks),
    )


@checked
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    gamma: Share = 1.0,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """Discounted returns over trainable tokens, whitened; returns unwhitened.

    verl loses rewards on masked tokens. verl of January 2026 sets the return to 0 at every masked token, so the reward
    reaches only a row's last turn.
    """
    batch = _token_batch(response_mask, token_level_rewards, peer_quirks)
    estimate = get_estimator("reinforce_plus_plus").function(
        batch, gamma=gamma, reset_at_observations=peer_quirks == "verl-2026-01"
    )
    assert estimate.returns is not None
    return estimate.advantages.view(response_mask.shape), estimate.returns.view(response_mask.shape)


@checked
def compute_remax_outcome_advantage(
    token_level_rewards: TokenRewards,
    reward_baselines: Rows,
    response_mask: Mask,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """The return from a token on, minus the row's `reward_baselines` [B]; 0 outside the mask (verl: not masked)."""
    batch = _token_batch(response_mask, token_level_rewards, peer_quirks)
    tokens, shape = batch.trainable_tokens, response_mask.shape
    rewards = tokens.only(batch.column("token_level_rewards"))
    returns = reverse_scan(rewards, 1.0, batch.all_tokens).view(shape)
    mask = tokens.mask.view(shape)
    advantages = returns - reward_baselines[:, None].to(torch.float32) * mask
    if peer_quirks is None:
        advantages, returns = _masked(advantages, mask), _masked(returns, mask)
    return advantages, returns


@checked
def compute_optimal_token_baseline_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    old_log_probs: Tokens,
    sum_pi_squared: Tokens,
    rollout_is_weights: Tokens | None = None,
    handle_zero_tail: bool | None = None,
    epsilon: Positive = 1e-8,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """The optimal token baseline, rows compared column by column; see `algorithms.estimators.token_baseline`.

    handle_zero_tail None is True (verl of January 2026: False).
    """
    if handle_zero_tail is None:
        handle_zero_tail = peer_quirks != "verl-2026-01"
    batch, order = _baseline_batch(
        token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights
    )
    column = torch.arange(response_mask.shape[1], device=response_mask.device).repeat(len(response_mask))
    everyone = torch.ones(batch.num_rows, dtype=torch.bool, device=response_mask.device)
    estimate = baseline_scan(batch, batch.trainable_tokens, column, everyone, handle_zero_tail, epsilon)
    return _token_baseline(estimate, batch, order, response_mask.shape)


@checked
def compute_tir_optimal_token_baseline_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    old_log_probs: Tokens,
    sum_pi_squared: Tokens,
    rollout_is_weights: Tokens | None = None,
    handle_zero_tail: bool = True,
    epsilon: Positive = 1e-8,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """The optimal token baseline, rows compared at equal numbers of trainable tokens."""
    batch, order = _baseline_batch(
        token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights
    )
    estimate = optimal_token_baseline(batch, handle_zero_tail=handle_zero_tail, epsilon=epsilon)
    return _token_baseline(estimate, batch, order, response_mask.shape)


def _token_baseline(estimate: Estimate, batch: PackedBatch, order: Tensor, shape: torch.Size) -> Pair:
    """Advantages on trainable tokens, and returns carried over to masked ones as in verl."""
    assert estimate.returns is not None
    rewards = batch.trainable_tokens.only(batch.column("token_level_rewards"))
    returns = reverse_scan(rewards, 1.0, batch.all_tokens)
    return to_padded(estimate.advantages, order, shape), to_padded(returns, order, shape)


def _outcome(
    name: str, token_level_rewards: TokenRewards, response_mask: Mask, index: Labels, **options: object
) -> Pair:
    """An outcome estimator over row sums of the rewards, spread over trainable tokens."""
    scores = row_rewards(token_level_rewards, response_mask)
    batch, order = as_batch(response_mask, rewards=scores, index=index, counted=name in COUNTING)
    rows = get_estimator(name).function(batch, **options).advantages
    rows = torch.empty_like(rows).index_copy_(0, order, rows)
    advantages = spread_rows(rows, response_mask.reshape(-1), batch.cu_seqlens)
    advantages = advantages.view(response_mask.shape)
    return advantages, advantages


def _token_batch(
    response_mask: Mask, token_level_rewards: TokenRewards, peer_quirks: PeerQuirks | None, **columns: Tensor
) -> PackedBatch:
    batch, _ = as_batch(response_mask, {"token_level_rewards": token_level_rewards, **columns})
    return batch if peer_quirks else batch.with_columns(token_level_rewards=credited(batch))


def _baseline_batch(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    old_log_probs: Tokens,
    sum_pi_squared: Tokens,
    rollout_is_weights: Tokens | None,
) -> tuple[PackedBatch, Tensor]:
    columns = {
        "token_level_rewards": token_level_rewards,
        "old_log_probs": old_log_probs,
        "sum_pi_squared": sum_pi_squared,
    }
    if rollout_is_weights is not None:
        columns["rollout_is_weights"] = rollout_is_weights
    return as_batch(response_mask, columns, index=index)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask != 0, values, 0.0)


def _singleton(peer_quirks: PeerQuirks | None) -> Singleton:
    return "raw" if peer_quirks else "zero"
