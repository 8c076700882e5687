"""V-trace: values and advantages corrected for data from another policy (Espeholt et al., arXiv:1802.01561)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...extras import torch
from .. import kernels
from ..packed import PackedBatch
from ..registry import Estimate, Positive, Share, estimator
from ..scan import scan_blocks, upcoming
from ..trainable import Trainable

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = ("response_mask", "values", "token_level_rewards", "old_log_probs", "rollout_log_probs")


@estimator("vtrace", scope="row", level="token", needs=NEEDS)
def vtrace(
    batch: PackedBatch,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    rho_clip: Positive = 1.0,
    pg_rho_clip: Positive = 1.0,
    alpha: float = 1.0,
) -> Estimate:
    """e_t = rho'_t (R_t + gamma V_{t+1} - V_t) + gamma c_t e_{t+1}; returns vs_t = V_t + e_t.

    A_t = min(pg_rho_clip, rho_t) (R_t + gamma (lam vs_{t+1} + (1 - lam) V_{t+1}) - V_t), with rho_t = pi_old /
    pi_rollout, rho'_t = min(rho_clip, rho_t), c_t = lam * min(1, rho_t). t runs over trainable tokens; the value after
    the last one is 0. The log-ratio is held in -20 .. 20.

    Args:
      batch: with response_mask, values, token_level_rewards, old_log_probs, rollout_log_probs [N].
      rho_clip: bound of the ratio in the value target.
      pg_rho_clip: bound of the ratio in the advantage.
      alpha: below 1 is leaky V-trace: every min(x, rho) in e_t becomes (1 - alpha) rho + alpha min(x, rho).

    Returns:
      Advantages and returns [N] float32.
    """
    advantages, returns = vtrace_scan(
        batch.column("token_level_rewards"),
        batch.column("values"),
        batch.column("old_log_probs") - batch.column("rollout_log_probs"),
        batch.trainable_tokens,
        gamma,
        lam=lam,
        rho_clip=rho_clip,
        pg_rho_clip=pg_rho_clip,
        alpha=alpha,
    )
    return Estimate("token", advantages, returns)


def vtrace_scan(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    tokens: Trainable,
    gamma: float,
    *,
    lam: float,
    rho_clip: float,
    pg_rho_clip: float,
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [N] float32: V-trace of columns [N] over the tokens that count, 0 elsewhere."""
    if kernels.on_cpu(values):
        arrays = map(kernels.as_array, (rewards, values, log_ratio, tokens.mask, tokens.offsets))
        options = map(float, (gamma, lam, rho_clip, pg_rho_clip, alpha))
        advantages, targets = (np.empty(len(values), np.float32) for _ in range(2))
        kernels.vtrace(*arrays, *options, advantages, targets)
        return torch.from_numpy(advantages), torch.from_numpy(targets)
    v_t, rho = values.to(torch.float64), log_ratio.to(torch.float64).clamp(-20, 20).exp()
    bootstrap = upcoming(v_t, tokens)
    e_t = vtrace_errors(rewards, v_t, bootstrap, rho, gamma, tokens, lam=lam, rho_clip=rho_clip, alpha=alpha)
    target = bootstrap + lam * upcoming(e_t, tokens)
    a_t = rho.clamp(max=pg_rho_clip) * (rewards + gamma * target - v_t)
    return tokens.only(a_t).to(torch.float32), tokens.only(e_t + v_t).to(torch.float32)


def vtrace_errors(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    rho: Tensor,
    discount: Tensor | float,
    tokens: Trainable,
    *,
    lam: float,
    rho_clip: float,
    alpha: float = 1.0,
) -> Tensor:
    """e_t = vs_t - V_t [N] float64, in torch; a token that does not count takes the e of the next one that does."""
    clipped, cut = ((1 - alpha) * rho + alpha * rho.clamp(max=limit) for limit in (rho_clip, 1.0))
    delta = clipped * (rewards + discount * next_values - values)
    return scan_blocks(delta, discount * lam * cut, tokens)
