"""Losses of a ratio that a whole row has. Packed rows need `cu_seqlens` [R + 1]; a micro-batch holds whole rows."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from .sums import Loss, kept, log_ratio, masked_mean, result, row_means, row_sums, spread, weighed
from .tokens import ppo_clip

LEAST_LOG: Final = math.log(1e-8)


def gspo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
         cu_seqlens: Tensor | None = None, clip_low: float = 3e-4, clip_high: float = 4e-4,
         weights: Tensor | None = None) -> Loss:  # fmt: skip
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(the row's mean of d, at most 10); d is not held.

    GSPO-token, arXiv:2507.18071, with its clips (verl's default is 0.2): each token has the gradient s (verl). TRL's
    (importance_sampling_level "sequence") and ROLL's goes through the mean: the same for rows of one advantage and
    weight. Meant for seq-mean-token-mean; verl 0.9.1 takes the actor's loss_agg_mode. cu_seqlens: [R + 1], if packed.
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    mean = spread(row_means(d.detach(), response_mask, cu_seqlens), cu_seqlens, len(d))
    log_s, zeros = (mean + (d - d.detach())).clamp(max=10), torch.zeros_like(d)
    loss, metrics = ppo_clip(log_s, zeros, advantages, response_mask, clip_low=clip_low, clip_high=clip_high,
                             dual_clip=None, weights=weights)  # fmt: skip
    return loss, metrics | result(loss, response_mask, None, ppo_kl=-d)[1]


def row_clip(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
             cu_seqlens: Tensor | None = None, clip_low: float = 0.2, clip_high: float = 0.2,
             weights: Tensor | None = None) -> Loss:  # fmt: skip
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(the row's sum of d): the ratio of whole responses.

    RLOO as TRL has it (RLOOTrainer; d is not held there), arXiv:2402.14740. All tokens of a row have its loss, and the
    gradient goes through the sum: meant for seq-mean-token-mean. TRL's tool tokens count in its sum.
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    log_s = spread(row_sums(weighed(d, response_mask), cu_seqlens), cu_seqlens, len(d)).clamp(-20, 20)
    loss, metrics = ppo_clip(log_s.expand_as(d), torch.zeros_like(d), advantages, response_mask, clip_low=clip_low,
                             clip_high=clip_high, dual_clip=None, weights=weights)  # fmt: skip
    return loss, metrics | {"actor/ppo_kl": masked_mean(-d, response_mask)}


def gmpo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
         cu_seqlens: Tensor | None = None, clip_low: float = 0.4, clip_high: float = 0.4,
         weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-a exp(the row's mean of m), a = the row's mean of A, m = d held on its bad side: min(d, clip_high) where A > 0,
    max(d, -clip_low) where A < 0, 0 where A is 0.

    GMPO, arXiv:2507.20673, with its bounds, which are of d. All tokens of a row have its loss: meant for
    seq-mean-token-mean. `weights` multiply by their geometric mean over the row. verl `geo_mean` (all rows count); TRL
    GMPOTrainer (where A is 0, m is max(d, -clip_low); the advantage is 0 as well).
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    sign, held = torch.sign(kept(advantages, response_mask)), d.clamp(-clip_low, clip_high)
    m = sign * torch.minimum(sign * d, sign * held)
    logs = m if weights is None else m + (kept(weights, response_mask).detach() + 1e-10).log()
    rows = (
        -row_means(advantages, response_mask, cu_seqlens) * row_means(logs, response_mask, cu_seqlens).exp()
    )
    loss = spread(rows, cu_seqlens, len(d)).expand_as(d)
    clipped = d != held
    metrics = {"pg_clipfrac": clipped & (sign > 0), "pg_clipfrac_lower": clipped & (sign < 0), "ppo_kl": -d}
    return result(loss, response_mask, None, **metrics)


def vespo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
          cu_seqlens: Tensor | None = None, k: tuple[float, float] = (2.0, 3.0),
          lambdas: tuple[float, float] = (3.0, 2.0), weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-phi A log_probs, phi = exp(l + k log w - l w) constant, w = exp(the row's sum of d and of log weights).

    `k` and `lambdas` (l): the first number where A >= 0, the second where A < 0; log w is held in log 1e-8 .. 20.
    VESPO, arXiv:2602.10693, and TRL's loss_type "vespo": meant for token-mean.
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20).detach()
    logs = d if weights is None else d + kept(weights, response_mask).detach().log().clamp(LEAST_LOG, 20)
    log_w = spread(row_sums(weighed(logs, response_mask), cu_seqlens), cu_seqlens, len(d)).clamp(
        LEAST_LOG, 20
    )
    of_sign = [torch.where(advantages >= 0, positive, negative) for positive, negative in (k, lambdas)]
    power, rate = of_sign[0], of_sign[1].clamp(min=1e-4)
    phi = (rate + power * log_w - rate * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
    loss = -phi * advantages * kept(log_probs, response_mask)
    return result(loss, response_mask, None, ppo_kl=-d, phi=phi)
