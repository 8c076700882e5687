"""One policy update from a batch that older policies played, and the file that a trainer goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.utils import clip_grad_norm_

from .. import losses
from .policy import Policy, log_probs_and_entropy

CLIP_RATIO: Final = 0.2
TIS_CAP: Final = 2.0
LEARNING_RATE: Final = 1e-3
MAX_GRAD_NORM: Final = 1.0
ENTROPY_COEFFICIENT: Final = 0.01


#: The loss for stale rollouts by `--correction`: as if on policy; truncated importance sampling; PPO.
LOSSES: Final[dict[str, Callable[..., losses.Loss]]] = {
    "none": losses.reinforce,
    "tis": partial(losses.cispo, clip_low=1.0, clip_high=TIS_CAP - 1),
    "ppo": partial(losses.ppo_clip, clip_low=CLIP_RATIO, clip_high=CLIP_RATIO, dual_clip=None),
}


def new_optimizer(policy: Policy) -> torch.optim.AdamW:
    return torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)


def save_learning(file: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimiser."""
    torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, file)


def load_learning(file: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save_learning` has written."""
    state = torch.load(file, weights_only=True)
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(state["optimizer"])


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Any],
    num_tokens: int,
    correction: str,
) -> float:
    """One optimiser step on the token-mean loss of a batch.

    Returns the mean k3 estimate of KL(rollout policy, policy before the update): how stale the data is. `num_tokens` is
    the number of trainable tokens in the whole batch, so the result does not depend on how the batch was cut into
    micro-batches. Each micro-batch has `padded()`: input_ids, response_mask, rollout_log_probs and advantages, [B, T].
    """
    kl = 0.0
    for micro_batch in micro_batches:
        padded = micro_batch.padded()
        mask = padded.response_mask.bool()
        log_probs, entropy = (each[mask] for each in log_probs_and_entropy(policy, padded.input_ids))
        rollout_log_probs, advantages = padded.rollout_log_probs[mask], padded.advantages[mask]
        loss, _ = LOSSES[correction](log_probs, rollout_log_probs, advantages, torch.ones_like(log_probs))
        ((loss - ENTROPY_COEFFICIENT * entropy).sum() / num_tokens).backward()  # type: ignore[no-untyped-call]
        log_ratio = (log_probs - rollout_log_probs).detach()
        kl += (log_ratio.exp() - 1 - log_ratio).sum().item() / num_tokens
    clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return kl
