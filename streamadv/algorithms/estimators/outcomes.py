"""Outcome estimators: one number for each trajectory, from its reward and those of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...errors import TrajectoryError
from ...extras import torch
from ..packed import PackedBatch, expand
from ..registry import Estimate, NotNegative, Positive, Share, estimator
from ..scan import ends_row, reverse_scan
from ..segments import (
    moments,
    normalise,
    segment_max,
    segment_min,
    segment_sum,
    whiten,
    whiten_weighted,
    whole,
)

if TYPE_CHECKING:
    from torch import Tensor


#: The advantage in a group of one, which has nothing to compare with: 0 (no signal), or its reward (verl).
Singleton = Literal["zero", "raw"]


def settle_singletons(size: Tensor, advantages: Tensor, raw: Tensor, singleton: Singleton) -> Tensor:
    """[M]: `advantages` [M], replaced by 0 or `raw` [M] in groups of fewer than two counted members (`size` [M])."""
    return torch.where(size < 2, raw if singleton == "raw" else 0.0, advantages)


@estimator("grpo", scope="group")
def grpo(
    batch: PackedBatch,
    *,
    norm_by_std: bool = True,
    epsilon: NotNegative = 1e-6,
    least_std: NotNegative = 0.0,
    singleton: Singleton = "zero",
) -> Estimate:
    """A_i = (r_i - mean(r_g)) / (std(r_g) + epsilon), std with ddof 1.

    DeepSeekMath, arXiv:2402.03300, eq. 3. Equal rewards in a group give exactly 0. Baseline members count neither in
    mean nor in std.

    Args:
      batch: its rewards [M], as the chain has shaped them.
      norm_by_std: False is Dr.GRPO (arXiv:2503.20783): A_i = r_i - mean(r_g).
      epsilon: added to the std, outside the root.
      least_std: lower bound of the std (verl's vectorized form: sqrt(epsilon)).
      singleton: the advantage in a group of one: "zero", or "raw": r_i, over 1 + epsilon if
        norm_by_std, as verl (ROLL: NaN).

    Returns:
      One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    advantages = stats.centred
    if norm_by_std:
        divisor = stats.std.clamp(min=least_std) + epsilon
        advantages = torch.where(advantages != 0, advantages / divisor, 0.0)
    divisor_alone = 1 + epsilon if norm_by_std else 1.0
    advantages = settle_singletons(stats.size, advantages, batch.rewards / divisor_alone, singleton)
    return Estimate("row", advantages[batch.row_trajectory])


@estimator("grpo_passk", scope="group")
def grpo_passk(batch: PackedBatch, *, norm_by_std: bool = True, epsilon: NotNegative = 1e-6) -> Estimate:
    """A_best = (r_best - r_second) / (std(r_g) + epsilon), 0 for all others; std with ddof 1.

    Reinforces only the best rollout of a group, for pass@k (Tang et al., arXiv:2503.19595). norm_by_std False: A_best =
    r_best - r_second. Ties for the best give 0, and so do groups of one (verl raises). One value per row [R] float64.
    """
    offsets, group, trained = batch.group_offsets, batch.trajectory_group, ~batch.baseline
    counted = torch.where(trained, batch.rewards, -torch.inf)
    best = counted == segment_max(counted, offsets)[group]
    index = torch.arange(len(counted), device=batch.device).double()
    first = segment_min(torch.where(best, index, torch.inf), offsets)[group] == index
    without_first = torch.where(first, -torch.inf, counted)
    lead = batch.rewards - segment_max(without_first, offsets)[group]
    stats = moments(batch.rewards, offsets, trained)
    if norm_by_std:  # after a tie the std may be 0
        lead = torch.where(lead > 0, lead / (stats.std + epsilon), 0.0)
    advantages = torch.where(first & (stats.size > 1), lead, 0.0)
    return Estimate("row", advantages[batch.row_trajectory])


@estimator("rloo", scope="group")
def rloo(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """A_i = r_i - mean of the group's other rewards = (r_i - mean(r_g)) * n / (n - 1).

    Ahmadian et al., arXiv:2402.14740, eq. 8. A group of one gives 0; singleton "raw" keeps its reward, as verl's rloo
    (verl's vectorized form: 0). One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    advantages = stats.centred * stats.size / (stats.size - 1).clamp(min=1)
    advantages = settle_singletons(stats.size, advantages, batch.rewards, singleton)
    return Estimate("row", advantages[batch.row_trajectory])


@estimator("rloo_normalized", scope="batch")
def rloo_normalized(batch: PackedBatch, *, epsilon: NotNegative = 1e-4) -> Estimate:
    """RLOO's advantages, less their mean over the batch's trajectories, over their std + epsilon (ddof 1), as TRL.

    Trajectories alone in their group have 0 and do not count. One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    counted = ~batch.baseline & (stats.size > 1)
    advantages = stats.centred * stats.size / (stats.size - 1).clamp(min=1)
    normalised = normalise(
        advantages, batch.group_offsets, mean="batch", std="batch", epsilon=epsilon, weight=counted.double()
    )
    return Estimate("row", torch.where(counted, normalised, 0.0)[batch.row_trajectory])


@estimator("maxrl", scope="group")
def maxrl(
    batch: PackedBatch,
    *,
    epsilon: NotNegative = 0.0,
    negative_means: bool = False,
    singleton: Singleton = "zero",
) -> Estimate:
    """A_i = (r_i - mean(r_g)) / (mean(r_g) + epsilon); 0 where the mean is not positive (prime-rl).

    Rarely solved prompts weigh more.

    Args:
      negative_means: divide by negative means too, which reverses signs (SkyRL).
      singleton: the advantage in a group of one: "zero", or "raw": its reward.

    Returns:
      One value per row [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    defined = (stats.mean + epsilon != 0) if negative_means else stats.mean > 0
    advantages = torch.where(defined & (stats.centred != 0), stats.centred / (stats.mean + epsilon), 0.0)
    advantages = settle_singletons(stats.size, advantages, batch.rewards, singleton)
    return Estimate("row", advantages[batch.row_trajectory])


@estimator("opo", scope="group")
def opo(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """A_i = r_i - sum_j(len_j * r_j) / sum_j(len_j) over the group; len = trainable tokens.

    Hao et al., arXiv:2505.23585. A group of one gives 0 (singleton "raw", as verl: its reward), and so does a group
    without trainable tokens (verl: NaN). One value per row [R] float64.
    """
    offsets = batch.group_offsets
    length = segment_sum(batch.row_trainable, batch.row_offsets)
    counted = (~batch.baseline).double()
    size = segment_sum(counted, offsets)[batch.trajectory_group]
    stats = moments(batch.rewards, offsets, length * counted)
    advantages = settle_singletons(size, stats.centred, batch.rewards, singleton)
    advantages = torch.where(length > 0, advantages, 0.0)
    return Estimate("row", advantages[batch.row_trajectory])


@estimator("gpg", scope="batch")
def gpg(
    batch: PackedBatch,
    *,
    f_norm: Positive = 1.0,
    counted: Literal["advantages", "rewards"] = "advantages",
    singleton: Singleton = "zero",
) -> Estimate:
    """A_i = alpha * (r_i - mean(r_g)) / f_norm, alpha = B / (number of trajectories with a signal).

    Chu et al., arXiv:2504.02546. B is the number of trajectories in the batch, without baseline members.

    Args:
      counted: what is a signal: a centred reward that is not 0, or "rewards": a reward that is not 0 (verl).
      singleton: the advantage in a group of one: "zero", or "raw": alpha / f_norm times its reward (verl).

    Returns:
      One value per row [R] float64.
    """
    trained = ~batch.baseline
    stats = moments(batch.rewards, batch.group_offsets, trained)
    centred = settle_singletons(stats.size, stats.centred, batch.rewards, singleton)
    signal = (batch.rewards if counted == "rewards" else centred) != 0
    total = segment_sum(trained, whole(centred))
    alpha = total / segment_sum(signal & trained, whole(centred)).clamp(min=1)
    return Estimate("row", (alpha * centred / f_norm)[batch.row_trajectory])


@estimator("gdpo", scope="batch")
def gdpo(
    batch: PackedBatch,
    *,
    weights: dict[str, float] | None = None,
    epsilon: NotNegative = 1e-4,
    norm_by_std: bool = True,
    singleton: Singleton = "zero",
    whiten_over: Literal["trajectories", "tokens"] = "trajectories",
) -> Estimate:
    """A_i = z(sum_k w_k * z_k), z_k = (r_k - mean(group)) / (std(group) + epsilon), outer z the same over the batch.

    arXiv:2601.05242. Unlike GRPO on the sum, a reward with little spread in a group counts as much as the others. std
    has ddof 1; a group of equal rewards gives 0.

    Args:
      batch: with named rewards (`components`).
      weights: name -> w_k; None = 1 for all.
      norm_by_std: False leaves out std(group).
      singleton: z_k in a group of one: "zero", or "raw": r_k, over 1 + epsilon if norm_by_std, as verl.
      whiten_over: what counts once in the outer z: trajectories (TRL), or trainable tokens, so that long rows weigh
        more; then its variance has 1e-8 added under the root instead of epsilon to the std (verl).

    Returns:
      One value per row [R] float64. Raises TrajectoryError for a name that the trajectories lack.
    """
    counted = (~batch.baseline).double()
    size = segment_sum(counted, batch.group_offsets)[batch.trajectory_group]
    divisor_alone = 1 + epsilon if norm_by_std else 1.0
    total = torch.zeros_like(batch.rewards)
    for name, weight in (weights or dict.fromkeys(batch.components, 1.0)).items():
        if name not in batch.components:
            present = ", ".join(batch.components) or "none"
            raise TrajectoryError(f"gdpo weights name {name!r}, the trajectories have {present}")
        rewards = batch.components[name]
        scaled = normalise(
            rewards,
            batch.group_offsets,
            mean="group",
            std="group" if norm_by_std else None,
            epsilon=epsilon,
            weight=counted,
        )
        total = total + weight * settle_singletons(size, scaled, rewards / divisor_alone, singleton)
    if whiten_over == "tokens":
        rows_counted = torch.where(batch.baseline[batch.row_trajectory], 0, batch.row_trainable)
        return Estimate("row", whiten_weighted(total[batch.row_trajectory], rows_counted))
    advantages = normalise(
        total, batch.group_offsets, mean="batch", std="batch", epsilon=epsilon, weight=counted
    )
    return Estimate("row", advantages[batch.row_trajectory])


@estimator("remax", scope="group")
def remax(batch: PackedBatch) -> Estimate:
    """A_i = r_i - b_g, b_g = mean reward of the group's baseline members (role "baseline").

    Li et al., arXiv:2310.10505. A group without a baseline member gives 0. The return is the reward. One value per row
    [R] float64.
    """
    stats = moments(batch.rewards, batch.group_offsets, batch.baseline)
    advantages = torch.where(stats.size > 0, stats.centred, 0.0)
    return Estimate("row", advantages[batch.row_trajectory], batch.rewards[batch.row_trajectory])


@estimator("remax_to_go", scope="group", level="token", needs=("response_mask", "token_level_rewards"))
def remax_to_go(batch: PackedBatch) -> Estimate:
    """A_t = G_t - b_g, G_t = R_t + G_{t+1}: a KL in the rewards counts for the tokens up to it (verl).

    Without a KL the same numbers as `remax`. [N] in the dtype of the rewards.
    """
    returns = reverse_scan(batch.column("token_level_rewards"), 1.0, batch.trainable_tokens)
    stats = moments(batch.rewards, batch.group_offsets, batch.baseline)
    baseline = (batch.rewards - stats.centred)[batch.row_trajectory]
    has_none = (stats.size == 0)[batch.row_trajectory]
    advantages = returns - expand(batch, "row", baseline)
    return Estimate("token", advantages.masked_fill(expand(batch, "row", has_none) != 0, 0), returns)


@estimator("reinforce", scope="row", level="token", needs=("response_mask", "token_level_rewards"))
def reinforce(batch: PackedBatch, *, gamma: Share = 1.0, mask_aware: bool = True) -> Estimate:
    """G_t = R_t + gamma * G_{t+1}; A_t = G_t (Williams 1992).

    Args:
      batch: with response_mask and token_level_rewards [N].
      mask_aware: time advances on trainable tokens only, so observations between two turns do not discount. False
        advances on every token (ROLL).

    Returns:
      [N] in the dtype of the rewards.
    """
    tokens = batch.trainable_tokens if mask_aware else batch.all_tokens
    return Estimate("token", reverse_scan(batch.column("token_level_rewards"), gamma, tokens))


@estimator(
    "reinforce_plus_plus", scope="batch", level="token", needs=("response_mask", "token_level_rewards")
)
def reinforce_plus_plus(
    batch: PackedBatch, *, gamma: Share = 1.0, reset_at_observations: bool = False
) -> Estimate:
    """A = whiten(G) over the batch, G_t = R_t + gamma * G_{t+1} over trainable tokens; returns G (arXiv:2501.03262).

    reset_at_observations: G restarts at every masked token, so an episode's reward reaches only its last turn (verl).
    Reads response_mask and token_level_rewards [N], gives [N].
    """
    tokens = batch.trainable_tokens
    if not reset_at_observations:
        returns = reinforce(batch, gamma=gamma).advantages
    else:
        following = tokens.mask.roll(-1) & ~ends_row(tokens)
        passed_on = gamma * following.to(torch.float64)
        returns = reverse_scan(batch.column("token_level_rewards"), passed_on, batch.all_tokens)
    return Estimate("token", whiten(returns, tokens), returns)


@estimator("reinforce_plus_plus_baseline", scope="batch")
def reinforce_plus_plus_baseline(batch: PackedBatch, *, singleton: Singleton = "zero") -> Estimate:
    """A_i = whiten(r_i - mean(r_g)) over the batch, a row counted once per trainable token; [R] float64.

    Hu et al., arXiv:2501.03262. A group of one has 0 before whitening (singleton "raw", as verl: its reward).
    """
    stats = moments(batch.rewards, batch.group_offsets, ~batch.baseline)
    centred = settle_singletons(stats.size, stats.centred, batch.rewards, singleton)
    rows = centred[batch.row_trajectory]
    return Estimate("row", whiten_weighted(rows, batch.row_trainable))
