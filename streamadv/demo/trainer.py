"""The trainer process: consumes batches, updates the policy, publishes weights and versions, commits.

`python -m streamadv.demo.trainer DIRECTORY`, with the URL in STREAMADV_REDIS_URL. Started again after a crash it
goes on from its last checkpoint. Ends when the run has ended: every producer has finished, nothing is open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.utils import clip_grad_norm_

import streamadv as sa
from streamadv import losses, metrics

from ..processes import messages
from ..settings import load_settings
from .policy import Policy, log_probs_and_entropy, seeded_policy
from .settings import BATCH_GROUPS, EVALUATE_EVERY, DemoSettings

CHECKPOINT_EVERY: Final = 5  # updates
LEARNING: Final = "learning.pt"
TOKENS_PER_MICRO_BATCH: Final = 65536
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


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    directory = Path(arguments[0])
    settings = DemoSettings.read(directory)
    policy = seeded_policy(settings.seed)
    optimizer = new_optimizer(policy)
    queue = sa.TrainerQueue(
        os.environ["STREAMADV_REDIS_URL"],
        run=settings.run,
        batch_groups=BATCH_GROUPS,
        tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH,
        max_staleness=settings.max_staleness,
        chain={"estimator": settings.estimator},
    )
    metrics.serve(load_settings().metrics_port, settings.run)
    checkpoints = directory / "checkpoints"
    if (path := queue.resume(checkpoints)) is not None:
        load_learning(path / LEARNING, policy, optimizer)
    version = queue.state_dict()["version"]
    publish(directory, version, policy)
    messages.send("published", version=version)
    committed = version
    for batch in queue:
        kl = update(policy, optimizer, batch, batch.num_tokens, settings.correction)
        metrics.training_metrics({"rollout_corr/k3_kl": kl})
        version = batch.version + 1
        # Before `trained`: whoever hears of a version can load it.
        queue.trained(batch, weights=publish(directory, version, policy))
        if version % CHECKPOINT_EVERY == 0:
            save(queue, checkpoints, policy, optimizer)
            committed = version
        staleness = [value for value in batch.staleness if value is not None]
        messages.send(  # what the supervisor shows of it
            "update",
            version=version,
            reward=batch.metrics["critic/score/mean"],
            kl=kl,
            trajectories=len(staleness),
            staleness_sum=sum(staleness),
            staleness_max=max(staleness, default=0),
        )
    if version != committed:
        save(queue, checkpoints, policy, optimizer)
    queue.close()
    settings.finish(directory, version)
    messages.send("finished", version=version)
    return 0


def publish(directory: Path, version: int, policy: Policy) -> str:
    return sa.weights.publish(directory, version, policy.state_dict(), keep_every=EVALUATE_EVERY)


def new_optimizer(policy: Policy) -> torch.optim.AdamW:
    return torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)


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


def save(queue: Any, checkpoints: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """What the checkpoint holds is trained: only now is the data deleted."""
    with queue.checkpoint(checkpoints, keep=1) as path:
        torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, path / LEARNING)


def load_learning(file: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save` has written."""
    state = torch.load(file, weights_only=True)
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
