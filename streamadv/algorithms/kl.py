"""KL between policy and reference, from the log-probabilities of sampled tokens or from logits.

Estimators k1, k2, k3: http://joschu.net/blog/kl-approx.html. A new form is a name in `KLPenalty` and a branch in
`approx_kl`; chain and padded surface read both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np

from ..errors import SettingError
from ..extras import torch
from . import kernels

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import Elements, Logits, Measured, NotNegative, PeerQuirks, Positive
    from .segments import Trainable

KLPenalty = Literal[
    "k1", "k2", "k3", "kl", "abs", "mse", "low_var_kl",
    "k1+", "k2+", "k3+", "kl+", "abs+", "mse+", "low_var_kl+",
]  # fmt: skip
KL_PENALTIES: Final[tuple[str, ...]] = get_args(KLPenalty)

K3: Final = ("k3", "low_var_kl")


def approx_kl(log_probs: Elements, ref_log_probs: Elements, penalty: KLPenalty = "k1") -> Tensor:
    """Per-token estimate of KL(policy, reference).

    With d = log_probs - ref_log_probs: k1 (kl) = d; abs = |d|; k2 (mse) = d^2 / 2; k3 (low_var_kl) = exp(-d) - 1 + d,
    with d held in -20 .. 20 and the result in -10 .. 10 as in verl. ROLL bounds the result alone, which gives the same
    numbers. A name that ends in "+" has the value of the plain one and the gradient of k2, which is d: its mean over
    the policy's own samples is the gradient of the KL.

    Args:
      log_probs, ref_log_probs: any one shape; of tokens sampled by the policy.
      penalty: the estimator.

    Returns:
      The same shape and dtype. Differentiable.

    Raises SettingError for another penalty.
    """
    if penalty in KL_PENALTIES and penalty.endswith("+"):
        value = approx_kl(log_probs.detach(), ref_log_probs.detach(), penalty[:-1])  # type: ignore[arg-type]
        k2 = 0.5 * (log_probs - ref_log_probs).square()
        return value + (k2 - k2.detach()) if k2.requires_grad else value
    difference = log_probs - ref_log_probs
    if penalty in ("k1", "kl"):
        return difference
    if penalty == "abs":
        return difference.abs()
    if penalty in ("k2", "mse"):
        return 0.5 * difference.square()
    if penalty in K3:
        x = difference.neg_().clamp_(-20, 20)
        return (torch.expm1(x) - x).clamp_(-10, 10)
    raise SettingError(f"kl.penalty {penalty!r} is unknown: choose one of {', '.join(KL_PENALTIES)}")


def column_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    penalty: KLPenalty,
    tokens: Trainable,
    rewards: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`approx_kl` of columns [N] at the tokens that count, without gradient; on a CPU k3 is computed in float64.

    Returns ([N] float32: it, 0 at other tokens, or `rewards` [N] plus `factor` times it; its sum over each row, [R]
    float64).
    """
    if not kernels.on_cpu(log_probs) or penalty.removesuffix("+") not in K3:
        kl = tokens.only(approx_kl(log_probs.detach(), ref_log_probs.detach(), penalty).to(torch.float32))
        result = kl if rewards is None else (rewards + factor * kl).to(torch.float32)
        return result, tokens.row_sum(kl)
    array, sums = np.empty(len(log_probs), np.float32), np.empty(len(tokens.offsets) - 1)
    given = None if rewards is None else kernels.as_array(rewards)
    columns = map(kernels.as_array, (log_probs, ref_log_probs, *tokens))
    kernels.k3(*columns, given, float(factor), array, sums)
    return torch.from_numpy(array), torch.from_numpy(sums)


def full_kl(logits: Logits, ref_logits: Logits) -> Tensor:
    """sum_v p(v) (log p(v) - log q(v)) over the last axis: logits or log-probs [..., V] to [...]. Differentiable."""
    log_probs, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_probs.exp() * (log_probs - ref)).sum(-1)


def adapted_coefficient(
    coefficient: float,
    current_kl: Measured,
    target: Positive,
    horizon: Positive,
    n_steps: NotNegative,
    *,
    peer_quirks: PeerQuirks | None = None,
) -> float:
    """The adaptive KL coefficient after one batch (Ziegler et al., arXiv:1909.08593, section 2.2).

    coefficient * (1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon), at least 0. A NaN KL leaves the
    coefficient unchanged. ROLL's and verl's turn negative once n_steps exceeds 5 * horizon, and NaN with the KL.

    Args:
      current_kl: the batch's mean KL.
      target: the KL to hold.
      n_steps, horizon: how many trajectories the batch has, and over how many the coefficient adapts.

    Pure, so that the batch record can carry the coefficient and a redelivered batch changes nothing.
    """
    if math.isnan(current_kl):
        return math.nan if peer_quirks else coefficient
    error = min(max(current_kl / target - 1, -0.2), 0.2)
    adapted = coefficient * (1 + error * n_steps / horizon)
    return adapted if peer_quirks else max(adapted, 0.0)
