"""Rewards of rows on padded tensors, under ROLL's names: one per response, or one per step.

A function of a mapping `batch` returns a new mapping with its results added, and metrics.
Groups are consecutive blocks of `n_sample` rows, or rows with equal labels in `index`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from ..algorithms.arguments import Call, Count, Labels, NotNegative, PeerQuirks, Rows, Share, Values
from ..algorithms.scan import scan_segments
from ..algorithms.segments import NormScope, RunningMoments, moments, normalise
from ..errors import ArgumentError, OptionError
from .entrance import check_numbers, checked, take_columns, unchecked, with_results
from .layout import group_order, label_numbers, pair_numbers, ungrouped

AdvEstimator = Literal["gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce"]
Batch = Mapping[str, Tensor]
Metrics = dict[str, float]
ROWS: Final = Values(("B",))
TOKENS: Final = Values(("B", "T"))


@checked
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
    """(r - mean) / (std + epsilon), std with ddof 1.

    Args:
      rewards: [B].
      norm_mean_type, norm_std_type: over what the mean and the std are taken; None = not at all.
      n_sample, index: the groups, consecutive blocks of rows or equal labels.
      running: for the scope "running", the moments with this batch merged (`RunningMoments.updated`).
      std_floor: where the std is not above it the result is 0.

    Returns:
      [B] float32. ROLL gives NaN for one element, and divides rounding noise by epsilon.
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
    return ungrouped(result, order)


@checked
def agentic_reward_norm(
    scores: Rows,
    index: Labels | None = None,
    *,
    norm_mean_type: NormScope | None,
    norm_std_type: NormScope | None,
    epsilon: NotNegative = 1e-6,
    peer_quirks: PeerQuirks | None = None,
) -> Tensor:
    """`reward_norm` by labels (None = the batch is one group) with a std_floor of 1e-6; [B] float32.

    ROLL also gives 0 to a row alone in its group if the std is over the batch.
    """
    result = unchecked(reward_norm)(
        scores,
        norm_mean_type=norm_mean_type,
        norm_std_type=norm_std_type,
        n_sample=None if index is not None else max(len(scores), 1),
        index=index,
        epsilon=epsilon,
        std_floor=1e-6,
    )
    if peer_quirks and norm_std_type is not None and index is not None:
        numbers = label_numbers(index)
        result = torch.where(torch.bincount(numbers)[numbers].to(result.device) > 1, result, 0.0)
    return result


@checked
def group_mean_std(
    scores: Rows, index: Labels, eps: NotNegative = 1e-6, *, peer_quirks: PeerQuirks | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, std, size) of the row's group, all [B] float32; std has ddof 1 and is sqrt(eps) at least.

    A row alone has its score as mean and std 0; in verl mean 0 and std 1. verl of January 2026 takes the std from sums
    of squares in float32, and those cancel if the scores have a common offset.
    """
    if peer_quirks == "verl-2026-01":
        scores, codes = scores.to(torch.float32), label_numbers(index).to(scores.device)
        size, total, squares = (
            torch.zeros_like(scores).index_add_(0, codes, values)
            for values in (torch.ones_like(scores), scores, scores.square())
        )
        variance = (squares - total.square() / size.clamp(min=1)) / (size - 1).clamp(min=1)
        mean = torch.where(size > 1, total / size.clamp(min=1), 0.0)
        std = torch.where(size > 1, variance.clamp(min=eps).sqrt(), 1.0)
        return mean[codes], std[codes], size[codes]
    values, order, offsets = _grouped(scores, None, index)
    stats = moments(values, offsets)
    alone = stats.size < 2
    mean, std = stats.mean, torch.where(alone, 1.0 if peer_quirks else 0.0, stats.std.clamp(min=eps**0.5))
    if peer_quirks:
        mean = torch.where(alone, 0.0, mean)
    rows = [ungrouped(value, order) for value in (mean, std, stats.size)]
    return rows[0], rows[1], rows[2]


def group_scores(scores: Tensor, n_sample: Count | None, index: Labels | None) -> tuple[Tensor, Tensor]:
    """(mean score, size) of the row's group, [B] float32."""
    values, order, offsets = _grouped(scores, n_sample, index)
    stats = moments(values, offsets)
    return ungrouped(stats.mean, order), ungrouped(stats.size, order)


