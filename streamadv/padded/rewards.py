"""Rewards on padded tensors, under ROLL's names: response level, step level, token level.

`batch` is a mapping of tensors; every function returns a new mapping with its results added, and metrics.
Groups are consecutive blocks of `n_sample` rows, or rows with equal labels in `index`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import torch
from torch import Tensor

from ..algorithms.arguments import (
    Call,
    Count,
    Flags,
    Labels,
    Mask,
    NotNegative,
    Rows,
    Share,
    TokenRewards,
    Tokens,
    Values,
    Whole,
)
from ..algorithms.kl import KLPenalty, approx_kl
from ..algorithms.quirks import PeerQuirks
from ..algorithms.rewards import NormScope, normalise
from ..algorithms.running_moments import RunningMoments
from ..algorithms.scan import scan_segments
from ..algorithms.segments import moments, spread
from ..algorithms.token_rewards import outcome_rewards
from ..errors import ArgumentError, OptionError
from .entrance import added, columns, settle
from .layout import as_batch, group_order, label_codes
from .masked import masked_mean

AdvEstimator = Literal["gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce"]
Batch = Mapping[str, Tensor]
Metrics = dict[str, float]
ROWS: Final = Values(("B",))
TOKENS: Final = Values(("B", "T"))


def reward_norm(
    rewards: Rows,
    *,
    norm_mean_type: NormScope | None,
    norm_std_type: NormScope | None,
    n_sample: Count | None = None,
    index: Labels | None = None,
    running: RunningMoments | None = None,
    epsilon: NotNegative = 1e-6,
    std_floor: NotNegative = 0.0,
    peer_quirks: PeerQuirks | None = None,
) -> Tensor:
    """(r - mean) / (std + epsilon), mean and std over "group", "batch", "running" or not at all; [B] float32.

    running: the moments with this batch merged (`RunningMoments.updated`). Where the std is not above
    `std_floor` the result is 0; ROLL's gives NaN for one element and divides rounding noise by epsilon.
    """
    if "group" in (norm_mean_type, norm_std_type) and n_sample is None and index is None:
        raise OptionError("n_sample and index are missing: the scope 'group' needs one of them")
    if running is None and "running" in (norm_mean_type, norm_std_type):
        raise OptionError("running is missing: the scope 'running' needs the moments of all batches")
    values, order, offsets = _grouped(rewards, n_sample, index)
    floor = None if peer_quirks else std_floor
    result = normalise(
        values,
        offsets,
        mean=norm_mean_type,
        std=norm_std_type,
        epsilon=epsilon,
        std_floor=floor,
        running=running,
    )
    return _ungrouped(result, order)


def agentic_reward_norm(
    scores: Rows,
    index: Labels | None = None,
    *,
    norm_mean_type: NormScope | None,
    norm_std_type: NormScope | None,
    epsilon: NotNegative = 1e-6,
    peer_quirks: PeerQuirks | None = None,
) -> Tensor:
    """`reward_norm` by labels (None = the batch is one group), with a std of 1e-6 or less taken as none.

    ROLL also gives 0 to a row alone in its group when the std is taken over the batch.
    """
    result = reward_norm(
        scores,
        norm_mean_type=norm_mean_type,
        norm_std_type=norm_std_type,
        n_sample=None if index is not None else max(len(scores), 1),
        index=index,
        epsilon=epsilon,
        std_floor=1e-6,
    )
    if peer_quirks and norm_std_type is not None and index is not None:
        codes = label_codes(index)
        result = torch.where(torch.bincount(codes)[codes].to(result.device) > 1, result, 0.0)
    return result


def group_mean_std(
    scores: Rows, index: Labels, eps: NotNegative = 1e-6, *, peer_quirks: PeerQuirks | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std (ddof 1, sqrt(eps) at least) and size of each row's group, [B] float32 each.

    A row alone has std 0 and its own score as mean; in verl mean 0 and std 1. verl takes the std from sums of
    squares in float32, which cancel where the scores have a common offset.
    """
    if peer_quirks:
        return _group_sums(scores.to(torch.float32), label_codes(index).to(scores.device), eps)
    values, order, offsets = _grouped(scores, None, index)
    stats = moments(values, offsets)
    mean, std = stats.mean, torch.where(stats.size > 1, stats.std.clamp(min=eps**0.5), 0.0)
    spread_out = [_ungrouped(spread(value, offsets, len(values)), order) for value in (mean, std, stats.size)]
    return spread_out[0], spread_out[1], spread_out[2]


