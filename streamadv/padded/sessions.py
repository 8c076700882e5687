"""GRPO over sessions of several rows, as verl has it for agents."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ..algorithms.arguments import Labels, Mask, NotNegative, TokenRewards, Whole
from ..algorithms.quirks import PeerQuirks
from ..algorithms.token_rewards import row_rewards
from .entrance import checked, unchecked
from .grouped import compute_grpo_outcome_advantage
from .layout import label_numbers, pair_numbers


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
    keys = session_numbers.tolist()
    positions = numbers.tolist()
    last: dict[int, int] = {}
    for row, key in enumerate(keys):
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
    by_session = torch.where((response_mask != 0).any(1)[rows], values[:, 0], 0.0)
    advantages = by_session[session_numbers.to(rows.device)][:, None] * (response_mask != 0)
    return advantages, advantages
