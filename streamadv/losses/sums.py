"""What losses share: shapes, masks, rows; and their sum."""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from ..errors import ArgumentError, OptionError

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
AGGREGATIONS: Final[tuple[str, ...]] = get_args(Aggregation)
Loss = tuple[Tensor, dict[str, Tensor]]


def aggregate(loss: Tensor, response_mask: Tensor, mode: Aggregation = "token-mean", *,
              cu_seqlens: Tensor | None = None, num_tokens: float | None = None,
              num_rows: float | None = None, loss_scale_factor: float | None = None,
              world_size: int = 1) -> Tensor:  # fmt: skip
    """One number [] from the losses of tokens; verl's `agg_loss`.

    token-mean: sum / num_tokens (DAPO). token-sum: sum. seq-mean-token-sum: sum / num_rows. seq-mean-token-sum-norm:
    sum / num_rows / loss_scale_factor (Dr.GRPO, arXiv:2503.20783). seq-mean-token-mean: the rows' means / num_rows
    (GRPO, arXiv:2402.03300). `loss_scale_factor` is T unless given; packed tokens need it.

    `num_tokens` and `num_rows` are those of the whole batch (`batch.num_tokens`, `batch.num_rows`): then the losses of
    its micro-batches and ranks add up to its own. None counts this call's trainable tokens, or rows with any.
    `world_size` multiplies, because DDP and FSDP average over ranks.

    No tokens: 0 (verl NaN). ROLL's num_rows is `batch.num_trained_rows`, rows with a token; its norm mode divides by T
    alone, and its token-mean sums masked tokens too. TRL: dapo, cispo, vespo and, within a micro-batch, bnpo are
    token-mean, grpo and sapo are seq-mean-token-mean, dr_grpo the norm mode with max_completion_length, luspo
    seq-mean-token-sum; it divides by all rows.
    """
    if mode not in AGGREGATIONS:
        raise OptionError(f"mode is {mode!r}: choose one of {', '.join(AGGREGATIONS)}")
    is_by_row = mode.startswith("seq")
    count, name = (num_rows, "num_rows") if is_by_row else (num_tokens, "num_tokens")
    if world_size > 1 and count is None and mode != "token-sum":
        raise OptionError(f"{name} is None, world_size {world_size}: give that of the whole batch for {mode}")
    if mode == "seq-mean-token-sum-norm" and loss_scale_factor is None and cu_seqlens is not None:
        raise OptionError(
            f"loss_scale_factor is None: give a length, such as the longest response, for {mode}"
        )
    check_shapes(loss, "loss", response_mask=response_mask)
    sums, tokens = weighed(loss, response_mask), weighed(torch.ones_like(loss), response_mask)
    if is_by_row:
        sums, tokens = row_sums(sums, cu_seqlens), row_sums(tokens, cu_seqlens)
    if mode == "seq-mean-token-mean":
        sums = sums / torch.where(tokens > 0, tokens, 1.0)
    if mode == "seq-mean-token-sum-norm":
        sums = sums / (loss_scale_factor or max(loss.shape[-1], 1))
    if mode == "token-sum":
        return sums.sum() * world_size
    found = (tokens > 0).sum() if is_by_row else tokens.sum()
    return sums.sum() / (count or torch.where(found > 0, found, 1)) * world_size


def log_ratio(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
) -> Tensor:
    """log_probs - old_log_probs, in float32 at least; 0 outside the mask."""
    check_shapes(
        log_probs, "log_probs", old_log_probs=old, advantages=advantages, response_mask=mask, weights=weights
    )
    return kept(log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)) - old.detach(), mask)


def check_shapes(first: Tensor, first_name: str, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != first.shape:
            raise ArgumentError(
                f"{name} has shape {[*tensor.shape]}, needs that of {first_name}, {[*first.shape]}"
            )


def result(loss: Tensor, mask: Tensor, weights: Tensor | None, **metrics: Tensor) -> Loss:
    """(`loss` times `weights`, 0 outside the mask; the means of `metrics` over it, detached)."""
    means = {f"actor/{name}": masked_mean(value, mask) for name, value in metrics.items()}
    return kept(loss if weights is None else loss * weights.detach(), mask), means


def kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask != 0, values.to(torch.promote_types(values.dtype, torch.float32)), 0.0)


def row_sums(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None and values.dim() != 2:
        raise ArgumentError(
            f"cu_seqlens is None: tokens of shape {[*values.shape]} need it, their rows are unknown"
        )
    if cu_seqlens is None:
        return values.sum(-1)
    return torch.segment_reduce(values, "sum", lengths=torch.diff(cu_seqlens).long(), initial=0, unsafe=True)


def spread(rows: Tensor, cu_seqlens: Tensor | None, num_tokens: int) -> Tensor:
    if cu_seqlens is None:
        return rows[:, None]
    return rows.repeat_interleave(torch.diff(cu_seqlens), output_size=num_tokens)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[]: the detached mean of `values` over the tokens that count, 0 without any."""
    total = weighed(torch.ones_like(values), mask).sum()
    return weighed(values.detach(), mask).sum() / torch.where(total > 0, total, 1.0)


def weighed(values: Tensor, mask: Tensor) -> Tensor:
    """`values` times `mask`, 0 where the mask is 0 whatever stands there; float32 at least."""
    return kept(values, mask) * mask


def row_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean of `values` over the tokens of a row that count, [R]; 0 for a row without any."""
    counts = row_sums(weighed(torch.ones_like(values), mask), cu_seqlens)
    return row_sums(weighed(values, mask), cu_seqlens) / torch.where(counts > 0, counts, 1.0)
