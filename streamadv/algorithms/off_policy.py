"""Off-policy correction: importance weights and rejection for tokens sampled by another policy.

The data were sampled by the rollout policy (rollout_log_probs); the update starts from the training policy
(old_log_probs). log_ratio = old_log_probs - rollout_log_probs, [N] packed, is held in -20 .. 20 before exp.
A sequence is a row. Metric names are verl's, without its prefix `rollout_corr/`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from ..errors import SettingError
from .metrics import Metric
from .off_policy_metrics import rejection_metrics, weight_metrics
from .padded_layout import PeerQuirks
from .runs import run_mean
from .segments import segment_max, segment_sum, spread

SAFETY_BOUND: Final = 20.0

RatioLevel = Literal["token", "sequence", "geometric", "segment"]
BoundMode = Literal["truncate", "clip", "mask"]
RejectionKind = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip


def bounded(log_ratio: Tensor) -> Tensor:
    """float64 `log_ratio` held in -20 .. 20; NaN, which only masked tokens may hold, as 0."""
    return log_ratio.to(torch.float64).nan_to_num(nan=0.0).clamp(-SAFETY_BOUND, SAFETY_BOUND)


def log_ratio_at(level: RatioLevel, log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] float64: log of the importance ratio at a level, spread over its tokens; masked tokens count 0.

    token: l_t. sequence: sum over the row's trainable tokens. geometric: their mean. segment: mean over the
    run of trainable tokens (one turn). Raises SettingError for another level.
    """
    if level not in get_args(RatioLevel):
        known = ", ".join(get_args(RatioLevel))
        raise SettingError(f"correction.level {level!r} is unknown: choose one of {known}")
    ratio = torch.where(mask != 0, log_ratio.to(torch.float64), 0.0)
    if level == "token":
        return ratio
    if level == "segment":
        return run_mean(ratio, mask, cu_seqlens)
    rows = segment_sum(ratio, cu_seqlens)
    if level == "geometric":
        rows = rows / segment_sum(mask, cu_seqlens).clamp(min=1)
    return spread(rows, cu_seqlens, len(ratio))


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: RatioLevel = "token",
    mode: BoundMode = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights pi_old / pi_rollout [N] float32, 0 outside the mask, and the metrics of the raw ones.

    mode truncate: min(w, upper) (TIS); clip: held in lower .. upper; mask: 0 outside them (IcePop). lower
    defaults to 1 / upper. batch_normalize divides by the mean bounded weight (over tokens, or over rows of
    their means for level sequence). Raises SettingError unless 0 <= lower <= upper and upper > 0.
    """
    if not upper > 0:
        raise SettingError(f"correction.upper is {upper}, needs a number above 0")
    least = 1 / upper if lower is None else lower
    if not 0 <= least <= upper:
        raise SettingError(f"correction.lower is {least}, needs 0 .. upper ({upper})")
    counted = mask != 0
    log_weight = log_ratio_at(level, log_ratio.nan_to_num(nan=0.0), mask, cu_seqlens)
    weights = torch.where(counted, bounded(log_weight).exp(), 0.0)
    metrics = weight_metrics(
        weights,
        log_weight,
        mask,
        cu_seqlens,
        upper,
        by_row=level != "token",
        all_rows=peer_quirks is not None,
    )
    if mode == "truncate":
        weights = weights.clamp(max=upper)
    elif mode == "clip":
        weights = torch.where(counted, weights.clamp(least, upper), 0.0)
    else:
        weights = torch.where((weights >= least) & (weights <= upper), weights, 0.0)
    if batch_normalize:
        tokens = segment_sum(mask, cu_seqlens)
        sums = segment_sum(weights, cu_seqlens)
        if level == "token":
            mean = sums.sum() / tokens.sum().clamp(min=1)
        else:
            mean = (sums / tokens.clamp(min=1)).sum() / (tokens > 0).sum().clamp(min=1)
        factor = torch.where(mean > 1e-8, mean, 1.0)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = Metric(factor, counted.sum())
    return weights.to(torch.float32), metrics


@dataclass(frozen=True, slots=True)
class Rejection:
    """Tokens or rows whose statistic is outside lower .. upper lose their place in the loss.

    With l = log_ratio: k1 = -l (bounds are given for the ratio pi_rollout / pi_old and logged here), k2 =
    l^2 / 2, k3 = exp(l) - 1 - l (an upper bound only). token_* judges tokens; seq_sum_*, seq_mean_* and
    seq_max_* whole rows.
    """

    kind: RejectionKind
    upper: float
    lower: float | None = None  # k1 only; None = 1 / upper

    def __post_init__(self) -> None:
        if self.kind not in get_args(RejectionKind):
            known = ", ".join(get_args(RejectionKind))
            raise SettingError(f"rejection {self.kind!r} is unknown: choose one of {known}")
        if not self.upper > 0 or (self.lower is not None and not self.lower > 0):
            raise SettingError(f"rejection {self.kind}: bounds {self.lower}, {self.upper} must be above 0")
        if self.lower is not None and not self.kind.endswith("k1"):
            raise SettingError(f"rejection {self.kind}: takes an upper bound only, remove lower {self.lower}")

    @property
    def bounds(self) -> tuple[float, float]:
        """The statistic's own bounds."""
        if self.kind.endswith("k1"):
            return math.log(1 / self.upper if self.lower is None else self.lower), math.log(self.upper)
        return -math.inf, self.upper


