"""Advantages on padded tensors, under ROLL's name: rewards in, whitened and clipped advantages out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..algorithms.arguments import Call, Flags, Mask, Positive, Share, TokenRewards, Values
from ..algorithms.estimators.gae import gae_scan
from ..algorithms.kl import KLPenalty, approx_kl
from ..algorithms.packed import PackedBatch
from ..algorithms.quirks import PeerQuirks
from ..algorithms.scan import reverse_scan
from ..algorithms.token_rewards import credited_rewards
from ..algorithms.trainable import Trainable
from ..algorithms.turns import turn_returns
from ..algorithms.whitening import whiten
from ..errors import OptionError
from .entrance import added, columns, settle
from .layout import as_batch, padded_tokens
from .masked import masked_mean
from .rewards import TOKENS, AdvEstimator, Metrics, aligned_mask, known_rewards


def compute_advantage(
    batch: Mapping[str, Tensor],
    *,
    adv_estimator: AdvEstimator = "gae",
    gamma: Share = 1.0,
    lambd: Share = 0.95,
    whiten_rewards: bool = False,
    whiten_advantages: bool = False,
    advantage_clip: Positive | None = None,
    distill_coef: float = 0.0,
    distill_only: bool = False,
    distill_penalty: KLPenalty = "k1",
    distill_from: Literal["rollout_log_probs", "old_log_probs"] = "rollout_log_probs",
    peer_quirks: PeerQuirks | None = None,
) -> tuple[dict[str, Tensor], Metrics]:
    """token_level_rewards to advantages; adds advantages, returns, raw_advantages, token_level_rewards.

    All [B, T] float32, or [B, T-1] beside a [B, T] response_mask. In order: whiten the rewards, estimate
    (gae; reinforce, grpo, gigpo and step_reinforce: discounted return; agentic_reinforce: return by turns),
    subtract distill_coef * KL(`distill_from` against teacher_log_probs), whiten, mask, clip. raw_advantages
    are those before the last four. distill_only: nothing but the distillation term, which is the return too;
    the rewards stay as they are. Rewards on masked tokens go to the action before, all outputs are 0 outside
    the mask and critic/advantage_clip_frac counts trainable tokens. ROLL loses such rewards, runs gae and
    returns over all tokens, leaves returns and raw_advantages unmasked and counts every position.
    """
    distills = distill_only or distill_coef != 0
    if distill_only and distill_coef == 0:
        raise OptionError("distill_coef is 0, which leaves nothing with distill_only: give it")
    asked: dict[str, Values | Flags] = {
        "response_mask": Flags(("B", "W")),
        "token_level_rewards": Values(("B", "T"), spills=True),
    }
    if adv_estimator == "gae" and not distill_only:
        asked["values"] = TOKENS
    if distills:
        asked |= {distill_from: TOKENS, "teacher_log_probs": TOKENS}
    call = Call()
    taken = columns(batch, asked, call)
    mask = aligned_mask(taken["response_mask"], taken["token_level_rewards"], call)
    settle(call)
    rewards = taken["token_level_rewards"] = known_rewards(taken["token_level_rewards"], mask)
    packed, _ = as_batch(
        mask, {name: taken[name] for name in ("token_level_rewards", "values") if name in taken}
    )
    tokens = packed.trainable_tokens
    if not distill_only:
        flat = rewards.reshape(-1)
        flat = credited_rewards(flat, tokens) if peer_quirks is None else tokens.only(flat)
        rewards = (whiten(flat, tokens) if whiten_rewards else flat).view(mask.shape)
    if distills:
        kl = approx_kl(taken[distill_from], taken["teacher_log_probs"], distill_penalty)
        distilled = -distill_coef * _masked(kl, tokens)
    if distill_only:
        advantages = returns = distilled
    else:
        packed = packed.with_columns(token_level_rewards=rewards.reshape(-1))
        estimate = _estimate(packed, adv_estimator, gamma, lambd, peer_quirks)
        advantages, returns = (value.view(mask.shape) for value in estimate)
    raw = advantages
    if distills and not distill_only:
        advantages = advantages + distilled
    if whiten_advantages:
        advantages = whiten(advantages.reshape(-1), tokens).view(mask.shape)
    elif peer_quirks:
        advantages = _masked(advantages, tokens)
    metrics: Metrics = {}
    if advantage_clip is not None:
        outside = (advantages.abs() > advantage_clip).to(torch.float32)
        share = outside.mean() if peer_quirks and outside.numel() else masked_mean(outside, mask)
        metrics["critic/advantage_clip_frac"] = share.item()
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    found = {
        "advantages": advantages,
        "returns": returns,
        "raw_advantages": raw,
        "token_level_rewards": rewards,
    }
    return added(batch, found, call), metrics


def compute_agentic_reinforce_return(
    token_level_rewards: TokenRewards, mask: Mask | None, gamma: Share = 1.0
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [B, T]: a turn's reward (at its last token) plus gamma times the next turn's return.

    mask None: every row is one turn.
    """
    tokens = padded_tokens(torch.ones_like(token_level_rewards) if mask is None else mask)
    returns = turn_returns(token_level_rewards.reshape(-1), tokens, gamma)
    shaped = returns.view(token_level_rewards.shape).to(torch.float32)
    return shaped, shaped


def _estimate(
    batch: PackedBatch, name: AdvEstimator, gamma: float, lambd: float, peer_quirks: PeerQuirks | None
) -> tuple[Tensor, Tensor]:
    rewards = batch.column("token_level_rewards")
    tokens = batch.all_tokens if peer_quirks else batch.trainable_tokens
    if name == "gae":
        return gae_scan(rewards, batch.column("values"), tokens, gamma, lambd)
    if name == "agentic_reinforce":
        returns = turn_returns(rewards, batch.trainable_tokens, gamma)
    else:  # a plain return: their group logic is in the reward normalisation
        returns = reverse_scan(rewards, gamma, tokens)
    return returns, returns


def _masked(values: Tensor, tokens: Trainable) -> Tensor:
    """[B, T]: `values` where the mask is set, 0 elsewhere."""
    return tokens.only(values.reshape(-1)).view(values.shape)
