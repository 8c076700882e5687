"""Estimators on padded tensors, under verl's names: [B, T] in, (advantages, returns) [B, T] float32 out.

Column t of every array is the same token. `index` holds one label per row; equal labels are one prompt group, in any
order. `peer_quirks="verl"` reproduces verl 0.9.1 where it differs from streamadv, "verl-2026-01" verl of January 2026;
the docstrings name the differences, and docs/reference/estimators.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..algorithms.arguments import Labels, Mask, PeerQuirks, Positive, Rows, Share, TokenRewards, Tokens
from ..algorithms.estimators.tokens import BASELINE_NEEDS, baseline_scan, optimal_token_baseline, vtrace_scan
from ..algorithms.packed import PackedBatch
from ..algorithms.registry import get_estimator
from ..algorithms.rewards import credited
from ..algorithms.scan import reverse_scan
from ..algorithms.segments import whiten
from .entrance import checked
from .layout import as_batch, ungrouped

Pair = tuple[Tensor, Tensor]


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
    rewards = batch.column("token_level_rewards")
    advantages, returns = vtrace_scan(rewards, value, None, tokens, gamma, lam=lam)
    if peer_quirks:  # a masked token takes over what the next action has
        carried = reverse_scan(advantages, (~tokens.mask).to(torch.float32), batch.all_tokens)
        advantages, returns = whiten(carried, tokens, everywhere=True), carried + value
    else:
        advantages = whiten(advantages, tokens)
    return advantages.view(response_mask.shape), returns.view(response_mask.shape)


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
    advantages = returns - reward_baselines[:, None].to(torch.float32) * response_mask
    if peer_quirks is None:
        advantages, returns = (torch.where(response_mask, x, 0.0) for x in (advantages, returns))
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
    given = (token_level_rewards, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _token_baseline(response_mask, index, given, handle_zero_tail, epsilon, by_column=True)


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
    given = (token_level_rewards, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _token_baseline(response_mask, index, given, handle_zero_tail, epsilon, by_column=False)


def _token_baseline(
    mask: Tensor,
    index: Labels,
    given: Iterable[Tensor | None],
    handle_zero_tail: bool,
    epsilon: float,
    *,
    by_column: bool,
) -> Pair:
    """Advantages on trainable tokens, and returns carried over to masked ones as in verl.

    given: token_level_rewards, old_log_probs, sum_pi_squared and rollout_is_weights or None.
    """
    columns = dict(zip((*BASELINE_NEEDS[1:], "rollout_is_weights"), given, strict=True))
    batch, order = as_batch(mask, {n: each for n, each in columns.items() if each is not None}, index=index)
    tokens = batch.trainable_tokens
    if by_column:
        column = torch.arange(mask.shape[1], device=mask.device).repeat(len(mask))
        everyone = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
        estimate = baseline_scan(batch, tokens, column, everyone, handle_zero_tail, epsilon)
    else:
        estimate = optimal_token_baseline(batch, handle_zero_tail=handle_zero_tail, epsilon=epsilon)
    returns = reverse_scan(tokens.only(batch.column("token_level_rewards")), 1.0, batch.all_tokens)
    advantages, returns = (ungrouped(each.view(mask.shape), order) for each in (estimate.advantages, returns))
    return advantages, returns


def _token_batch(
    response_mask: Mask, token_level_rewards: TokenRewards, peer_quirks: PeerQuirks | None, **columns: Tensor
) -> PackedBatch:
    batch, _ = as_batch(response_mask, {"token_level_rewards": token_level_rewards, **columns})
    return batch if peer_quirks else batch.with_columns(token_level_rewards=credited(batch))
