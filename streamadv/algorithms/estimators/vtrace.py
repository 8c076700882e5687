"""V-trace: values and advantages corrected for data from another policy (Espeholt et al., arXiv:1802.01561)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import blocks, next_in_row, reverse_scan

NEEDS = ("response_mask", "values", "token_level_rewards", "old_log_probs", "rollout_log_probs")


@estimator("vtrace", scope="row", level="token", needs=NEEDS)
def vtrace(
    batch: PackedBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    pg_rho_clip: float = 1.0,
) -> Estimate:
    """rho_t = pi_old / pi_rollout; c_t = lam * min(1, rho_t); rho'_t = min(rho_clip, rho_t).

    e_t = rho'_t (R_t + gamma V_{t+1} - V_t) + gamma c_t e_{t+1}; returns vs_t = V_t + e_t;
    A_t = min(pg_rho_clip, rho_t) (R_t + gamma (lam vs_{t+1} + (1 - lam) V_{t+1}) - V_t). t runs over
    trainable tokens; the value after the last one is 0. The log-ratio is held in -20 .. 20.
    """
    mask = batch.column("response_mask").bool()
    ratio = (batch.column("old_log_probs") - batch.column("rollout_log_probs")).double()
    rho = torch.where(mask, ratio.clamp(-20, 20), 0.0).exp()
    errors, advantages = vtrace_scan(
        batch.column("token_level_rewards"),
        batch.column("values"),
        rho,
        gamma,
        mask,
        batch.cu_seqlens,
        lam=lam,
        rho_clip=rho_clip,
        pg_rho_clip=pg_rho_clip,
    )
    return Estimate("token", advantages, errors + batch.column("values"))


def vtrace_scan(
    rewards: Tensor,
    values: Tensor,
    rho: Tensor,
    discount: Tensor | float,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    lam: float,
    rho_clip: float,
    pg_rho_clip: float,
) -> tuple[Tensor, Tensor]:
    """(e_t, A_t) over packed rows, all [N]; masked tokens take no part and carry e_t through."""
    cut = blocks(cu_seqlens, len(values))
    values = values.to(torch.float64)

    def upcoming(column: Tensor) -> Tensor:
        """The column at the next trainable token of the row, 0 after the last."""
        at_or_after = reverse_scan(torch.where(mask, column, 0.0), (~mask).double(), cut)
        return next_in_row(at_or_after, cu_seqlens)

    next_value = upcoming(values)
    delta = rho.clamp(max=rho_clip) * (rewards + discount * next_value - values)
    carry = torch.where(mask, discount * lam * rho.clamp(max=1.0), torch.ones_like(values))
    errors = reverse_scan(torch.where(mask, delta, 0.0), carry, cut)
    target = next_value + lam * upcoming(errors)
    advantages = rho.clamp(max=pg_rho_clip) * (rewards + discount * target - values)
    return errors, torch.where(mask, advantages, 0.0)
