"""Policy losses: of single tokens, then of a ratio that a whole row has.

Packed rows need `cu_seqlens` [R + 1]; a micro-batch holds whole rows.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor

from ..errors import OptionError
from .sums import Loss, kept, log_ratio, masked_mean, result, row_means, row_sums, spread, weighed

LEAST_LOG: Final = math.log(1e-8)


def ppo_clip(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
             clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0,
             weights: Tensor | None = None) -> Loss:  # fmt: skip
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A dual_clip.

    PPO arXiv:1707.06347; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476; dual clip arXiv:1912.09729.
    verl: `vanilla`. ROLL: dual_clip None, or 1 + 2 pg_clip. TRL: None; its `delta` bounds r for A > 0 too.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise OptionError(f"dual_clip is {dual_clip}, needs a number above 1, or None for no second bound")
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    ratio, is_bounded = d.exp(), torch.zeros_like(d)
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -advantages * torch.full_like(d, dual_clip), torch.inf)
        is_bounded = loss > bound
        loss = torch.minimum(loss, bound)
    metrics = {"pg_clipfrac": clipped > plain, "pg_clipfrac_lower": is_bounded, "ppo_kl": -d}
    return result(loss, response_mask, weights, **metrics)


def cispo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
          clip_low: float = 0.2, clip_high: float = 0.2, unified_mask: bool = False,
          weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-c A log_probs with c = clip(r, 1 - clip_low, 1 + clip_high) constant, so that every token has a gradient.

    MiniMax-M1, arXiv:2506.13585. TRL bounds r above alone (clip_low 1), and its `epsilon_high` is 1 + clip_high. ROLL
    `cispo`; its `tis` is clip_low 1, clip_high 0. unified_mask: 0 for tokens that PPO would clip (eq. 7; ROLL
    `cispo_use_unified_mask`).
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    ratio = d.detach().exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if unified_mask:
        clipped = clipped * ~_beyond(ratio, advantages, 1 - clip_low, 1 + clip_high)
    loss = -clipped * advantages * kept(log_probs, response_mask)
    metrics = {"pg_clipfrac": ratio != clipped, "pg_clipfrac_lower": torch.zeros_like(d), "ppo_kl": -d}
    return result(loss, response_mask, weights, **metrics)


def reinforce(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
              weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-A log_probs; old_log_probs only for the metric. Williams 1992; verl `gpg`, with weights its `reinforce`."""
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    loss = -advantages * kept(log_probs, response_mask)
    return result(loss, response_mask, weights, ppo_kl=-d)


