"""Policy losses for a training loop of your own, in plain torch: losses of tokens, and ways to add them up.

Tokens lie packed, [N] with `cu_seqlens`, or padded, [B, T]; all tensors of a call have the shape of `log_probs`. The
functions compute in float32 at least, carry gradients through `log_probs` alone, and never wait for a device. Each
returns (loss, metrics). loss: of every token, times `weights` (truncated importance weights such as the column
`rollout_is_weights`; None = 1), 0 where `response_mask` is 0, whatever stands there. metrics: verl's names to detached
means [] over the call's trainable tokens, 0 without any; weigh them by tokens to join micro-batches.

Below A = advantages, r = exp(d), d = log_probs - old_log_probs held in -20 .. 20 (as verl; ROLL and TRL do not).
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from .errors import ArgumentError, OptionError

__all__ = ["AGGREGATIONS", "aggregate", "cispo", "gspo", "ppo_clip", "reinforce"]

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
AGGREGATIONS: Final[tuple[str, ...]] = get_args(Aggregation)
Loss = tuple[Tensor, dict[str, Tensor]]


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    weights: Tensor | None = None,
) -> Loss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A dual_clip.

    PPO arXiv:1707.06347; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476; dual clip arXiv:1912.09729.
    verl: `vanilla`. ROLL: dual_clip None, or 1 + 2 pg_clip. TRL: None; its `delta` bounds r for A > 0 too.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise OptionError(f"dual_clip is {dual_clip}, needs a number above 1, or None for no second bound")
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    bound = None if dual_clip is None else -advantages * dual_clip
    return _clipped(d.exp(), d, advantages, response_mask, (1 - clip_low, 1 + clip_high), bound, weights)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Tensor | None = None,
) -> Loss:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(the row's mean of d, at most 10); d is not held.

    GSPO-token, arXiv:2507.18071, with its clips (verl's default is 0.2): each token has the gradient s (verl). TRL's
    (importance_sampling_level "sequence") and ROLL's goes through the mean: the same for rows of one advantage and
    weight. Meant for seq-mean-token-mean; verl 0.9.1 takes the actor's loss_agg_mode. cu_seqlens: [R + 1], if packed.
    """
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    tokens = _row_sums(_kept(torch.ones_like(d), response_mask), cu_seqlens)
    mean = _spread(_row_sums(d.detach(), cu_seqlens) / tokens.clamp(min=1), cu_seqlens, len(d))
    ratio = (mean + d - d.detach()).clamp(max=10).exp()
    return _clipped(ratio, d, advantages, response_mask, (1 - clip_low, 1 + clip_high), None, weights)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weights: Tensor | None = None,
) -> Loss:
    """-c A log_probs with c = clip(r, 1 - clip_low, 1 + clip_high) constant, so that every token has a gradient.

    MiniMax-M1, arXiv:2506.13585. TRL bounds r above alone (clip_low 1), and its `epsilon_high` is 1 + clip_high.
    """
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    ratio = d.detach().exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -clipped * advantages * _kept(log_probs, response_mask)
    return _result(loss, d, ratio != clipped, torch.zeros_like(d), response_mask, weights)


def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    weights: Tensor | None = None,
) -> Loss:
    """-A log_probs; old_log_probs only for the metric. Williams 1992; verl `gpg`, with weights its `reinforce`."""
    d = _log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    loss, nothing = -advantages * _kept(log_probs, response_mask), torch.zeros_like(d)
    return _result(loss, d, nothing, nothing, response_mask, weights)


def aggregate(
    loss: Tensor,
    response_mask: Tensor,
    mode: Aggregation = "token-mean",
    *,
    cu_seqlens: Tensor | None = None,
    num_tokens: float | None = None,
    num_rows: float | None = None,
    loss_scale_factor: float | None = None,
    world_size: int = 1,
) -> Tensor:
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
    divisor, name = (num_tokens, "num_tokens") if mode.startswith("token") else (num_rows, "num_rows")
    if world_size > 1 and divisor is None and mode != "token-sum":
        raise OptionError(f"{name} is None, world_size {world_size}: give that of the whole batch for {mode}")
    if mode == "seq-mean-token-sum-norm" and loss_scale_factor is None and cu_seqlens is not None:
        raise OptionError(
            f"loss_scale_factor is None: give a length, such as the longest response, for {mode}"
        )
    kept = _kept(loss, response_mask)
    if mode == "token-sum":
        return kept.sum() * world_size
    if mode == "token-mean":
        return kept.sum() / (num_tokens or (response_mask != 0).sum().clamp(min=1)) * world_size
    tokens = _row_sums(_kept(torch.ones_like(kept), response_mask), cu_seqlens)
    sums = _row_sums(kept, cu_seqlens)
    if mode == "seq-mean-token-mean":
        sums = sums / tokens.clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        sums = sums / (loss_scale_factor or max(loss.shape[-1], 1))
    return sums.sum() / (num_rows or (tokens > 0).sum().clamp(min=1)) * world_size


def _log_ratio(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
) -> Tensor:
    """log_probs - old_log_probs, in float32 at least; 0 outside the mask."""
    tensors = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "weights": weights}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != log_probs.shape:
            raise ArgumentError(
                f"{name} has shape {[*tensor.shape]}, log_probs {[*log_probs.shape]}: make them equal"
            )
    return _kept(log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)) - old.detach(), mask)


def _clipped(
    ratio: Tensor,
    d: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float],
    bound: Tensor | None,
    weights: Tensor | None,
) -> Loss:
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(*clip)
    loss, is_bounded = torch.maximum(plain, clipped), torch.zeros_like(d)
    if bound is not None:
        is_bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return _result(loss, d, clipped > plain, is_bounded, mask, weights)


def _result(
    loss: Tensor, d: Tensor, is_clipped: Tensor, is_bounded: Tensor, mask: Tensor, weights: Tensor | None
) -> Loss:
    values = {"pg_clipfrac": is_clipped, "pg_clipfrac_lower": is_bounded, "ppo_kl": -d.detach()}
    count = (mask != 0).sum().clamp(min=1)
    metrics = {f"actor/{name}": _kept(value, mask).sum() / count for name, value in values.items()}
    return _kept(loss if weights is None else loss * weights, mask), metrics


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask != 0, values.to(torch.promote_types(values.dtype, torch.float32)), 0.0)


def _row_sums(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return values.sum(-1)
    return torch.segment_reduce(values, "sum", lengths=torch.diff(cu_seqlens).long(), initial=0, unsafe=True)


def _spread(rows: Tensor, cu_seqlens: Tensor | None, num_tokens: int) -> Tensor:
    if cu_seqlens is None:
        return rows[:, None]
    return rows.repeat_interleave(torch.diff(cu_seqlens), output_size=num_tokens)
