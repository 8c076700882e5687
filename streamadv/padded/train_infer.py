"""ROLL's train-inference correction on padded tensors: weights and filters by ratio and by difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

import torch
from torch import Tensor

from ..algorithms.arguments import Bound, Choice, Each, Instance, Mask, Number, PeerQuirks, Positive, Tokens
from ..algorithms.chain_metrics import SAFETY_BOUND
from ..algorithms.off_policy import RatioLevel, at_level
from ..errors import OptionError
from .entrance import checked
from .layout import padded_tokens
from .rewards import Metrics


@dataclass(frozen=True, slots=True)
class RatioFilter:
    """Passes tokens with ratio exp(old - rollout) and difference of probabilities inside the bounds.

    Bounds are inclusive; None leaves a side open. Both are taken at `level`.
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


@checked
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
    """Importance weights and a mask from log-probs of training and rollout policy.

    Ratios: token exp(l), geometric exp(row mean), sequence exp(row sum), segment exp(mean over a turn), with l =
    old - rollout. Differences: exp(old) - exp(rollout) per token, its row mean, row sum, or mean over a turn.

    Args:
      old_log_probs, rollout_log_probs, response_mask: [B, T].
      weight_level: where the weights are taken; None = weights of 1.
      upper_bound: of the weights; None = unbounded.
      filters: a token stays if it passes all of them.
      global_valid_samples, global_valid_tokens: rows with tokens, and tokens, of the whole batch, so that the metrics
        of its micro-batches add up.

    Returns:
      (weights, mask, metrics); weights and mask [B, T] float32, 0 outside `response_mask`. ROLL leaves them unmasked,
      bounds no exponent, and counts clipped and filtered tokens in padding too.
    """
    tokens = padded_tokens(response_mask)
    counted = tokens.mask
    old, rollout = old_log_probs.reshape(-1).double(), rollout_log_probs.reshape(-1).double()
    log_ratios, differences = old - rollout, old.exp() - rollout.exp()
    num_tokens = max(int(tokens.counts.sum()), 1)
    lengths = response_mask.sum(1)
    num_rows = global_valid_samples or (lengths > 0).sum().clamp(min=1)
    judged = torch.ones_like(counted) if peer_quirks else counted

    def ratio(level: RatioLevel) -> Tensor:
        combined = at_level(level, log_ratios, tokens)
        if peer_quirks:  # float32 and unbounded
            return combined.float().exp().double()
        return combined.nan_to_num(nan=0.0).clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()

    def difference(level: RatioLevel) -> Tensor:
        return at_level(level, differences, tokens)

    def share(hits: Tensor) -> float:
        return ((hits & judged).sum() / (global_valid_tokens or num_tokens)).item()

    metrics: Metrics = {}
    for level in get_args(RatioLevel):
        for name, values in (("ratio", ratio(level)), ("diff", difference(level))):
            by_row = values.view(response_mask.shape)
            # ROLL multiplies by the mask, so inf * 0 gives NaN.
            kept = by_row * response_mask if peer_quirks else torch.where(response_mask, by_row, 0.0)
            per_row = torch.where(lengths > 0, kept.sum(1) / lengths.clamp(min=1), 0.0)
            metrics[f"actor/train_infer_{name}_{level}_mean@sum"] = (per_row.sum() / num_rows).item()
    weights = torch.ones_like(old)
    if weight_level is not None:
        weights = ratio(weight_level)
        if upper_bound is not None:
            metrics["actor/is_weight_clipfrac@sum"] = share(weights > upper_bound)
            weights = weights.clamp(0, upper_bound)
    passing = torch.ones_like(counted)
    for item in filters:
        for name, values_at, low, high in (
            ("ratio", ratio, item.ratio_low, item.ratio_high),
            ("diff", difference, item.diff_low, item.diff_high),
        ):
            if low is not None or high is not None:
                values = values_at(item.level)
                inside = values >= (-math.inf if low is None else low)
                inside &= values <= (math.inf if high is None else high)
                metrics[f"actor/train_infer_{item.level}_{name}_mask_mean@sum"] = share(inside)
                passing = passing & inside
    metrics["actor/train_infer_final_mask_mean"] = ((passing & counted).sum() / num_tokens).item()
    if peer_quirks is None:
        weights, passing = torch.where(counted, weights, 0.0), passing & counted
    shape = response_mask.shape
    return weights.view(shape).to(torch.float32), passing.view(shape).to(torch.float32), metrics
