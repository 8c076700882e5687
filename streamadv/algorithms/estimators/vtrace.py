"""V-trace: values and advantages corrected for data from another policy (Espeholt et al., arXiv:1802.01561)."""

from __future__ import annotations

from torch import Tensor

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import Blocks, add_upcoming, over_blocks, scan, upcoming
from ..trainable import trainable

NEEDS = ("response_mask", "values", "token_level_rewards", "old_log_probs", "rollout_log_probs")


@estimator("vtrace", scope="row", level="token", needs=NEEDS)
def vtrace(
    batch: PackedBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    pg_rho_clip: float = 1.0,
    alpha: float = 1.0,
) -> Estimate:
    """rho_t = pi_old / pi_rollout; c_t = lam * min(1, rho_t); rho'_t = min(rho_clip, rho_t).

    e_t = rho'_t (R_t + gamma V_{t+1} - V_t) + gamma c_t e_{t+1}; returns vs_t = V_t + e_t;
    A_t = min(pg_rho_clip, rho_t) (R_t + gamma (lam vs_{t+1} + (1 - lam) V_{t+1}) - V_t). t runs over
    trainable tokens; the value after the last one is 0. The log-ratio is held in -20 .. 20. alpha below 1
    is leaky V-trace: every min(x, rho) in e_t becomes (1 - alpha) rho + alpha min(x, rho).
    """

    def slab(part: Blocks, reward: Tensor, value: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
        rho = ratio.clamp_(-20, 20).exp_()
        bootstrap = upcoming(value, part)
        errors = vtrace_errors(
            reward, value, bootstrap, rho, gamma, part, lam=lam, rho_clip=rho_clip, alpha=alpha
        )
        target = add_upcoming(bootstrap, errors, lam, part)
        advantages = rho.clamp_(max=pg_rho_clip) * (reward + gamma * target - value)
        return advantages, errors + value

    log_ratio = batch.column("old_log_probs") - batch.column("rollout_log_probs")
    columns = [batch.column("token_level_rewards"), batch.column("values"), log_ratio]
    advantages, returns = over_blocks(slab, columns, trainable(batch).blocks, results=2)
    return Estimate("token", advantages, returns)


def vtrace_errors(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    rho: Tensor,
    discount: Tensor | float,
    cut: Blocks,
    *,
    lam: float,
    rho_clip: float,
    alpha: float = 1.0,
) -> Tensor:
    """e_t = vs_t - V_t, everything in block layout."""
    clipped, cut_off = (
        (1 - alpha) * rho + alpha * rho.clamp(max=limit) if alpha != 1 else rho.clamp(max=limit)
        for limit in (rho_clip, 1.0)
    )
    delta = clipped * (rewards + discount * next_values - values)
    return scan(delta, discount * lam * cut_off, cut)
