"""Statistics over the masked elements of padded [B, T] tensors, and the ways to average a loss.

Sums run in float64, results are float32. Values outside the mask have no effect, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..algorithms.arguments import (
    GREATEST,
    AnyMask,
    AnyShape,
    Count,
    Mask,
    PeerQuirks,
    Positive,
    Rows,
    Threshold,
    Tokens,
)
from ..algorithms.segments import whiten
from ..errors import OptionError
from ..losses import Aggregation
from .entrance import checked, differentiable
from .layout import padded_tokens


@differentiable
def masked_sum(values: AnyShape, mask: AnyMask, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is set, over everything or along `dim`."""
    _check_dim(dim, values)
    return _sum(values, mask, dim).to(torch.float32)


@differentiable
def masked_mean(values: AnyShape, mask: AnyMask, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is set, over everything or along `dim`; 0 over nothing."""
    _check_dim(dim, values)
    return _mean(values, mask, dim).to(torch.float32)


@differentiable
def masked_var(values: AnyShape, mask: AnyMask, unbiased: bool = True) -> Tensor:
    """Variance of the masked values, ddof 1 if `unbiased`; 0 below two values (ROLL and verl raise)."""
    centred = torch.where(mask != 0, values.to(torch.float64) - _mean(values, mask, None), 0.0)
    count = (mask != 0).sum()
    return (centred.square().sum() / (count - int(unbiased)).clamp(min=1)).to(torch.float32)


@checked
def masked_whiten(values: Tokens, mask: Mask, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) at every position, statistics over the mask; see `segments.whiten`."""
    flat = torch.where((mask != 0) | (values.abs() <= GREATEST), values, 0.0).reshape(-1)
    return whiten(flat, padded_tokens(mask), shift_mean, everywhere=True).view(values.shape)


@checked
def masked_normalize(
    values: Tokens, mask: Mask, eps: Positive = 1e-8, *, peer_quirks: PeerQuirks | None = None
) -> Tensor:
    """[B, T]: each row to mean 0 and variance 1 over its masked values: (x - mean) / sqrt(max(var, eps)), ddof 0.

    0 outside the mask; ROLL transforms a 0 there.
    """
    centred = torch.where(mask != 0, values.to(torch.float64), 0.0) - _mean(values, mask, 1)[:, None]
    variance = _mean(centred.square(), mask, 1)[:, None]
    result = centred / variance.clamp(min=eps).sqrt()
    return (result if peer_quirks else torch.where(mask != 0, result, 0.0)).to(torch.float32)


@checked
def clip_fraction(
    values: AnyShape, clip_max: Threshold, clip_min: Threshold, mask: AnyMask | None = None
) -> Tensor:
    """Share of values above `clip_max` or below `clip_min`, among masked ones; without a mask, all (ROLL)."""
    outside = ((values > clip_max) | (values < clip_min)).to(torch.float64)
    return _mean(outside, torch.ones_like(outside) if mask is None else mask, None)


@differentiable
def agg_loss(
    loss: Tokens,
    mask: Mask,
    mode: Aggregation = "token-mean",
    weights: Rows | None = None,
    *,
    dp_size: Count = 1,
    batch_num_tokens: Positive | None = None,
    global_batch_size: Positive | None = None,
    loss_scale_factor: Positive | None = None,
    peer_quirks: PeerQuirks | None = None,
) -> Tensor:
    """A scalar from token losses [B, T].

    Args:
      mode: token-mean: masked sum / masked tokens. token-sum: masked sum. seq-mean-token-sum, seq-mean-token-mean: mean
        over rows with tokens of the row's masked sum or mean. seq-mean-token-sum-norm: seq-mean-token-sum / T.
      weights: [B], multiply whole rows.
      dp_size: how many ranks average their gradients; multiplies the loss.
      batch_num_tokens, global_batch_size, loss_scale_factor: divisors in place of tokens, rows and T; a micro-batch
        needs those of its whole batch.

    `losses.aggregate` is the same for packed tokens too. ROLL divides by all rows, its norm mode by T alone, its
    token-mean also sums outside the mask, and it has no token-sum. The norm mode of verl of January 2026 divides by T
    alone and leaves dp_size out, and no count is missed. An empty mask gives 0 (ROLL, verl: NaN).

    Raises OptionError for dp_size above 1 without the count that the mode divides by.
    """
    count, name = batch_num_tokens, "batch_num_tokens"
    if mode.startswith("seq"):
        count, name = global_batch_size, "global_batch_size"
    if dp_size > 1 and count is None and mode != "token-sum" and peer_quirks != "verl-2026-01":
        raise OptionError(f"{name} is missing: dp_size {dp_size} needs the count of all ranks together")
    if mode == "token-sum" and peer_quirks == "roll":
        raise OptionError("mode is 'token-sum', which ROLL does not have: leave peer_quirks out")
    weight = torch.ones(len(loss), device=loss.device) if weights is None else weights
    if mode == "token-mean":
        counted = torch.ones_like(mask) if peer_quirks == "roll" else mask
        total = _sum(loss * weight[:, None], counted, None) * dp_size
        return _over(total, batch_num_tokens, (mask != 0).sum(), peer_quirks)
    if mode == "token-sum":
        return (_sum(loss * weight[:, None], mask, None) * dp_size).to(torch.float32)
    per_row = _mean(loss, mask, 1) if mode == "seq-mean-token-mean" else _sum(loss, mask, 1)
    total = (per_row * weight).sum()
    if mode == "seq-mean-token-sum-norm":
        total = total / (loss_scale_factor or max(mask.shape[1], 1))
        if peer_quirks == "verl-2026-01":
            return total.to(torch.float32)
        if peer_quirks == "roll":
            return (total * dp_size).to(torch.float32)
    total = total * dp_size
    rows = torch.tensor(len(mask)) if peer_quirks == "roll" else (mask != 0).any(1).sum()
    return _over(total, global_batch_size, rows, peer_quirks)


def _check_dim(dim: int | None, values: Tensor) -> None:
    if dim is not None and not -values.dim() <= dim < values.dim():
        raise OptionError(f"dim is {dim}, values has {values.dim()} dimensions: choose one of them")


def _over(total: Tensor, divisor: float | None, count: Tensor, peer_quirks: PeerQuirks | None) -> Tensor:
    if divisor is not None:
        return (total / divisor).to(torch.float32)
    return (total / (count if peer_quirks else count.clamp(min=1))).to(torch.float32)


def _sum(values: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    counted = torch.where(mask != 0, values.to(torch.float64), 0.0)
    return counted.sum() if dim is None else counted.sum(dim)


def _mean(values: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    count = (mask != 0).sum() if dim is None else (mask != 0).sum(dim)
    return _sum(values, mask, dim) / count.clamp(min=1)
