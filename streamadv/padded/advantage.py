"""Token rewards and advantages on padded tensors, under ROLL's and verl's names.

A row's reward stands on one token, minus the KL; from token rewards follow whitened and clipped advantages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from ..algorithms.arguments import (
    Call,
    Flags,
    Mask,
    NotNegative,
    NumberByName,
    PeerQuirks,
    Positive,
    Rows,
    Share,
    TokenRewards,
    Tokens,
    Values,
    Whole,
)
from ..algorithms.estimators.tokens import vtrace_scan
from ..algorithms.kl import KLPenalty, approx_kl
from ..algorithms.packed import PackedBatch
from ..algorithms.rewards import credited_rewards, outcome_rewards
from ..algorithms.scan import reverse_scan, turn_returns
from ..algorithms.segments import Trainable, whiten
from ..errors import ArgumentError, OptionError
from .entrance import check_numbers, checked, take_columns, unchecked, with_results
from .layout import as_batch, padded_tokens
from .masked import masked_mean
from .rewards import ROWS, TOKENS, AdvEstimator, Batch, Metrics


@checked
def expand_to_token_level(
    response_level_rewards: Rows,
    attention_mask: Mask,
    position_ids: Annotated[Tensor, Whole(("B", "T"), ("B", "C", "T"))],
) -> Tensor:
    """[B, T-1] float32: the row's reward at its last attended token, column t describing token t + 1 (ROLL).

    response_level_rewards [B]; attention_mask [B, T]; position_ids [B, T], or [B, C, T] of which the first channel
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
        kinds |= {"attention_mask": Flags(("B", "W")), "position_ids": Whole(("B", "W"), ("B", "C", "W"))}
    call = Call()
    columns = take_columns(batch, kinds, call)
    mask = aligned_mask(columns["response_mask"], columns.get("old_log_probs"), call)
    check_numbers(call)
    row_rewards = columns["response_level_rewards"]
    if not peer_quirks:
        rewards = outcome_rewards(as_batch(mask, {}, row_rewards)[0]).view(mask.shape)
    else:
        rewards = unchecked(expand_to_token_level)(
            row_rewards, columns["attention_mask"], columns["position_ids"]
        )
        if rewards.shape != mask.shape:
            raise ArgumentError(
                f"old_log_probs has width {mask.shape[1]}, ROLL's has {rewards.shape[1]}: cut it"
            )
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


def _mean_kl(kl: Tensor, mask: Tensor, peer_quirks: PeerQuirks | None) -> float:
    per_row = unchecked(masked_mean)(kl, mask, 1)
    rows = torch.ones_like(per_row) if peer_quirks else (mask != 0).any(1)
    return unchecked(masked_mean)(per_row, rows).item()


