"""Off-policy correction: importance weights and rejection for tokens sampled by another policy.

The rollout policy has sampled the data (rollout_log_probs); the update starts from the training policy
(old_log_probs). All tensors are [N], of which trainable tokens count; log_ratio = old_log_probs - rollout_log_probs,
held in -20 .. 20 before exp. A sequence is a row. Metric names are verl's, without the prefix `rollout_corr/`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ..errors import OptionError
from ..extras import torch
from .chain_metrics import SAFETY_BOUND, Metric, mean, rejection_metrics, rows_that_count, weight_metrics
from .scan import turn_mean
from .segments import Trainable, segment_max, spread

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import AnyMask, AnyShape, PeerQuirks, Positive

RatioLevel = Literal["token", "sequence", "geometric", "segment"]
BoundMode = Literal["truncate", "clip", "mask"]
RejectionKind = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip


def at_level(level: RatioLevel, values: Tensor, tokens: Trainable) -> Tensor:
    """[N] float64: `values` [N] combined at a level and spread over its tokens (for a row: all tokens).

    token: unchanged; sequence: the sum over the row; geometric: the mean over the row; segment: the mean over the turn,
    a run of trainable tokens. Raises OptionError for another level.
    """
    if level == "token":
        return values.to(torch.float64)
    if level == "segment":
        return turn_mean(values, tokens)
    if level not in ("sequence", "geometric"):
        levels = ", ".join(get_args(RatioLevel))
        raise OptionError(f"correction.level {level!r} is unknown: choose one of {levels}")
    rows = tokens.row_sum(values) if level == "sequence" else tokens.row_mean(values)
    return spread(rows, tokens.offsets, len(values))


def importance_weights(
    log_ratio: Tensor,
    tokens: Trainable,
    *,
    level: RatioLevel = "token",
    mode: BoundMode = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
    rows: Tensor | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Importance weights w = pi_old / pi_rollout, bounded.

    Args:
      log_ratio: [N].
      tokens: which tokens count.
      level: what one ratio is taken over, see `at_level`.
      mode: truncate: min(w, upper) (TIS), without a lower bound; clip: held in lower .. upper; mask: 0 outside
        lower .. upper (IcePop).
      lower: None = 1 / upper.
      batch_normalize: divide by the mean bounded weight: over tokens, or at levels above token the sum of the rows'
        means over the number of `rows`.
      rows: 0-d; None = rows with trainable tokens, as verl. slime counts all rows, so that a row without a token makes
        all weights larger.

    Returns:
      The weights [N] float32, 0 where masked, and metrics of them before `batch_normalize` (verl of January 2026: of
      the weights before bounding); in mode mask also rollout_is_oob_ratio, the share of tokens outside.

    Raises OptionError unless upper > 0, and 0 <= lower <= upper where lower is used.
    """
    if not upper > 0:
        raise OptionError(f"correction.upper is {upper}, needs a number above 0")
    least = 1 / upper if lower is None else lower
    if mode != "truncate" and not 0 <= least <= upper:
        raise OptionError(f"correction.lower is {least}, needs 0 .. upper ({upper})")
    log_weights = at_level(level, log_ratio, tokens)
    ratios = log_weights.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()
    if mode == "truncate":
        weights = ratios.clamp(max=upper)
    elif mode == "clip":
        weights = ratios.clamp(least, upper)
    else:
        inside = (ratios >= least) & (ratios <= upper)
        weights = ratios * inside
    shown, held = weights, weights
    if peer_quirks == "verl-2026-01":
        shown, least = ratios, 1 / upper
        held = ratios.clamp(least, upper)
    metrics = weight_metrics(
        shown,
        held,
        ratios,
        log_weights,
        tokens,
        least,
        upper,
        by_row=level != "token",
        all_rows=peer_quirks is not None,
    )
    if mode == "mask" and peer_quirks != "verl-2026-01":
        metrics["rollout_is_oob_ratio"] = mean(~inside, tokens.mask)
    if batch_normalize:
        if level == "token":
            average = tokens.row_sum(weights).sum() / tokens.counts.sum().clamp(min=1)
        else:
            rows = (tokens.counts > 0).sum() if rows is None else rows
            average = tokens.row_mean(weights).sum() / rows.clamp(min=1)
        factor = torch.where(average > 1e-8, average, 1.0)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = Metric(factor, tokens.counts.sum())
    return tokens.only(weights.to(torch.float32)), metrics


