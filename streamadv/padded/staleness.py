"""Data from older policies, padded: a mask, proximal log-probs, statistics of versions (AReaL, TRL, slime)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from ..algorithms.arguments import AnyMask, Elements, Mask, Threshold, Tokens, Values, Versions
from ..errors import SettingError
from .entrance import checked


@checked
def off_policy_sequence_mask(
    advantages: Annotated[Tensor, Values(("B", 1), ("B", "T"))],
    log_probs: Tokens,
    behaviour_log_probs: Tokens,
    mask: Mask,
    threshold: Threshold,
) -> Tensor:
    """[B, T] bool: False where the advantage is negative and the row's mean(behaviour - new) exceeds `threshold`.

    So the update does not push further down tokens that the policy has left (DeepSeek-V3.2, arXiv:2512.02556; TRL,
    slime). advantages [B, T] or [B, 1]; log-probs and mask [B, T].
    """
    counted = mask != 0
    drift = torch.where(counted, (behaviour_log_probs - log_probs).to(torch.float64), 0.0).sum(1)
    drift = drift / counted.sum(1).clamp(min=1)
    return ((advantages >= 0) | (drift <= threshold)[:, None]).expand_as(mask)


@checked
def proximal_log_probs(
    behaviour_log_probs: Elements,
    log_probs: Elements,
    versions: Versions,
    current_version: int,
    method: Literal["loglinear", "linear", "rollout"] = "loglinear",
) -> Tensor:
    """Log-probs of the policy one version back, interpolated between behaviour and current instead of computed (AReaL).

    alpha = (current_version - 1 - v) / (current_version - v), held in 0 .. 1; 0 where the version v is negative or not
    older. loglinear: (1 - alpha) * behaviour + alpha * current; linear: the same over probabilities; rollout:
    behaviour. All tensors have one shape. Raises SettingError for another method.
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


@checked
def version_staleness(versions: Versions, mask: AnyMask, current_version: int) -> dict[str, float]:
    """Average, greatest and least age of trainable tokens, in policy versions; {} without any.

    staleness_theta counts from the policy being trained, staleness_proximal from the version before. Tokens with a
    negative version do not count.
    """
    counted = versions[(mask != 0) & (versions >= 0)].to(torch.float64)
    if not len(counted):
        return {}
    metrics = {
        "n_valid_generated_tokens": float(len(counted)),
        "v_theta": float(current_version),
        "v_proximal": float(current_version - 1),
    }
    for name, reference in (("proximal", current_version - 1), ("theta", current_version)):
        age = reference - counted
        metrics[f"sample_staleness_{name}_avg"] = age.mean().item()
        metrics[f"sample_staleness_{name}_max"] = age.max().item()
        metrics[f"sample_staleness_{name}_min"] = age.min().item()
    return metrics
