"""Policy losses for a training loop of your own, in plain torch: losses of tokens, and ways to add them up.

Tokens lie packed, [N] with `cu_seqlens`, or padded, [B, T]; all tensors of a call have the shape of `log_probs`. The
functions compute in float32 at least, carry gradients through `log_probs` alone, and never wait for a device. Each
returns (loss, metrics). loss: of every token, times `weights` (truncated importance weights such as the column
`rollout_is_weights`; None = 1), 0 where `response_mask` is 0, whatever stands there. metrics: verl's names to detached
means [] over the call's trainable tokens, 0 without any; weigh them by tokens to join micro-batches.

Below A = advantages, r = exp(d), d = log_probs - old_log_probs held in -20 .. 20 (as verl; ROLL and TRL do not).
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal, get_args

from . import extras

extras.require_torch("streamadv.losses")

import torch
from torch import Tensor

from .errors import ArgumentError, OptionError

__all__ = ["AGGREGATIONS", "aggregate", "cispo", "gspo", "ppo_clip", "reinforce"]

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
AGGREGATIONS: Final[tuple[str, ...]] = get_args(Aggregation)
Loss = tuple[Tensor, dict[str, Tensor]]


def ppo_clip(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
             clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0,
             weights: Tensor | None = None) -> Loss:  # fmt: skip
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A dual_clip.

    PPO arXiv:1707.06347; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476; dual clip arXiv:1912.09729.
    verl: `vanilla`. ROLL: dual_clip None, or 1 + 2 pg_clip. TRL: None; its `delta` bounds r for A > 0 too.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise OptionError(f"dual_clip is {dual_clip}, needs a number above 1, or None for no second bound")
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    ratio, is_bounded = d.exp(), torch.zeros_like(d)
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -advantages * torch.full_like(d, dual_clip), torch.inf)
        is_bounded = loss > bound
        loss = torch.minimum(loss, bound)
    metrics = {"pg_clipfrac": clipped > plain, "pg_clipfrac_lower": is_bounded, "ppo_kl": -d}
    return _result(loss, response_mask, weights, **metrics)


def gspo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
         cu_seqlens: Tensor | None = None, clip_low: float = 3e-4, clip_high: float = 4e-4,
         weights: Tensor | None = None) -> Loss:  # fmt: skip
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(the row's mean of d, at most 10); d is not held.

    GSPO-token, arXiv:2507.18071, with its clips (verl's default is 0.2): each token has the gradient s (verl). TRL's
    (importance_sampling_level "sequence") and ROLL's goes through the mean: the same for rows of one advantage and
    weight. Meant for seq-mean-token-mean; verl 0.9.1 takes the actor's loss_agg_mode. cu_seqlens: [R + 1], if packed.
    """
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    tokens = _row_sums(_kept(torch.ones_like(d), response_mask), cu_seqlens)
    mean = _spread(_row_sums(d.detach(), cu_seqlens) / tokens.clamp(min=1), cu_seqlens, len(d))
    log_ratio, zeros = (mean + (d - d.detach())).clamp(max=10), torch.zeros_like(d)
    clip = partial(ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=None, weights=weights)
    loss, metrics = clip(log_ratio, zeros, advantages, response_mask)
    return loss, metrics | _result(loss, response_mask, None, ppo_kl=-d)[1]


def cispo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
          clip_low: float = 0.2, clip_high: float = 0.2, weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-c A log_probs with c = clip(r, 1 - clip_low, 1 + clip_high) constant, so that every token has a gradient.

    MiniMax-M1, arXiv:2506.13585. TRL bounds r above alone (clip_low 1), and its `epsilon_high` is 1 + clip_high.
    """
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    ratio = d.detach().exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -clipped * advantages * _kept(log_probs, response_mask)
    metrics = {"pg_clipfrac": ratio != clipped, "pg_clipfrac_lower": torch.zeros_like(d), "ppo_kl": -d}
    return _result(loss, response_mask, weights, **metrics)


def reinforce(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
              weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-A log_probs; old_log_probs only for the metric. Williams 1992; verl `gpg`, with weights its `reinforce`."""
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    loss = -advantages * _kept(log_probs, response_mask)
    return _result(loss, response_mask, weights, ppo_kl=-d)


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

    No tokens: 0 (verl NaN). ROLL divides by all rows, its norm mode by T alone, and its token-mean sums masked tokens
    too. TRL: dapo, cispo and, within a micro-batch, bnpo are token-mean, grpo is seq-mean-token-mean, dr_grpo the norm
    mode with max_completion_length, luspo seq-mean-token-sum; it divides by all rows.
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
    _check_shapes(loss, "loss", response_mask=response_mask)
    sums, tokens = _kept(loss, response_mask), _kept(torch.ones_like(loss), response_mask)
    if is_by_row:
        sums, tokens = _row_sums(sums, cu_seqlens), _row_sums(tokens, cu_seqlens)
    if mode == "seq-mean-token-mean":
        sums = sums / tokens.clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        sums = sums / (loss_scale_factor or max(loss.shape[-1], 1))
    divisor = 1 if mode == "token-sum" else count or (tokens > 0).sum().clamp(min=1)
    return sums.sum() / divisor * world_size


def _log_ratio(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
) -> Tensor:
    """log_probs - old_log_probs, in float32 at least; 0 outside the mask."""
    _check_shapes(
        log_probs, "log_probs", old_log_probs=old, advantages=advantages, response_mask=mask, weights=weights
    )
    return _kept(log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)) - old.detach(), mask)


def _check_shapes(first: Tensor, first_name: str, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != first.shape:
            raise ArgumentError(
                f"{name} has shape {[*tensor.shape]}, needs that of {first_name}, {[*first.shape]}"
            )


def _result(loss: Tensor, mask: Tensor, weights: Tensor | None, **metrics: Tensor) -> Loss:
    count = (mask != 0).sum().clamp(min=1)
    means = {f"actor/{name}": _kept(value.detach(), mask).sum() / count for name, value in metrics.items()}
    return _kept(loss if weights is None else loss * weights.detach(), mask), means


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask != 0, values.to(torch.promote_types(values.dtype, torch.float32)), 0.0)


def _row_sums(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None and values.dim() != 2:
        raise ArgumentError(
            f"cu_seqlens is None: tokens of shape {[*values.shape]} need it, their rows are unknown"
        )
    if cu_seqlens is None:
        return values.sum(-1)
    return torch.segment_reduce(values, "sum", lengths=torch.diff(cu_seqlens).long(), initial=0, unsafe=True)


def _spread(rows: Tensor, cu_seqlens: Tensor | None, num_tokens: int) -> Tensor:
    if cu_seqlens is None:
        return rows[:, None]
    return rows.repeat_interleave(torch.diff(cu_seqlens), output_size=num_tokens)