def rejection_mask(
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    rejections: Sequence[Rejection],
    *,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """`mask` [N] without what any of `rejections` turns down (same dtype), and metrics per rejection."""
    counted = mask != 0
    ratio = torch.where(counted, bounded(log_ratio), 0.0)
    kept = counted
    metrics: dict[str, Metric] = {}
    for rejection in dict.fromkeys(rejections):
        level, _, kind = rejection.kind.rpartition("_")
        statistic = _statistic(kind, ratio)
        if level != "token":
            statistic = spread(_per_row(level, statistic, mask, cu_seqlens), cu_seqlens, len(mask))
        lower, upper = rejection.bounds
        passes = (statistic >= lower) & (statistic <= upper)
        name = f"rollout_rs_{rejection.kind}"
        metrics |= rejection_metrics(
            name, statistic, passes, mask, cu_seqlens, lower, upper, level == "token"
        )
        kept = kept & passes
    tokens = counted.sum()
    rejected = segment_sum(counted & ~kept, cu_seqlens)
    has_tokens = segment_sum(mask, cu_seqlens) > 0
    rows = has_tokens.new_ones(len(has_tokens)).sum() if peer_quirks else has_tokens.sum()
    metrics["rollout_rs_masked_fraction"] = Metric(rejected.sum() / tokens.clamp(min=1), tokens)
    metrics["rollout_rs_seq_masked_fraction"] = Metric((rejected > 0).sum() / rows.clamp(min=1), rows)
    return torch.where(kept, mask, torch.zeros_like(mask)), metrics


def veto_mask(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, threshold: float) -> Tensor:
    """`mask` without rows that hold a trainable token of ratio below `threshold` (catastrophic mismatch)."""
    if not threshold > 0:
        raise SettingError(f"correction.veto is {threshold}, needs a number above 0")
    bad = (mask != 0) & (log_ratio.to(torch.float64) < math.log(threshold))
    vetoed = spread(segment_sum(bad, cu_seqlens) > 0, cu_seqlens, len(mask))
    return torch.where(vetoed, torch.zeros_like(mask), mask)


def _statistic(kind: str, ratio: Tensor) -> Tensor:
    if kind == "k1":
        return -ratio
    if kind == "k2":
        return 0.5 * ratio.square()
    return torch.expm1(ratio) - ratio


def _per_row(level: str, statistic: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    if level == "seq_max":
        highest = segment_max(torch.where(mask != 0, statistic, -torch.inf), cu_seqlens)
        return torch.where(highest > -torch.inf, highest, 0.0)
    total = segment_sum(torch.where(mask != 0, statistic, 0.0), cu_seqlens)
    if level == "seq_sum":
        return total
    return total / segment_sum(mask, cu_seqlens).clamp(min=1)
