"""Estimators over prompt groups on padded tensors, under verl's names: [B, T] in, (advantages, returns) [B, T] out.

A row's reward is the sum of its token rewards, and its advantage follows from those of its group; both results are the
same. `index` and `peer_quirks` as in `estimators`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms.arguments import (
    Call,
    Labels,
    Mask,
    NotNegative,
    Number,
    PeerQuirks,
    Positive,
    TokenRewards,
    Values,
    Whole,
)
from ..algorithms.estimators.outcomes import Singleton, gdpo
from ..algorithms.registry import get_estimator
from ..algorithms.rewards import row_rewards
from ..errors import ArgumentError, OptionError
from ..messages import brief
from .entrance import check_numbers, checked, unchecked
from .estimators import Pair
from .layout import as_batch, label_numbers, padded_tokens, pair_numbers, ungrouped
from .rewards import group_mean_std, group_scores


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
    options = {"norm_by_std": norm_adv_by_std_in_grpo, "epsilon": epsilon, **_alone(peer_quirks)}
    return _outcome("grpo", token_level_rewards, response_mask, index, options)


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
        scores = token_level_rewards.nan_to_num().sum(1)
        mean, std, _ = unchecked(group_mean_std)(scores, index, epsilon, peer_quirks=peer_quirks)
        return _on_tokens((scores - mean) / (std + epsilon if norm_adv_by_std_in_grpo else 1), response_mask)
    least_std = 0.0 if peer_quirks else epsilon**0.5
    options = {"norm_by_std": norm_adv_by_std_in_grpo, "epsilon": epsilon, "least_std": least_std}
    return _outcome("grpo", token_level_rewards, response_mask, index, options | _alone(peer_quirks))


@checked
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    epsilon: NotNegative = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> Pair:
    """(r_best - r_second) / (std(group) + epsilon) for a group's best row; 0 for others and alone (verl raises)."""
    options = {"norm_by_std": norm_adv_by_std_in_grpo, "epsilon": epsilon}
    return _outcome("grpo_passk", token_level_rewards, response_mask, index, options)


@checked
def compute_rloo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """r minus the mean of the group's other rows; a group of one gives 0 (verl's rloo: its reward, vectorized: 0)."""
    return _outcome("rloo", token_level_rewards, response_mask, index, _alone(peer_quirks))


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
    advantages, returns = _outcome("opo", token_level_rewards, response_mask, index, _alone(peer_quirks))
    if peer_quirks is None:
        return advantages, returns
    lengths, size = group_scores(response_mask.sum(1), None, index)
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
    options = {"f_norm": f_norm, "counted": "rewards" if peer_quirks else "advantages"}
    return _outcome("gpg", token_level_rewards, response_mask, index, options | _alone(peer_quirks))


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
    options = {"epsilon": epsilon, "negative_means": negative_means, "singleton": singleton}
    return _outcome("maxrl", token_level_rewards, response_mask, index, options)


@checked
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """r - mean(group) on trainable tokens, whitened over them; a group of one has 0 before whitening (verl: r)."""
    name = "reinforce_plus_plus_baseline"
    return _outcome(name, token_level_rewards, response_mask, index, _alone(peer_quirks))


@checked
def compute_gdpo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    epsilon: NotNegative = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Mapping[str, Any] | None = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: object | None = None,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> Pair:
    """sum_k w_k z_k on trainable tokens, whitened over them; z_k = (r_k - mean(group)) / (std(group) + epsilon).

    GDPO, arXiv:2601.05242, in verl's form; `estimators.gdpo` with whiten_over "tokens".

    Args:
      token_level_rewards: [B, T]; a row's sum is the only reward if config and non_tensor_batch are None.
      config: gdpo_reward_keys, the names of the rewards, and gdpo_reward_weights, one number each (None = 1).
      non_tensor_batch: by name, one reward per row.
      batch: verl's, which looks up in it where a row ends; not read.

    A group of one has z_k = 0 (verl: r_k / (1 + epsilon)). Weights beyond the names raise (verl: ignored). Raises
    OptionError for names or weights that are missing, ArgumentError for a reward without numbers.
    """
    weights = {"sum": 1.0}
    components = {"sum": row_rewards(token_level_rewards, response_mask)}
    if config is not None or non_tensor_batch is not None:
        weights = _weights(config or {}, peer_quirks)
        components = _components(list(weights), non_tensor_batch or {}, response_mask)
    packed, order = as_batch(response_mask, index=index)
    rows = gdpo(
        replace(packed, components={name: values.double()[order] for name, values in components.items()}),
        weights=weights,
        epsilon=epsilon,
        norm_by_std=norm_adv_by_std_in_grpo,
        whiten_over="tokens",
        **_alone(peer_quirks),
    ).advantages
    return _on_tokens(ungrouped(rows, order), response_mask)