@checked
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
    distill_teachers: Annotated[Mapping[str, float], NumberByName()] | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[dict[str, Tensor], Metrics]:
    """From token_level_rewards to advantages; adds advantages, returns, raw_advantages, token_level_rewards.

    In order: whiten the rewards, estimate, subtract distill_coef * KL(`distill_from` against teacher_log_probs),
    whiten, mask, clip. raw_advantages are the advantages before the last four.

    Args:
      batch: response_mask [B, T], token_level_rewards [B, T], and as needed values, `distill_from` and
        teacher_log_probs [B, T]. All except response_mask may be [B, T-1], column t describing token t + 1.
      adv_estimator: gae; agentic_reinforce: return by turns; all others: discounted return, because their group
        statistics belong to the reward normalisation.
      distill_only: the distillation term alone, also as return; the rewards stay as they are.
      distill_teachers: several teachers, name -> coefficient, in place of distill_coef: their terms add up, from the
        columns teacher_log_probs_NAME [B, T]. With the column teacher_rows_NAME [B] of 0 and 1 a teacher has a part in
        those rows alone.

    Returns:
      The batch with its new columns, float32 in the layout of token_level_rewards and 0 outside the mask; metrics.

    Rewards on masked tokens go to the action before, and critic/advantage_clip_frac counts trainable tokens. ROLL
    loses such rewards, runs gae and returns over all tokens, leaves returns and raw_advantages unmasked and counts
    every position.
    """
    teachers = _teachers(distill_coef, distill_teachers, distill_only)
    kinds: dict[str, Values | Flags] = {
        "response_mask": Flags(("B", "W")),
        "token_level_rewards": Values(("B", "T"), spills=True),
    }
    if adv_estimator == "gae" and not distill_only:
        kinds["values"] = TOKENS
    for teacher in teachers:
        kinds |= {distill_from: TOKENS, f"teacher_log_probs{teacher}": TOKENS}
        if teacher and batch.get(f"teacher_rows{teacher}") is not None:
            kinds[f"teacher_rows{teacher}"] = Flags(("B",), counts=False)
    call = Call()
    columns = take_columns(batch, kinds, call)
    mask = aligned_mask(columns["response_mask"], columns["token_level_rewards"], call)
    check_numbers(call)
    rewards = columns["token_level_rewards"]
    packed, _ = as_batch(mask, {n: columns[n] for n in ("token_level_rewards", "values") if n in columns})
    tokens = packed.trainable_tokens
    distilled = _distilled(columns, teachers, distill_from, distill_penalty, tokens)
    if distill_only:
        advantages = returns = raw = distilled
        rewards = rewards.nan_to_num()
    else:
        flat = rewards.reshape(-1)  # of masked tokens, ROLL drops them
        flat = credited_rewards(flat, tokens) if peer_quirks is None else tokens.only(flat)
        flat = whiten(flat, tokens) if whiten_rewards else flat
        rewards, packed = flat.view(mask.shape), packed.with_columns(token_level_rewards=flat)
        estimate = _estimate(packed, adv_estimator, gamma, lambd, peer_quirks)
        raw, returns = (value.view(mask.shape) for value in estimate)
        advantages = raw + distilled if teachers else raw
    if whiten_advantages:
        advantages = whiten(advantages.reshape(-1), tokens).view(mask.shape)
    elif peer_quirks:
        advantages = _masked(advantages, tokens)
    metrics: Metrics = {}
    if advantage_clip is not None:
        advantages, metrics["critic/advantage_clip_frac"] = clip_tokens(
            advantages, mask, advantage_clip, peer_quirks
        )
    results = {
        "advantages": advantages,
        "returns": returns,
        "raw_advantages": raw,
        "token_level_rewards": rewards,
    }
    return with_results(batch, results, call), metrics


def _teachers(coefficient: float, by_name: Mapping[str, float] | None, is_needed: bool) -> dict[str, float]:
    """Coefficients by the ending of the teachers' columns. Raises OptionError for options that do not fit together."""
    if by_name is not None and (coefficient != 0 or not by_name):
        raise OptionError(
            "distill_teachers has the coefficients: name a teacher in it, and leave out distill_coef"
        )
    teachers = {f"_{name}": value for name, value in (by_name or {}).items()}
    if not teachers and coefficient != 0:
        teachers = {"": coefficient}
    if is_needed and not teachers:
        raise OptionError("distill_coef is 0, which leaves nothing with distill_only: give it")
    return teachers


def _distilled(
    columns: Mapping[str, Tensor],
    teachers: Mapping[str, float],
    distill_from: str,
    penalty: KLPenalty,
    tokens: Trainable,
) -> Tensor:
    """[B, T]: the sum of the teachers' terms; a 0 without dimensions if there is none."""
    distilled = torch.zeros((), device=columns["response_mask"].device)
    for teacher, coefficient in teachers.items():
        kl = approx_kl(columns[distill_from], columns[f"teacher_log_probs{teacher}"], penalty)
        term = -coefficient * _masked(kl, tokens)
        rows = columns.get(f"teacher_rows{teacher}") if teacher else None
        term = term if rows is None else torch.where(rows[:, None], term, 0.0)
        distilled = distilled + term if distilled.dim() else term
    return distilled


@checked
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
    """(advantages, returns) [N]."""
    rewards = batch.column("token_level_rewards")
    tokens = batch.all_tokens if peer_quirks else batch.trainable_tokens
    if name == "gae":
        return vtrace_scan(rewards, batch.column("values"), None, tokens, gamma, lam=lambd)
    if name == "agentic_reinforce":
        returns = turn_returns(rewards, batch.trainable_tokens, gamma)
    else:
        returns = reverse_scan(rewards, gamma, tokens)
    return returns, returns


def _masked(values: Tensor, tokens: Trainable) -> Tensor:
    """[B, T]: `values` where the mask is set, 0 elsewhere."""
    return tokens.only(values.reshape(-1)).view(values.shape)