@checked
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
    """response_level_rewards [B] normalised by `reward_norm`, then held in +-reward_clip (None or 0: not clipped).

    adv_estimator "grpo" takes both scopes over the group, so it needs n_sample or index, and refuses another scope
    (ROLL overrides it). Returns the batch with the new response_level_rewards, and critic/reward_clip_frac.
    """
    if adv_estimator == "grpo":
        for name, scope in (("norm_mean_type", norm_mean_type), ("norm_std_type", norm_std_type)):
            if scope not in (None, "group") and not peer_quirks:
                raise OptionError(
                    f"{name} is {scope!r}, which adv_estimator 'grpo' does not take: leave it out"
                )
        norm_mean_type = norm_std_type = "group"
    call = Call()
    columns = take_columns(batch, {"response_level_rewards": ROWS}, call)
    check_numbers(call)
    rewards = unchecked(reward_norm)(
        columns["response_level_rewards"],
        norm_mean_type=norm_mean_type,
        norm_std_type=norm_std_type,
        n_sample=n_sample,
        index=index,
        running=running,
        peer_quirks=peer_quirks,
    )
    clipped, share = _clip(rewards, reward_clip)
    return with_results(batch, {"response_level_rewards": clipped}, call), {"critic/reward_clip_frac": share}


@checked
def compute_discounted_returns(step_scores: Rows, traj_id: Labels, step: Rows, gamma: Share) -> Tensor:
    """[K] float32: G_k = s_k + gamma * G_{k+1} over the rows of a trajectory in the order of `step`.

    step_scores and step [K], traj_id K labels; the result is in the order of the rows. A gap in the step numbers does
    not discount.
    """
    in_time = torch.from_numpy(np.argsort(step.cpu().numpy(), kind="stable"))  # quick where it is sorted
    order, offsets = group_order(label_numbers(traj_id)[in_time], step.device)
    order = in_time.to(step.device)[order]
    return ungrouped(scan_segments(step_scores[order].to(torch.float64), gamma, offsets), order)


@checked
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
    """One reward per row, where a row is a step; adds response_level_rewards [B].

    gigpo: episode_reward_weight * norm(episode_scores by traj_group_id) + step_reward_weight * norm(step_rewards by
    state_hash within traj_group_id); it adds episode_rewards_norm and step_rewards_norm too. step_reinforce:
    norm(step_rewards). Others: norm of the row sums of `scores`. norm is `agentic_reward_norm`.

    Args:
      batch: for gigpo episode_scores and step_rewards [B], for step_reinforce step_rewards [B], else scores [B, T].
      traj_group_id, state_hash: B labels.

    Episode statistics count every row. ROLL's state groups pool equal states of different groups.
    """
    call = Call()
    columns = take_columns(batch, _REWARD_COLUMNS.get(adv_estimator, {"scores": TOKENS}), call)
    check_numbers(call)
    normalised: dict[str, Tensor] = {}

    def episode_norm(values: Tensor) -> Tensor:
        return unchecked(agentic_reward_norm)(
            values,
            traj_group_id,
            norm_mean_type=norm_mean_type,
            norm_std_type=norm_std_type,
            peer_quirks=peer_quirks,
        )

    if adv_estimator == "gigpo":
        if state_hash is None:
            raise OptionError("state_hash is missing: adv_estimator 'gigpo' needs one label per row")
        episode = episode_norm(columns["episode_scores"])
        _one_each("state_hash", state_hash, len(episode))
        states = state_hash
        if traj_group_id is not None and not peer_quirks:
            states = pair_numbers(traj_group_id, state_hash)
        step = unchecked(agentic_reward_norm)(
            columns["step_rewards"],
            states,
            norm_mean_type=step_norm_mean_type,
            norm_std_type=step_norm_std_type,
            peer_quirks=peer_quirks,
        )
        normalised = {"episode_rewards_norm": episode, "step_rewards_norm": step}
        rewards = episode_reward_weight * episode + step_reward_weight * step
    elif adv_estimator == "step_reinforce":
        rewards = episode_norm(columns["step_rewards"])
    else:
        rewards = episode_norm(columns["scores"].to(torch.float64).sum(-1))
    clipped, share = _clip(rewards, reward_clip)
    metrics = {"critic/reward_clip_frac": share}
    return with_results(batch, {**normalised, "response_level_rewards": clipped}, call), metrics


#: Columns that an estimator reads instead of `scores`.
_REWARD_COLUMNS: Final = {
    "gigpo": {"episode_scores": ROWS, "step_rewards": ROWS},
    "step_reinforce": {"step_rewards": ROWS},
}


def _clip(rewards: Tensor, limit: float | None) -> tuple[Tensor, float]:
    if not limit:
        return rewards, 0.0
    outside = (rewards.abs() > limit).float()
    return rewards.clamp(-limit, limit), outside.mean().item() if len(rewards) else 0.0


def _grouped(rewards: Tensor, n_sample: Count | None, index: Labels | None) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards group by group, float64; the order of the rows in them; offsets of the groups)."""
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
