"""One policy update from a batch that older policies played: the loss, the step, and what they showed.

`save_learning` writes what a trainer goes on with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from .. import weights
from .policy import Policy, log_probs_and_entropy

CLIP_RATIO: Final = 0.2
TIS_CAP: Final = 2.0
LEARNING_RATE: Final = 1e-3
MAX_GRAD_NORM: Final = 1.0
ENTROPY_COEFFICIENT: Final = 0.01


def policy_loss(
    correction: str, log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss per token and whether the clip or cap was active there; all arguments and results have one shape.

    With r = exp(log_probs - rollout_log_probs), the ratio of the policy being trained to the one that played:
    none: -A log π (REINFORCE as if on policy);  tis: -min(r, 2) A log π with the weight held constant
    (truncated importance sampling);  ppo: -min(r A, clip(r, 0.8, 1.2) A) (Schulman et al. 2017).
    """
    ratio = (log_probs - rollout_log_probs).exp()
    if correction == "none":
        return -advantages * log_probs, torch.zeros_like(ratio)
    if correction == "tis":
        weight = ratio.detach().clamp(max=TIS_CAP)
        return -weight * advantages * log_probs, (ratio > TIS_CAP).float()
    clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return loss, (clipped * advantages < ratio * advantages).float()


@dataclass(slots=True)
class UpdateMetrics:
    """Means over the trainable tokens of a batch."""

    kl: float = 0.0  # k3 estimate of KL(rollout policy, policy before the update): how stale the data is
    entropy: float = 0.0
    clip_fraction: float = 0.0


def new_optimizer(policy: Policy) -> torch.optim.AdamW:
    return torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)


def save_learning(file: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimiser."""
    moments = {
        f"optimizer/{index}/{name}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    weights.save(file, {f"policy/{name}": value for name, value in policy.state_dict().items()} | moments)


def load_learning(file: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save_learning` has written."""
    state: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in load_file(file).items():
        kind, _, rest = name.partition("/")
        if kind == "policy":
            state[rest] = value
        else:
            index, _, moment = rest.partition("/")
            moments.setdefault(int(index), {})[moment] = value
    policy.load_state_dict(state)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Any],
    num_tokens: int,
    correction: str,
) -> UpdateMetrics:
    """One optimiser step on the token-mean loss of a batch.

    `num_tokens` is the number of trainable tokens in the whole batch, so the result does not depend on how the
    batch was cut into micro-batches. Each micro-batch has `padded()`: input_ids, response_mask,
    rollout_log_probs and advantages as [B, T].
    """
    metrics = UpdateMetrics()
    for micro_batch in micro_batches:
        padded = micro_batch.padded()
        mask = padded.response_mask.bool()
        log_probs, entropy = log_probs_and_entropy(policy, padded.input_ids)
        log_probs, entropy = log_probs[mask], entropy[mask]
        rollout_log_probs = padded.rollout_log_probs[mask]
        token_loss, clipped = policy_loss(correction, log_probs, rollout_log_probs, padded.advantages[mask])
        loss = (token_loss - ENTROPY_COEFFICIENT * entropy).sum() / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        log_ratio = (log_probs - rollout_log_probs).detach()
        metrics.kl += (log_ratio.exp() - 1 - log_ratio).sum().item() / num_tokens
        metrics.entropy += entropy.sum().item() / num_tokens
        metrics.clip_fraction += clipped.sum().item() / num_tokens
    clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return metrics
