"""V-trace: values and advantages corrected for data from another policy (Espeholt et al., arXiv:1802.01561)."""

from __future__ import annotations

from torch import Tensor

from ..packed import PackedBatch
from ..registry import Estimate, estimator
from ..scan import Blocks, arrange, put_back, scan, upcoming
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
) -> Estimate:
    """rho_t = pi_old / pi_rollout; c_t = lam * min(1, rho_t); rho'_t = min(rho_clip, rho_t).

    e_t = rho'_t (R_t + gamma V_{t+1} - V_t) + gamma c_t e_{t+1}; returns vs_t = V_t + e_t;
    A_t = min(pg_rho_clip, rho_t) (R_t + gamma (lam vs_{t+1} + (1 - lam) V_{t+1}) - V_t). t runs over
    trainable tokens; the value after the last one is 0. The log-ratio is held in -20 .. 20.
    """
    cut = trainable(batch).blocks
    log_ratio = batch.column("old_log_probs") - batch.column("rollout_log_probs")
    rho = arrange(log_ratio, cut).clamp_(-20, 20).exp_()
    value = arrange(batch.column("values"), cut)
    rewards, bootstrap = arrange(batch.column("token_level_rewards"), cut), upcoming(value, cut)
    errors = vtrace_errors(rewards, value, bootstrap, rho, gamma, cut, lam=lam, rho_clip=rho_clip)
    target = bootstrap.add_(upcoming(errors, cut), alpha=lam)
    advantages = rho.clamp_(max=pg_rho_clip) * (rewards + gamma * target - value)
    return Estimate("token", put_back(advantages, cut), put_back(errors + value, cut))


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
) -> Tensor:
    """e_t = vs_t - V_t, everything in the block layout of `cut`."""
    delta = rho.clamp(max=rho_clip) * (rewards + discount * next_values - values)
    return scan(delta, discount * lam * rho.clamp(max=1.0), cut)
