"""What other frameworks do about data from older policies: masks, proximal log-probs, version statistics.

All tensors have one shape, packed [N] or padded [B, T], unless said otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from ..errors import SettingError
from .arguments import AnyMask, AnyShape, Elements, Mask, Positive, Threshold, Tokens, Values, Versions


def m2po_mask(log_ratio: AnyShape, mask: AnyMask, threshold: Positive) -> Tensor:
    """`mask` without the tokens of largest squared log-ratio, so that the mean of the rest is below `threshold`.

    M2PO (arXiv:2510.01161) as in AReaL; statistics over everything passed in. At least one token stays.
    """
    chosen = (mask != 0).reshape(-1).nonzero().squeeze(1)
    squares = log_ratio.to(torch.float64).square().reshape(-1)[chosen]
    ascending, order = torch.sort(squares, stable=True)
    mean = torch.cumsum(ascending, 0) / torch.arange(1, len(chosen) + 1, device=mask.device)
    kept = order[: max(int((mean < threshold).sum()), 1)]
    result = torch.zeros_like(mask).reshape(-1)
    result[chosen[kept]] = mask.reshape(-1)[chosen[kept]]
    return result.view(mask.shape)


def off_policy_sequence_mask(
    advantages: Annotated[Tensor, Values(("B", 1), ("B", "T"))],
    log_probs: Tokens,
    behaviour_log_probs: Tokens,
    mask: Mask,
    threshold: Threshold,
) -> Tensor:
    """[B, T] bool: False where the advantage is negative and the row's mean(behaviour - new) exceeds `threshold`.

    Tokens the policy has moved away from are not pushed down further (DeepSeek-V3.2, arXiv:2512.02556;
    TRL, slime). advantages [B, T] or [B, 1]; the others [B, T].
    """
    counted = mask != 0
    drift = torch.where(counted, (behaviour_log_probs - log_probs).to(torch.float64), 0.0).sum(1)
    drift = drift / counted.sum(1).clamp(min=1)
    return ((advantages >= 0) | (drift <= threshold)[:, None]).expand_as(mask)


def proximal_log_probs(
    behaviour_log_probs: Elements,
    log_probs: Elements,
    versions: Versions,
    current_version: int,
    method: Literal["loglinear", "linear", "rollout"] = "loglinear",
) -> Tensor:
    """Log-probs of the policy one version back, without running it (AReaL): between behaviour and current.

    alpha = (current - 1 - v) / (current - v) held in 0 .. 1, 0 where versions v is negative or not older.
    loglinear: (1 - alpha) * behaviour + alpha * current; linear: the same with probabilities; rollout: the
    behaviour's. Raises SettingError for another method.
    """
    if method == "rollout":
        return behaviour_log_probs
    age = (current_version - versions).to(torch.float64)
    alpha = torch.where((versions >= 0) & (age > 0), (age - 1) / age.clamp(min=1), 0.0).clamp(0, 1)
    old, new = behaviour_log_probs.to(torch.float64), log_probs.to(torch.float64)
    if method == "loglinear":
        return (old + alpha * (new - old)).to(torch.float32)
    if method == "linear":
        return ((1 - alpha) * old.exp() + alpha * new.exp() + 1e-10).log().to(torch.float32)
    raise SettingError(f"proximal method {method!r} is unknown: choose one of loglinear, linear, rollout")


def version_staleness(versions: Versions, mask: AnyMask, current_version: int) -> dict[str, float]:
    """Average, greatest and least age of trainable tokens, in policy versions; {} without any.

    staleness_theta counts from the policy being trained, staleness_proximal from the one before it.
    """
    known = versions[(mask != 0) & (versions >= 0)].to(torch.float64)
    if not len(known):
        return {}
    metrics = {
        "n_valid_generated_tokens": float(len(known)),
        "v_theta": float(current_version),
        "v_proximal": float(current_version - 1),
    }
    for name, reference in (("proximal", current_version - 1), ("theta", current_version)):
        age = reference - known
        metrics[f"sample_staleness_{name}_avg"] = age.mean().item()
        metrics[f"sample_staleness_{name}_max"] = age.max().item()
        metrics[f"sample_staleness_{name}_min"] = age.min().item()
    return metrics