def icepop(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
           low: float = 0.5, high: float = 5.0, unified_mask: bool = False,
           weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-c A log_probs with c = r where low <= r <= high, else 0, constant: a token far from its policy gives nothing.

    IcePop (Ring-1T, arXiv:2510.18855) with old_log_probs = the rollout policy's. With three policies the chain makes
    its weights: correction.mode "mask". unified_mask: drops r > high where A > 0 and r < low where A < 0 alone.
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    ratio = d.detach().exp()
    dropped = _beyond(ratio, advantages, low, high) if unified_mask else (ratio < low) | (ratio > high)
    loss = -ratio.masked_fill(dropped, 0) * advantages * kept(log_probs, response_mask)
    return result(loss, response_mask, weights, pg_clipfrac=dropped, ppo_kl=-d)


def topr(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
         scores: Tensor, positive_weight: float = 1.0, negative_weight: float = 1.0,
         weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-A log_probs times positive_weight where `scores` > 0; else times negative_weight and min(r, 1), constant.

    TOPR, arXiv:2503.14286; ROLL `topr`. scores: the row's reward at each token, in the shape of log_probs or [B, 1].
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    ratio = d.detach().clamp(-20, 20).exp()
    tapered = torch.where(scores > 0, positive_weight, negative_weight * ratio.clamp(max=1))
    loss = -tapered * advantages * kept(log_probs, response_mask)
    return result(loss, response_mask, weights, pg_clipfrac=(ratio > 1) & (scores <= 0), ppo_kl=-d)


def sapo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
         tau_positive: float = 1.0, tau_negative: float = 1.05, weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-A 4 / tau sigmoid(tau (r - 1)), tau = tau_positive where A > 0, else tau_negative: a soft gate, no clip.

    SAPO, arXiv:2511.20347, verl and TRL `sapo` (its temperatures): meant for seq-mean-token-mean.
    """
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    loss = -advantages * torch.sigmoid(tau * (d.exp() - 1)) * 4 / tau
    nothing = torch.zeros_like(d)  # is clipped, says verl too
    return result(loss, response_mask, weights, pg_clipfrac=nothing, pg_clipfrac_lower=nothing, ppo_kl=-d)


def dppo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
         divergence: Literal["tv", "kl"] = "tv", low: float = 0.2, high: float = 0.2, ratio_bound: float = 20.0,
         weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-c A log_probs, c = min(r, ratio_bound) constant, 0 where the policy has already moved too far in A's direction.

    Too far: tv: p - p_old > high where A > 0, else < -low. kl: the KL of (p_old, 1 - p_old) from (p, 1 - p) > high with
    p > p_old where A > 0, else > low with p < p_old. DPPO, arXiv:2602.04879; verl `dppo_tv` and `dppo_kl`, whose bounds
    are clip_ratio_low, _high and _c (3.0 unless set).
    """
    if divergence not in ("tv", "kl"):
        raise OptionError(f"divergence is {divergence!r}: choose tv or kl")
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    new, old = (kept(values.detach(), response_mask) for values in (log_probs, old_log_probs))
    p, p_old = new.exp(), old.exp()
    distance = p - p_old
    up, down = distance > high, distance < -low
    if divergence == "kl":
        kl = p_old * (old - new) + (1 - p_old) * torch.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
        up, down = ~(kl <= high) & (distance > 0), ~(kl <= low) & (distance < 0)
    dropped = torch.where(advantages > 0, up, down)
    ratio = d.detach().exp()
    loss = -ratio.clamp(max=ratio_bound).masked_fill(dropped, 0) * advantages * kept(log_probs, response_mask)
    metrics = {"pg_clipfrac": dropped, "pg_clipfrac_lower": (ratio > ratio_bound) & ~dropped, "ppo_kl": -d}
    return result(loss, response_mask, weights, **metrics)


def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
        beta: float, weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-A log_probs + beta / 2 d^2; d is not held. DRO, arXiv:2405.19107; verl `dro`, ROLL `kimi15` (beta: its tau)."""
    if not beta > 0:
        raise OptionError(f"beta is {beta}, needs a number above 0")
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights)
    loss = -advantages * kept(log_probs, response_mask) + beta / 2 * d.square()
    return result(loss, response_mask, weights, ppo_kl=-d)


def clip_cov(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
             clip_low: float = 0.2, clip_high: float = 0.2, share: float = 2e-4, band: tuple[float, float] = (1.0, 5.0),
             generator: torch.Generator | None = None, weights: Tensor | None = None) -> Loss:  # fmt: skip
    """PPO clip without dual clip, 0 for `share` of the tokens, at least one, drawn from those whose covariance
    (A - mean A)(log_probs - mean) over the call's tokens lies inside `band` and that PPO does not clip.

    Entropy mechanism, arXiv:2505.22617; verl `clip_cov`. generator: draws on the CPU; None = torch's.
    """
    _check_share(share)
    loss, metrics = ppo_clip(log_probs, old_log_probs, advantages, response_mask, clip_low=clip_low,
                             clip_high=clip_high, dual_clip=None, weights=weights)  # fmt: skip
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, None).detach()
    clipped = _beyond(d.exp(), advantages, 1 - clip_low, 1 + clip_high)
    covariance = _covariance(log_probs, advantages, response_mask)
    inside = (covariance > band[0]) & (covariance < band[1]) & (response_mask != 0) & ~clipped
    candidates = inside.reshape(-1).nonzero().squeeze(1)
    count = max(int(share * (response_mask != 0).sum()), 1)
    drawn = torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)
    dropped = torch.zeros_like(inside).reshape(-1)
    dropped[candidates[drawn]] = True
    dropped = dropped.view(inside.shape)
    del metrics["actor/pg_clipfrac_lower"]
    return loss.masked_fill(dropped, 0), metrics | {"actor/pg_clipfrac": masked_mean(dropped, response_mask)}


def kl_cov(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *,
           share: float = 2e-4, coefficient: float = 0.1, weights: Tensor | None = None) -> Loss:  # fmt: skip
    """-A r, plus coefficient |d| for `share` of the tokens, at least one, of greatest covariance (see `clip_cov`).

    Entropy mechanism, arXiv:2505.22617; verl `kl_cov`, which does not hold d. Its ppo_kl is the mean of |d|.
    """
    _check_share(share)
    d = log_ratio(log_probs, old_log_probs, advantages, response_mask, weights).clamp(-20, 20)
    covariance = _covariance(log_probs, advantages, response_mask).reshape(-1)
    is_token = (response_mask != 0).reshape(-1)
    order = covariance.masked_fill(~is_token, -torch.inf).argsort(descending=True)
    count = (is_token.sum().double() * share).floor().clamp(min=1)
    chosen = torch.zeros_like(is_token).scatter(0, order, torch.arange(len(order), device=d.device) < count)
    loss = -advantages * d.exp() + coefficient * d.abs() * chosen.view(d.shape)
    return result(loss, response_mask, weights, ppo_kl=d.abs())


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


def _beyond(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Tokens that PPO would clip."""
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


def _covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    centred = (kept(values.detach(), mask) - masked_mean(values, mask) for values in (advantages, log_probs))
    return next(centred) * next(centred)


def _check_share(share: float) -> None:
    if not share > 0:
        raise OptionError(f"share is {share}, needs a number above 0")
