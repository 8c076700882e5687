"""Terms beside the policy's loss: critic, entropy, demonstrations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OptionError
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
