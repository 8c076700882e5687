"""GDPO on padded tensors, with verl's arguments: several rewards per row, each normalised by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms.arguments import Call, Labels, Mask, NotNegative, Number, TokenRewards, Values
from ..algorithms.estimators.gdpo import gdpo
from ..algorithms.quirks import PeerQuirks
from ..algorithms.token_rewards import row_rewards
from ..algorithms.trainable import spread_rows
from ..errors import ArgumentError, OptionError
from ..messages import brief
from .entrance import check_numbers, checked
from .estimators import Pair
from .layout import as_batch, ungrouped


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
    packed, order = as_batch(
        response_mask, rewards=next(iter(components.values())), index=index, counted=True
    )
    named = {name: values.double()[order] for name, values in components.items()}
    rows = gdpo(
        replace(packed, components=named),
        weights=weights,
        epsilon=epsilon,
        norm_by_std=norm_adv_by_std_in_grpo,
        singleton="raw" if peer_quirks else "zero",
        whiten_over="tokens",
    ).advantages
    advantages, _ = spread_rows(ungrouped(rows, order), response_mask.reshape(-1), packed.cu_seqlens)
    advantages = advantages.view(response_mask.shape)
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
