"""Token-level rewards on padded tensors, under ROLL's and verl's names: a row's reward on one token, minus the KL."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ..algorithms.arguments import Call, Flags, Mask, NotNegative, Rows, TokenRewards, Tokens, Values, Whole
from ..algorithms.kl import KLPenalty, approx_kl
from ..algorithms.quirks import PeerQuirks
from ..algorithms.token_rewards import outcome_rewards
from ..errors import ArgumentError
from .entrance import check_numbers, checked, take_columns, unchecked, with_results
from .layout import as_batch
from .masked import masked_mean
from .rewards import ROWS, TOKENS, Batch, Metrics


@checked
def expand_to_token_level(
    response_level_rewards: Rows,
    attention_mask: Mask,
    position_ids: Annotated[Tensor, Whole(("B", "T"), ("B", 3, "T"))],
) -> Tensor:
    """[B, T-1] float32: the row's reward at its last attended token, column t describing token t + 1 (ROLL).

    response_level_rewards [B]; attention_mask [B, T]; position_ids [B, T], or [B, 3, T] of which the first channel
    counts. A row with fewer than two attended tokens loses its reward. `compute_token_reward` puts rewards on the last
    trainable token instead.
    """
    positions = position_ids[:, 0] if position_ids.dim() == 3 else position_ids
    last = (positions * attention_mask).argmax(1, keepdim=True)
    rewards = torch.zeros(attention_mask.shape, device=attention_mask.device)
    return rewards.scatter(1, last, response_level_rewards[:, None].to(torch.float32))[:, 1:]


@checked
def compute_token_reward(
    batch: Batch,
    *,
    add_token_level_kl: bool = False,
    kl_penalty: KLPenalty = "k1",
    kl_coef: float = 0.0,
    reward_clip: NotNegative | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[dict[str, Tensor], Metrics]:
    """response_level_rewards on the last trainable token, minus kl_coef * KL, held in +-reward_clip.

    Args:
      batch: response_level_rewards [B], response_mask [B, T], and for the KL old_log_probs and ref_log_probs, [B, T]
        or [B, T-1] where column t describes token t + 1 (ROLL's layout).
      add_token_level_kl: subtract the KL of old_log_probs against ref_log_probs.
      reward_clip: None or 0 does not clip.

    Returns:
      The batch with token_level_rewards, float32 in the layout of old_log_probs; metrics: critic/kl (mean over rows
      with tokens, also if it is not subtracted; ROLL: over all rows), critic/kl_coef, critic/token_reward_clip_frac.

    ROLL puts the reward on the last attended token instead (so peer_quirks needs attention_mask and position_ids) and
    counts clipped positions in padding too.
    """
    kinds: dict[str, Values | Flags | Whole] = {
        "response_mask": Flags(("B", "W")),
        "response_level_rewards": ROWS,
    }
    log_probs = [name for name in ("old_log_probs", "ref_log_probs") if batch.get(name) is not None]
    if add_token_level_kl and not peer_quirks:
        log_probs = ["old_log_probs", "ref_log_probs"]
    kinds |= dict.fromkeys(log_probs, TOKENS)
    if peer_quirks:
        kinds |= {"attention_mask": Flags(("B", "W")), "position_ids": Whole(("B", "W"), ("B", 3, "W"))}
    call = Call()
    columns = take_columns(batch, kinds, call)
    mask = aligned_mask(columns["response_mask"], columns.get("old_log_probs"), call)
    check_numbers(call)
    rewards = _placed(columns, mask, peer_quirks)
    kl = torch.zeros_like(rewards)
    if len(log_probs) == 2:
        kl = approx_kl(columns["old_log_probs"], columns["ref_log_probs"], kl_penalty)
        kl = torch.where(mask != 0, kl, 0.0)
    coefficient = kl_coef if add_token_level_kl else 0.0
    metrics = {"critic/kl": _mean_kl(kl, mask, peer_quirks), "critic/kl_coef": coefficient}
    if add_token_level_kl:
        rewards = rewards - kl_coef * kl
    if reward_clip:
        rewards, metrics["critic/token_reward_clip_frac"] = clip_tokens(
            rewards, mask, reward_clip, peer_quirks
        )
    return with_results(batch, {"token_level_rewards": rewards}, call), metrics


@checked
def apply_kl_penalty(
    token_level_scores: TokenRewards,
    response_mask: Mask,
    old_log_probs: Tokens,
    ref_log_probs: Tokens,
    *,
    kl_penalty: KLPenalty = "k1",
    kl_coef: float,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, Metrics]:
    """(token_level_scores [B, T] - kl_coef * KL on trainable tokens, {critic/kl, critic/kl_coef})."""
    kl = torch.where(response_mask != 0, approx_kl(old_log_probs, ref_log_probs, kl_penalty), 0.0)
    metrics = {"critic/kl": _mean_kl(kl, response_mask, peer_quirks), "critic/kl_coef": kl_coef}
    return token_level_scores.nan_to_num() - kl_coef * kl, metrics


def aligned_mask(response_mask: Tensor, like: Tensor | None, call: Call) -> Tensor:
    """The mask in the layout of the token columns `like`: itself, or without its first column (ROLL's shift)."""
    if like is None or like.shape[1] == response_mask.shape[1]:
        return response_mask
    if like.shape[1] == response_mask.shape[1] - 1:
        mask = response_mask[:, 1:].contiguous()
        call.masks.append(("response_mask", mask))
        return mask
    raise ArgumentError(
        f"response_mask has width {response_mask.shape[1]}, the token columns {like.shape[1]}: "
        "give it the same width or one more"
    )


def clip_tokens(
    values: Tensor, mask: Tensor, limit: float, peer_quirks: PeerQuirks | None
) -> tuple[Tensor, float]:
    """`values` [B, T] held in +-limit, and the share of trainable tokens outside (ROLL: of all positions)."""
    outside = (values.abs() > limit).to(torch.float32)
    share = outside.mean() if peer_quirks and outside.numel() else unchecked(masked_mean)(outside, mask)
    return values.clamp(-limit, limit), share.item()


def _placed(columns: Batch, mask: Tensor, peer_quirks: PeerQuirks | None) -> Tensor:
    """[B, T] float32: each row's reward on its last trainable token; ROLL's place is the last attended one."""
    row_rewards = columns["response_level_rewards"]
    if not peer_quirks:
        packed, _ = as_batch(mask, {}, row_rewards)
        return outcome_rewards(packed).view(mask.shape)
    rewards = unchecked(expand_to_token_level)(
        row_rewards, columns["attention_mask"], columns["position_ids"]
    )
    if rewards.shape != mask.shape:
        raise ArgumentError(f"old_log_probs has width {mask.shape[1]}, ROLL's has {rewards.shape[1]}: cut it")
    return rewards


def _mean_kl(kl: Tensor, mask: Tensor, peer_quirks: PeerQuirks | None) -> float:
    per_row = unchecked(masked_mean)(kl, mask, 1)
    rows = torch.ones_like(per_row) if peer_quirks else (mask != 0).any(1)
    return unchecked(masked_mean)(per_row, rows).item()