@dataclass(frozen=True, slots=True)
class Rejection:
    """Masks tokens or rows whose statistic is outside lower .. upper.

    With l = log_ratio: k1 = -l (the bounds are ratios pi_rollout / pi_old, compared in logs), k2 = l^2 / 2, k3 =
    exp(l) - 1 - l (both with an upper bound only). token_* judges tokens; seq_sum_*, seq_mean_* and seq_max_* judge
    whole rows. Raises OptionError for an unknown kind or bounds that do not fit.
    """

    kind: RejectionKind
    upper: float
    lower: float | None = None  # k1 only; None = 1 / upper

    def __post_init__(self) -> None:
        if self.kind not in get_args(RejectionKind):
            kinds = ", ".join(get_args(RejectionKind))
            raise OptionError(f"rejection {self.kind!r} is unknown: choose one of {kinds}")
        if not self.upper > 0 or (self.lower is not None and not self.lower > 0):
            raise OptionError(f"rejection {self.kind}: bounds {self.lower}, {self.upper} must be above 0")
        if self.lower is not None and self.lower > self.upper:
            raise OptionError(f"rejection {self.kind}: lower {self.lower} is above upper {self.upper}")
        if self.lower is not None and not self.kind.endswith("k1"):
            raise OptionError(f"rejection {self.kind}: takes an upper bound only, remove lower {self.lower}")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the statistic."""
        if self.kind.endswith("k1"):
            upper = math.log(self.upper)
            return -upper if self.lower is None else math.log(self.lower), upper
        return -math.inf, self.upper


def reject(
    log_ratio: Tensor,
    tokens: Trainable,
    rejections: Sequence[Rejection],
    *,
    peer_quirks: PeerQuirks | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """[N] bool: trainable tokens that pass all `rejections`; and metrics per rejection."""
    ratio = log_ratio.detach().to(torch.float64).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    passing = tokens.mask
    metrics: dict[str, Metric] = {}
    for rejection in dict.fromkeys(rejections):
        level, _, kind = rejection.kind.rpartition("_")
        if kind == "k1":
            statistic = -ratio
        elif kind == "k2":
            statistic = 0.5 * ratio.square()
        else:
            statistic = torch.expm1(ratio) - ratio
        if level != "token":
            if level == "seq_max":
                rows = segment_max(torch.where(tokens.mask, statistic, -torch.inf), tokens.offsets)
            else:
                rows = tokens.row_mean(statistic) if level == "seq_mean" else tokens.row_sum(statistic)
            statistic = spread(rows, tokens.offsets, len(ratio))
        lower, upper = rejection.bounds
        passes = (statistic >= lower) & (statistic <= upper)
        name = f"rollout_rs_{rejection.kind}"
        metrics |= rejection_metrics(name, statistic, passes, tokens, lower, upper, level == "token")
        passing = passing & passes
    counts = tokens.counts
    rejected = tokens.row_sum(~passing)
    num_rows = rows_that_count(tokens, all_rows=peer_quirks is not None).sum()
    metrics["rollout_rs_masked_fraction"] = Metric(rejected.sum() / counts.sum().clamp(min=1), counts.sum())
    metrics["rollout_rs_seq_masked_fraction"] = Metric(
        (rejected > 0).sum().double() / num_rows.clamp(min=1), num_rows
    )
    return passing, metrics


def veto(
    log_ratio: Tensor, tokens: Trainable, threshold: float | None = None, upper: float | None = None
) -> Tensor:
    """[N] bool: False for all tokens of a row that has a token with ratio below `threshold` or above `upper`."""
    bad = torch.zeros_like(log_ratio, dtype=torch.bool)
    for name, bound in (("veto", threshold), ("veto_upper", upper)):
        if bound is not None and not bound > 0:
            raise OptionError(f"correction.{name} is {bound}, needs a number above 0")
    if threshold is not None:
        bad |= log_ratio < math.log(threshold)
    if upper is not None:
        bad |= log_ratio > math.log(upper)
    return spread(tokens.row_sum(bad) == 0, tokens.offsets, len(log_ratio))


def m2po_mask(log_ratio: AnyShape, mask: AnyMask, threshold: Positive) -> Tensor:
    """`mask` without the tokens of largest squared log-ratio, so that the mean of the rest is below `threshold`.

    M2PO (arXiv:2510.01161) as in AReaL; statistics over everything passed in. At least one token stays. Any shape.
    """
    counted = (mask != 0).reshape(-1).nonzero().squeeze(1)
    squares = log_ratio.to(torch.float64).square().reshape(-1)[counted]
    ascending, order = torch.sort(squares, stable=True)
    mean = torch.cumsum(ascending, 0) / torch.arange(1, len(counted) + 1, device=mask.device)
    smallest = order[: max(int((mean < threshold).sum()), 1)]
    result = torch.zeros_like(mask).reshape(-1)
    result[counted[smallest]] = mask.reshape(-1)[counted[smallest]]
    return result.view(mask.shape)
