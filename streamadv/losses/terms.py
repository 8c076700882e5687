"""Terms beside the policy's loss: critic, entropy, demonstrations, and a teacher's distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..algorithms.kl import KLPenalty, approx_kl
from ..errors import ArgumentError, OptionError
from .sums import Loss, check_shapes, kept, masked_mean, result


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *,
               clip: float | None = 0.5, weights: Tensor | None = None) -> Loss:  # fmt: skip
    """Half of max((v - R)^2, (v held in old_values - clip .. old_values + clip - R)^2): the loss of a critic.

    values: of the critic that is trained; old_values: those that the advantages were made from, the column `values`;
    returns: the column `returns`. clip None: half of (v - R)^2. PPO's code; verl `compute_value_loss`, ROLL's critic
    (seq-mean-token-mean over all rows). Metric: critic/vf_clipfrac.
    """
    check_shapes(
        values, "values", old_values=old_values, returns=returns, response_mask=response_mask, weights=weights
    )
    new, old, aim = kept(values, response_mask), old_values.detach(), returns.detach()
    plain = (new - aim).square()
    held = (
        plain if clip is None else (torch.minimum(torch.maximum(new, old - clip), old + clip) - aim).square()
    )
    loss, _ = result(torch.maximum(plain, held) / 2, response_mask, weights)
    return loss, {"critic/vf_clipfrac": masked_mean(held > plain, response_mask)}


def entropy(logits: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """The entropy of each distribution: logsumexp - sum_v p(v) logit(v), logits [..., V] to [...], float32 at least.

    0 where `response_mask` [...] is 0, without a gradient, whatever stands there; None = everywhere. A loss of a policy
    takes it off: loss - 0.01 * aggregate(entropy(logits, mask), mask). verl and ROLL `entropy_from_logits`.
    """
    if response_mask is not None:
        check_shapes(response_mask, "response_mask", logits=logits[..., 0])
        logits = kept(logits, response_mask[..., None])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values = torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
    return values if response_mask is None else kept(values, response_mask)


def sum_pi_squared(logits: Tensor) -> Tensor:
    """sum_v p(v)^2, logits [..., V] to [...] float32, without gradient: the column that the token baselines need.

    exp(logsumexp(2 logit) - 2 logsumexp(logit)); verl `calculate_sum_pi_squared_from_logits`.
    """
    logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    return torch.exp(torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1))


def high_entropy_mask(entropies: Tensor, response_mask: Tensor, top: float = 0.2) -> Tensor:
    """`response_mask` where a token's entropy is among the highest `top` of the call's tokens, else 0.

    From the linear quantile 1 - top on (arXiv:2506.01939; TRL `top_entropy_quantile`, which gathers the ranks'
    entropies). Give it to the loss instead of the mask, and go on dividing by the counts of the whole.
    """
    if not 0 <= top <= 1:
        raise OptionError(f"top is {top}, needs a number in 0 .. 1")
    check_shapes(entropies, "entropies", response_mask=response_mask)
    counted = entropies.detach()[response_mask != 0].float()
    if not len(counted):
        return response_mask
    ascending = counted.sort().values
    place = (1 - top) * (len(counted) - 1)  # torch.quantile takes no more than 16 million
    below, above = ascending[int(place)], ascending[min(int(place) + 1, len(counted) - 1)]
    is_high = entropies >= torch.lerp(below, above, place - int(place))
    return torch.where(is_high, response_mask, torch.zeros_like(response_mask))


def sft(log_probs: Tensor, response_mask: Tensor, *, weights: Tensor | None = None) -> Loss:
    """-log_probs: the negative log-likelihood of demonstrations; verl `sft_loss` is its token-mean."""
    check_shapes(log_probs, "log_probs", response_mask=response_mask, weights=weights)
    return result(
        -kept(log_probs, response_mask), response_mask, weights, sft=-kept(log_probs, response_mask)
    )


def distill(log_probs: Tensor, teacher_log_probs: Tensor, response_mask: Tensor, *, penalty: KLPenalty = "k3",
            bound: float | None = 10.0, weights: Tensor | None = None) -> Loss:  # fmt: skip
    """The KL of the policy from a teacher by the sampled tokens, `approx_kl`, held in -bound .. bound.

    As a loss take k2, k3 or a name with "+": the mean gradient of k1 is 0. -loss.detach() in place of advantages, with
    any policy loss, is verl's `use_policy_gradient`; the chain's `distill` does that before the first step. Several
    teachers: add their losses, each times a coefficient, with a mask of the rows that it has read. verl
    `distillation_loss`, estimators.
    """
    check_shapes(log_probs, "log_probs", teacher_log_probs=teacher_log_probs, response_mask=response_mask,
                 weights=weights)  # fmt: skip
    policy, teacher = kept(log_probs, response_mask), kept(teacher_log_probs.detach(), response_mask)
    loss = approx_kl(policy, teacher, penalty)
    loss, metrics = result(loss if bound is None else loss.clamp(-bound, bound), response_mask, weights)
    return loss, metrics | {"distillation/abs_loss": masked_mean(loss.abs(), response_mask)}


def distill_top_k(logits: Tensor, teacher_log_probs: Tensor, teacher_ids: Tensor, response_mask: Tensor, *,
                  beta: float = 0.0, temperature: float = 1.0, least: float | None = -10.0, tail: bool = False,
                  weights: Tensor | None = None) -> Loss:  # fmt: skip
    """A divergence between policy p and teacher q over K tokens of each position.

    beta 0: forward, sum_k q (log q - log p). beta 1: reverse, sum_k p (log p - log q). Between: the generalised
    Jensen-Shannon divergence, beta KL(q, m) + (1 - beta) KL(p, m) with m = beta q + (1 - beta) p.

    Args:
      logits: [..., V], the policy's, at the position whose next token the others are about.
      teacher_log_probs, teacher_ids: [..., K], the teacher's likeliest tokens; K may be V.
      response_mask: [...].
      temperature: divides `logits`; the teacher's log-probs have theirs already.
      least: log-probs below it count as it; None = as they are.
      tail: a further token holds the rest of either's probability. Without it a divergence can be below 0, because K
        probabilities do not add up to 1; verl then takes 0 (`loss.clamp(min=0)`).

    GKD, arXiv:2306.13649; verl `forward_kl_topk` is beta 0, TRL `generalized_jsd_loss` with K = V and least None is any
    beta, ROLL forward_kl and reverse_kl (K = V). Metrics: student_mass and teacher_mass, the probability in the K.
    """
    if not 0 <= beta <= 1:
        raise OptionError(f"beta is {beta}, needs a number in 0 .. 1")
    if teacher_ids.shape != teacher_log_probs.shape or logits.shape[:-1] != teacher_ids.shape[:-1]:
        raise ArgumentError(
            f"teacher_ids has shape {[*teacher_ids.shape]}, needs that of teacher_log_probs, "
            f"{[*teacher_log_probs.shape]}, and the positions of logits, {[*logits.shape]}"
        )
    is_token = (response_mask != 0)[..., None]
    logits = kept(logits, is_token) / temperature
    ids = teacher_ids.long().masked_fill(~is_token, 0)
    chosen = logits.gather(-1, ids) - torch.logsumexp(logits, -1, keepdim=True)
    p = torch.where(is_token, chosen, 0.0)
    q = torch.where(is_token, teacher_log_probs.detach().to(p.dtype), 0.0)
    masses = {name: values.exp().sum(-1) for name, values in (("student_mass", p), ("teacher_mass", q))}
    if tail:
        p, q = (torch.cat([logs, _rest(logs)], -1) for logs in (p, q))
    if least is not None:
        p, q = p.clamp(min=least), q.clamp(min=least)
    if beta in (0, 1):
        one, other = (q, p) if beta == 0 else (p, q)
        loss = _divergence(one, other)
    else:
        mixed = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
        loss = beta * _divergence(q, mixed) + (1 - beta) * _divergence(p, mixed)
    loss, _ = result(loss, response_mask, weights)
    return loss, {f"distillation/{name}": masked_mean(mass, response_mask) for name, mass in masses.items()}


def _divergence(one: Tensor, other: Tensor) -> Tensor:
    """sum p_one (log p_one - log p_other) over the last axis; a token of probability 0 in `one` counts 0."""
    terms = one.exp() * (one - other)
    return torch.where(one.isneginf(), 0.0, terms).sum(-1)


def _rest(log_probs: Tensor) -> Tensor:
    """[..., 1]: the log of what the probabilities leave of 1, at least 1e-7."""
    return torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-7))
