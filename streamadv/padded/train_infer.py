"""ROLL's train-inference correction on padded tensors: weights and filters by ratio and by difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

import torch
from torch import Tensor

from ..algorithms.arguments import Bound, Choice, Each, Instance, Mask, Number, Positive, Tokens
from ..algorithms.off_policy import RatioLevel, at_level
from ..algorithms.off_policy_metrics import SAFETY_BOUND
from ..algorithms.quirks import PeerQuirks
from ..errors import OptionError
from .layout import padded_tokens

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class RatioFilter:
    """Keeps tokens whose ratio exp(old - rollout) and difference of probabilities lie inside the bounds.

    Bounds are inclusive; None leaves a side open. `level` is where both are taken.
    """

    level: RatioLevel = "token"
    ratio_low: float | None = 0.8
    ratio_high: float | None = 1.2
    diff_low: float | None = None
    diff_high: float | None = None

    def __post_init__(self) -> None:
        Choice(get_args(RatioLevel)).take("level", self.level)
        for low, high in (("ratio_low", "ratio_high"), ("diff_low", "diff_high")):
            bounds = [getattr(self, name) for name in (low, high)]
            for name, bound in zip((low, high), bounds, strict=True):
                if bound is not None:
                    Number(infinite=True).take(name, bound)
            if None not in bounds and bounds[0] > bounds[1]:
                raise OptionError(f"{low} {bounds[0]} is above {high} {bounds[1]}, which keeps nothing")


def compute_train_infer_correction(
    old_log_probs: Tokens,
    rollout_log_probs: Tokens,
    response_mask: Mask,
    *,
    weight_level: RatioLevel | None = None,
    upper_bound: Bound | None = 1.2,
    filters: Annotated[Sequence[RatioFilter], Each(Instance((RatioFilter,)), "F")] = (),
    global_valid_samples: Positive | None = None,
    global_valid_tokens: Positive | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, Tensor, Metrics]:
    """(weights, mask, metrics), [B, T] float32 each: importance weights and the filters' verdicts, AND-ed.

    weight_level None gives weights of 1; upper_bound None leaves them unbounded. Ratios: token exp(l),
    geometric exp(row mean), sequence exp(row sum), segment exp(mean over a turn); differences: exp(old) -
    exp(rollout) per token, its row mean, row sum, or mean over a turn. The metrics of a micro-batch add up
    to its batch's when given the numbers of rows with tokens (global_valid_samples) and of tokens there.
    Weights and mask are 0 outside `response_mask`; ROLL leaves them as they come there, bounds no exponent,
    and counts clipped and kept tokens in padding too.
    """
    tokens = padded_tokens(response_mask)
    counted = tokens.mask
    old, rollout = old_log_probs.reshape(-1).double(), rollout_log_probs.reshape(-1).double()
    log_ratio, difference = old - rollout, old.exp() - rollout.exp()
    verdict_tokens = torch.ones_like(counted) if peer_quirks else counted

    def difference_at(level: RatioLevel) -> Tensor:
        return difference if level == "token" else at_level(level, difference, tokens)

    def ratio_at(level: RatioLevel) -> Tensor:
        combined = log_ratio if level == "token" else at_level(level, log_ratio, tokens)
        if peer_quirks:
            return combined.float().exp().double()
        return combined.nan_to_num(nan=0.0).clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()

    num_tokens = max(int(tokens.counts.sum()), 1)

    def share(hits: Tensor) -> float:
        return ((hits & verdict_tokens).sum() / (global_valid_tokens or num_tokens)).item()

    metrics: Metrics = {}
    for level in get_args(RatioLevel):
        metrics[f"actor/train_infer_ratio_{level}_mean@sum"] = _row_mean(
            ratio_at(level), response_mask, global_valid_samples, peer_quirks
        )
        metrics[f"actor/train_infer_diff_{level}_mean@sum"] = _row_mean(
            difference_at(level), response_mask, global_valid_samples, peer_quirks
        )
    weights = torch.ones_like(log_ratio)
    if weight_level is not None:
        weights = ratio_at(weight_level)
        if upper_bound is not None:
            metrics["actor/is_weight_clipfrac@sum"] = share(weights > upper_bound)
            weights = weights.clamp(0, upper_bound)
    kept = torch.ones_like(counted)
    for chosen in filters:
        name = f"actor/train_infer_{chosen.level}"
        if chosen.ratio_low is not None or chosen.ratio_high is not None:
            inside = _inside(ratio_at(chosen.level), chosen.ratio_low, chosen.ratio_high)
            metrics[f"{name}_ratio_mask_mean@sum"] = share(inside)
            kept = kept & inside
        if chosen.diff_low is not None or chosen.diff_high is not None:
            inside = _inside(difference_at(chosen.level), chosen.diff_low, chosen.diff_high)
            metrics[f"{name}_diff_mask_mean@sum"] = share(inside)
            kept = kept & inside
    metrics["actor/train_infer_final_mask_mean"] = ((kept & counted).sum() / num_tokens).item()
    if peer_quirks is None:
        weights, kept = torch.where(counted, weights, 0.0), kept & counted
    shape = response_mask.shape
    return weights.view(shape).to(torch.float32), kept.view(shape).to(torch.float32), metrics


def _inside(values: Tensor, low: float | None, high: float | None) -> Tensor:
    kept = torch.ones_like(values, dtype=torch.bool)
    if low is not None:
        kept = kept & (values >= low)
    return kept if high is None else kept & (values <= high)


def _row_mean(
    values: Tensor, mask: Tensor, global_valid_samples: float | None, peer_quirks: PeerQuirks | None
) -> float:
    """Mean over rows with tokens (their number may be given) of the row's masked mean.

    ROLL multiplies by the mask: inf * 0 is NaN.
    """
    values, tokens = values.view(mask.shape), (mask != 0).sum(1)
    counted = values * (mask != 0) if peer_quirks else torch.where(mask != 0, values, 0.0)
    per_row = torch.where(tokens > 0, counted.sum(1) / tokens.clamp(min=1), 0.0)
    return (per_row.sum() / (global_valid_samples or (tokens > 0).sum().clamp(min=1))).item()