@checked
def compute_multi_trajectory_grpo_advantage(
    token_level_rewards: TokenRewards,
    response_mask: Mask,
    index: Labels,
    sessions: Labels,
    numbers: Annotated[Tensor, Whole(("B",))],
    epsilon: NotNegative = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, Tensor]:
    """GRPO over the last rows of sessions; all rows of a session have its advantage, on their own trainable tokens.

    verl: `compute_advantage_for_multi_trajectories`, which reads the three labels from keys "index_session_number". The
    reward of a session is that of its last row.

    Args:
      index: [B], the prompt of each row; sessions of one prompt are a group.
      sessions: [B], the session of each row; equal labels under different prompts are different sessions.
      numbers: [B] whole numbers; the row of the greatest is its session's last, the first of several.

    A session whose last row has no trainable token has advantage 0, and its reward counts in the group.
    """
    session_numbers = pair_numbers(index, sessions)
    positions = numbers.tolist()
    last: dict[int, int] = {}
    for row, key in enumerate(session_numbers.tolist()):
        if positions[row] > positions[last.setdefault(key, row)]:
            last[key] = row
    rows = torch.tensor(list(last.values()), dtype=torch.int64, device=response_mask.device)
    scores = row_rewards(token_level_rewards, response_mask)[rows]
    values, _ = unchecked(compute_grpo_outcome_advantage)(
        scores[:, None],
        torch.ones_like(scores, dtype=torch.bool)[:, None],
        label_numbers(index)[list(last.values())],
        epsilon,
        norm_adv_by_std_in_grpo,
        peer_quirks=peer_quirks,
    )
    by_session = torch.where(response_mask.any(1)[rows], values[:, 0], 0.0)
    return _on_tokens(by_session[session_numbers.to(rows.device)], response_mask)


def _alone(peer_quirks: PeerQuirks | None) -> dict[str, Any]:
    """The option of an estimator that says what a group of one gives."""
    return {"singleton": "raw" if peer_quirks else "zero"}


def _outcome(
    estimator: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels,
    options: Mapping[str, Any],
) -> Pair:
    """An outcome estimator over row sums of the rewards."""
    scores = row_rewards(token_level_rewards, response_mask)
    batch, order = as_batch(response_mask, rewards=scores, index=index)
    rows = get_estimator(estimator).function(batch, **options).advantages
    return _on_tokens(ungrouped(rows, order), response_mask)


def _on_tokens(rows: Tensor, mask: Tensor) -> Pair:
    """`rows` [B] on the trainable tokens [B, T] of their row, as advantages and as returns."""
    advantages = padded_tokens(mask).spread(rows).view(mask.shape)
    return advantages, advantages


def _weights(config: Mapping[str, Any], peer_quirks: PeerQuirks | None) -> dict[str, float]:
    names = config.get("gdpo_reward_keys")
    if not names or isinstance(names, str) or not isinstance(names, Sequence):
        raise OptionError(f"config gdpo_reward_keys is {brief(names)}, needs a list of names")
    weights = config.get("gdpo_reward_weights")
    if weights is None:
        weights = [1.0] * len(names)
    if len(weights) < len(names) or (len(weights) > len(names) and not peer_quirks):
        raise OptionError(f"config gdpo_reward_weights has {len(weights)} numbers for {len(names)} rewards")
    take = Number().take
    return {
        str(name): take("gdpo_reward_weights", weight) for name, weight in zip(names, weights, strict=False)
    }


def _components(names: Sequence[str], columns: Mapping[str, Any], mask: Tensor) -> dict[str, Tensor]:
    call = Call(sizes={"B": (len(mask), "response_mask")})
    components = {}
    for name in names:
        if name not in columns:
            present = ", ".join(map(str, columns)) or "nothing"
            raise ArgumentError(f"non_tensor_batch has no {name}, it has {brief(present)}: add it")
        values = columns[name]
        if not isinstance(values, Tensor):
            try:
                values = torch.from_numpy(np.array(values, np.float64))
            except (TypeError, ValueError):
                raise ArgumentError(f"non_tensor_batch {name} needs one number per row") from None
        components[name] = Values(("B",)).take(f"non_tensor_batch[{name}]", values.to(mask.device), call)
    check_numbers(call)
    return components
