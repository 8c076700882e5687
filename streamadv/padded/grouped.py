"""Outcome estimators on padded tensors, under verl's names: [B, T] in, (advantages, returns) [B, T] float32 out.

A row's reward is the sum of its token rewards, and its advantage follows from those of its group; both results are the
same. `index` and `peer_quirks` as in `estimators`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..algorithms import kernels
from ..algorithms.arguments import (
    GREATEST,
    Call,
    Flags,
    Labels,
    Mask,
    NotNegative,
    Positive,
    TokenRewards,
    Values,
    not_a_mask,
)
from ..algorithms.estimators.singleton import Singleton
from ..algorithms.quirks import PeerQuirks
from ..algorithms.registry import get_estimator
from ..algorithms.token_rewards import row_rewards
from ..algorithms.trainable import spread_rows
from .entrance import check_numbers, checked_while_read, unchecked
from .estimators import Pair
from .layout import as_batch, ungrouped
from .rewards import group_mean_std, group_scores

#: Estimators that read how many trainable tokens a row has.
COUNTING: Final = frozenset({"opo", "reinforce_plus_plus_baseline"})


@checked_while_read
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


@checked_while_read
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
        _check_tokens(token_level_rewards, response_mask)
        scores = token_level_rewards.nan_to_num().sum(1)
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


@checked_while_read
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


@checked_while_read
def compute_rloo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """r minus the mean of the group's other rows; a group of one gives 0 (verl's rloo: its reward, vectorized: 0)."""
    return _outcome("rloo", token_level_rewards, response_mask, index, singleton=_singleton(peer_quirks))


@checked_while_read
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


@checked_while_read
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


@checked_while_read
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


@checked_while_read
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


def _outcome(
    name: str,
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    **options: object,
) -> Pair:
    """An outcome estimator over row sums of the rewards, spread over trainable tokens.

    It reads both arrays once, and checks them meanwhile.
    """
    scores = row_rewards(token_level_rewards, response_mask)
    if kernels.on_cpu(scores) and not abs(scores.sum().item()) <= GREATEST:
        _check_tokens(token_level_rewards, response_mask)
    batch, order = as_batch(response_mask, rewards=scores, index=index, counted=name in COUNTING)
    rows = get_estimator(name).function(batch, **options).advantages
    advantages, are_flags = spread_rows(ungrouped(rows, order), response_mask.reshape(-1), batch.cu_seqlens)
    if not are_flags:
        raise not_a_mask("response_mask")
    advantages = advantages.view(response_mask.shape)
    return advantages, advantages


def _check_tokens(token_level_rewards: Tensor, response_mask: Tensor) -> None:
    """The checks of the door, one after the other. Raises ArgumentError."""
    call = Call()
    Flags(("B", "T")).take("response_mask", response_mask, call)
    Values(("B", "T"), spills=True).take("token_level_rewards", token_level_rewards, call)
    check_numbers(call)


def _singleton(peer_quirks: PeerQuirks | None) -> Singleton:
    return "raw" if peer_quirks else "zero"
