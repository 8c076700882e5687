"""KL between policy and reference from the log-probabilities of the sampled tokens.

Estimators k1, k2, k3: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from ..errors import SettingError

KLPenalty = Literal["k1", "k2", "k3", "kl", "abs", "mse", "low_var_kl"]
KL_PENALTIES: Final[tuple[str, ...]] = get_args(KLPenalty)


def approx_kl(log_probs: Tensor, ref_log_probs: Tensor, penalty: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy, reference), same shape and dtype as the inputs.

    With d = log_probs - ref_log_probs: k1 (kl) = d; abs = |d|; k2 (mse) = d^2 / 2;
    k3 (low_var_kl) = exp(-d) - 1 + d, with d held in -20 .. 20 and the result in -10 .. 10 as in verl.
    ROLL holds only the result, which gives the same numbers. Raises SettingError for another name.
    """
    difference = log_probs - ref_log_probs
    if penalty in ("k1", "kl"):
        return difference
    if penalty == "abs":
        return difference.abs()
    if penalty in ("k2", "mse"):
        return 0.5 * difference.square()
    if penalty in ("k3", "low_var_kl"):
        back = (-difference).clamp(-20, 20)
        return (torch.expm1(back) - back).clamp(-10, 10)
    raise SettingError(f"kl.penalty {penalty!r} is unknown: choose one of {', '.join(KL_PENALTIES)}")