def _group_sums(scores: Tensor, codes: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    size, total, squares = (
        torch.zeros_like(scores).index_add_(0, codes, values)
        for values in (torch.ones_like(scores), scores, scores.square())
    )
    variance = (squares - total.square() / size.clamp(min=1)) / (size - 1).clamp(min=1)
    mean = torch.where(size > 1, total / size.clamp(min=1), 0.0)
    std = torch.where(size > 1, variance.clamp(min=eps).sqrt(), 1.0)
    return mean[codes], std[codes], size[codes]


def group_scores(scores: Tensor, n_sample: Count | None, index: Labels | None) -> tuple[Tensor, Tensor]:
    """Mean score and size of each row's group, [B] float32 each."""
    values, order, offsets = _grouped(scores, n_sample, index)
    stats = moments(values, offsets)
    mean, size = (spread(value, offsets, len(values)) for value in (stats.mean, stats.size))
    return _ungrouped(mean, order), _ungrouped(size, order)


def reward_postprocess(
    batch: Batch,
    *,
    adv_estimator: AdvEstimator = "gae",
    norm_mean_type: NormScope | None = None,
    norm_std_type: NormScope | None = None,
    reward_clip: NotNegative | None = None,
    n_sample: Count | None = None,
    index: Labels | None = None,
    running: RunningMoments | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[dict[str, Tensor], Metrics]:
    """response_level_rewards [B] normalised, then held in +-reward_clip (None or 0: not at all).

    adv_estimator "grpo" takes both scopes as "group" (ROLL: whatever they are), so it needs n_sample or index.
    Metric critic/reward_clip_frac.
    """
    if adv_estimator == "grpo":
        for name, scope in (("norm_mean_type", norm_mean_type), ("norm_std_type", norm_std_type)):
            if scope not in (None, "group") and not peer_quirks:
                raise OptionError(
                    f"{name} is {scope!r}, which adv_estimator 'grpo' does not take: leave it out"
                )
        norm_mean_type = norm_std_type = "group"
    call = Call()
    taken = columns(batch, {"response_level_rewards": ROWS}, call)
    settle(call)
    rewards = reward_norm(
        taken["response_level_rewards"],
        norm_mean_type=norm_mean_type,
        norm_std_type=norm_std_type,
        n_sample=n_sample,
        index=index,
        running=running,
        peer_quirks=peer_quirks,
    )
    clipped, share = _clip(rewards, reward_clip)
    return added(batch, {"response_level_rewards": clipped}, call), {"critic/reward_clip_frac": share}


def compute_discounted_returns(step_scores: Rows, traj_id: Labels, step: Rows, gamma: Share) -> Tensor:
    """[K] float32: G_k = s_k + gamma * G_{k+1} over the rows of a trajectory in the order of `step`.

    A missing step number does not discount; the result stands in the order of the rows.
    """
    codes = label_codes(traj_id).to(step_scores.device)
    order = torch.argsort(step.to(step_scores.device), stable=True)
    order = order[torch.argsort(codes[order], stable=True)]
    count = int(codes.max()) + 1 if len(codes) else 0
    offsets = torch.searchsorted(codes[order], torch.arange(count + 1, device=codes.device))
    return _ungrouped(scan_segments(step_scores[order].to(torch.float64), gamma, offsets), order)


def compute_response_level_rewards(
    batch: Batch,
    *,
    adv_estimator: AdvEstimator,
    traj_group_id: Labels | None = None,
    state_hash: Labels | None = None,
    norm_mean_type: NormScope | None = None,
    norm_std_type: NormScope | None = None,
    step_norm_mean_type: NormScope | None = None,
    step_norm_std_type: NormScope | None = None,
    episode_reward_weight: float = 1.0,
    step_reward_weight: float = 1.0,
    reward_clip: NotNegative | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[dict[str, Tensor], Metrics]:
    """One reward per row, rows being steps; adds response_level_rewards [B].

    gigpo: episode_reward_weight * norm(episode_scores by traj_group_id) + step_reward_weight *
    norm(step_rewards by state_hash within traj_group_id), adding episode_rewards_norm and step_rewards_norm.
    step_reinforce: norm(step_rewards). Others: norm of the row sums of `scores`. Episode statistics are over
    rows, as they come. ROLL's state groups pool equal states of different groups.
    """
    call = Call()
    taken = columns(batch, _REWARD_COLUMNS.get(adv_estimator, _SCORES), call)
    settle(call)
    parts: dict[str, Tensor] = {}
    if adv_estimator == "gigpo":
        if state_hash is None:
            raise OptionError("state_hash is missing: adv_estimator 'gigpo' needs one label per row")
        episode = agentic_reward_norm(
            taken["episode_scores"],
            traj_group_id,
            norm_mean_type=norm_mean_type,
            norm_std_type=norm_std_type,
            peer_quirks=peer_quirks,
        )
        states = state_hash
        _one_each("state_hash", state_hash, len(episode))
        if peer_quirks is None and traj_group_id is not None:
            groups = label_codes(traj_group_id).tolist()
            states = list(zip(groups, label_codes(state_hash).tolist(), strict=True))
        step = agentic_reward_norm(
            taken["step_rewards"],
            states,
            norm_mean_type=step_norm_mean_type,
            norm_std_type=step_norm_std_type,
            peer_quirks=peer_quirks,
        )
        parts = {"episode_rewards_norm": episode, "step_rewards_norm": step}
        rewards = episode_reward_weight * episode + step_reward_weight * step
    else:
        by_step = adv_estimator == "step_reinforce"
        values = taken["step_rewards"] if by_step else taken["scores"].to(torch.float64).sum(-1)
        rewards = agentic_reward_norm(
            values,
            traj_group_id,
            norm_mean_type=norm_mean_type,
            norm_std_type=norm_std_type,
            peer_quirks=peer_quirks,
        )
    clipped, share = _clip(rewards, reward_clip)
    metrics = {"critic/reward_clip_frac": share}
    return added(batch, {**parts, "response_level_rewards": clipped}, call), metrics


_SCORES: Final = {"scores": TOKENS}
_REWARD_COLUMNS: Final = {
    "gigpo": {"episode_scores": ROWS, "step_rewards": ROWS},
    "step_reinforce": {"step_rewards": ROWS},
}


def expand_to_token_level(
    response_level_rewards: Rows,
    attention_mask: Mask,
    position_ids: Annotated[Tensor, Whole(("B", "T"), ("B", 3, "T"))],
) -> Tensor:
    """[B, T-1] float32: each row's reward at its last attended token, column t describing token t + 1 (ROLL).

    position_ids [B, T], or [B, 3, T] of which the first channel counts. A row with fewer than two attended
    tokens has no place for its reward. `compute_token_reward` puts rewards on the last trainable token.
    """
    positions = position_ids[:, 0] if position_ids.dim() == 3 else position_ids
    last = (positions * attention_mask).argmax(1, keepdim=True)
    rewards = torch.zeros(attention_mask.shape, device=attention_mask.device)
    return rewards.scatter(1, last, response_level_rewards[:, None].to(torch.float32))[:, 1:]


def compute_token_reward(
    batch: Batch,
    *,
    add_token_level_kl: bool = False,
    kl_penalty: KLPenalty = "k1",
    kl_coef: float = 0.0,
    reward_clip: NotNegative | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[dict[str, Tensor], Metrics]:
    """response_level_rewards [B] on the last trainable token, minus kl_coef * KL, held in +-reward_clip.

    Adds token_level_rewards, in the layout of old_log_probs: [B, T], or [B, T-1] where column t describes
    token t + 1 of a [B, T] response_mask (ROLL's). The KL is that of old_log_probs against ref_log_probs,
    reported as critic/kl (mean over rows with tokens; ROLL: over all) whether or not it is subtracted.
    ROLL puts the reward on the last attended token instead and counts clipped positions in padding too.
    """
    asked: dict[str, Values | Flags | Whole] = {
        "response_mask": Flags(("B", "W")),
        "response_level_rewards": ROWS,
    }
    given = [name for name in ("old_log_probs", "ref_log_probs") if batch.get(name) is not None]
    if add_token_level_kl and not peer_quirks:
        given = ["old_log_probs", "ref_log_probs"]
    asked |= dict.fromkeys(given, TOKENS)
    if peer_quirks:
        asked |= {"attention_mask": Flags(("B", "W")), "position_ids": Whole(("B", "W"), ("B", 3, "W"))}
    call = Call()
    taken = columns(batch, asked, call)
    mask = aligned_mask(taken["response_mask"], taken.get("old_log_probs"), call)
    settle(call)
    if peer_quirks:
        rewards = expand_to_token_level(
            taken["response_level_rewards"], taken["attention_mask"], taken["position_ids"]
        )
        if rewards.shape != mask.shape:
            raise ArgumentError(
                f"old_log_probs has width {mask.shape[1]}, ROLL's has {rewards.shape[1]}: cut it"
            )
    else:
        packed, _ = as_batch(mask, {}, taken["response_level_rewards"])
        rewards = outcome_rewards(packed).view(mask.shape)
    metrics: Metrics = {}
    kl = torch.zeros_like(rewards)
    if len(given) == 2:
        kl = approx_kl(taken["old_log_probs"], taken["ref_log_probs"], kl_penalty)
        kl = torch.where(mask != 0, kl, 0.0)
    metrics["critic/kl"] = _mean_kl(kl, mask, peer_quirks)
    metrics["critic/kl_coef"] = kl_coef if add_token_level_kl else 0.0
    if add_token_level_kl:
        rewards = rewards - kl_coef * kl
    if reward_clip:
        outside = rewards.abs() > reward_clip
        share = outside.float().mean() if peer_quirks and outside.numel() else masked_mean(outside, mask)
        metrics["critic/token_reward_clip_frac"] = share.item()
        rewards = rewards.clamp(-reward_clip, reward_clip)
    return added(batch, {"token_level_rewards": rewards}, call), metrics


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
    """token_level_scores [B, T] - kl_coef * KL on trainable tokens, and critic/kl, critic/kl_coef."""
    kl = torch.where(response_mask != 0, approx_kl(old_log_probs, ref_log_probs, kl_penalty), 0.0)
    metrics = {"critic/kl": _mean_kl(kl, response_mask, peer_quirks), "critic/kl_coef": kl_coef}
    return known_rewards(token_level_scores, response_mask) - kl_coef * kl, metrics


def known_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """`rewards` [B, T], 0 where one outside the mask is NaN."""
    return torch.where((mask != 0) | ~rewards.isnan(), rewards, 0.0)


def aligned_mask(response_mask: Tensor, like: Tensor | None, call: Call) -> Tensor:
    """The mask that matches token columns `like`: itself, or without its first column (ROLL's shift)."""
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


def _mean_kl(kl: Tensor, mask: Tensor, peer_quirks: PeerQuirks | None) -> float:
    per_row = masked_mean(kl, mask, 1)
    rows = torch.ones_like(per_row) if peer_quirks else (mask != 0).any(1)
    return masked_mean(per_row, rows).item()


def _clip(rewards: Tensor, limit: float | None) -> tuple[Tensor, float]:
    if not limit:
        return rewards, 0.0
    outside = (rewards.abs() > limit).float()
    return rewards.clamp(-limit, limit), outside.mean().item() if len(rewards) else 0.0


def _grouped(rewards: Tensor, n_sample: Count | None, index: Labels | None) -> tuple[Tensor, Tensor, Tensor]:
    """(values in group order float64, that order, offsets of the groups)."""
    count = len(rewards)
    if index is not None:
        if n_sample is not None:
            raise OptionError("n_sample and index are both given: leave one out")
        _one_each("index", index, count)
        order, offsets = group_order(index, rewards.device)
    else:
        size = 1 if n_sample is None else n_sample
        if size < 1 or count % size:
            raise OptionError(f"n_sample is {n_sample}, needs a divisor of the {count} rows")
        order = torch.arange(count, device=rewards.device)
        offsets = torch.arange(0, count + 1, size, device=rewards.device)
    return rewards.to(torch.float64)[order], order, offsets


def _one_each(name: str, labels: Labels, count: int) -> None:
    if len(labels) != count:
        raise ArgumentError(f"{name} has {len(labels)} labels, needs one for each of the {count} rows")


def _ungrouped(values: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(values).scatter(0, order, values).to(torch.float32)
