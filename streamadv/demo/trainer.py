"""The trainer process: consumes batches, updates the policy, publishes weights and versions, commits.

`python -m streamadv.demo.trainer DIRECTORY`, with the URL in STREAMADV_REDIS_URL. Started again after a crash it
goes on from its last checkpoint. Ends when the run has ended: every producer has finished, nothing is open.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import torch

import streamadv as sa
from streamadv import metrics

from ..processes import messages
from ..settings import load_settings
from .checkpoints import load_checkpoint, save_checkpoint
from .learning import new_optimizer, update
from .policy import Policy, seeded_policy
from .settings import BATCH_GROUPS, EVALUATE_EVERY, DemoSettings

CHECKPOINT_EVERY: Final = 5  # updates
TOKENS_PER_MICRO_BATCH: Final = 65536


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
        commit="manual",
    )
    metrics.serve(load_settings().metrics_port, settings.run)
    version = 0
    if (checkpoint := load_checkpoint(directory, policy, optimizer)) is not None:
        version, queue_state = checkpoint
        queue.load_state_dict(queue_state)
    sa.weights.withdraw(directory, above=version)
    publish(directory, version, policy)
    messages.send("published", version=version)
    committed = version
    for batch in queue:
        measured = update(policy, optimizer, batch, batch.num_tokens, settings.correction)
        metrics.training_metrics({"rollout_corr/k3_kl": measured.kl})
        version = batch.version + 1
        # Before `trained`: whoever hears of a version can load it.
        queue.trained(batch, weights=publish(directory, version, policy))
        if version % CHECKPOINT_EVERY == 0:
            commit(directory, version, policy, optimizer, queue)
            committed = version
        messages.send("update", version=version, **report(batch, measured))
    if version != committed:
        commit(directory, version, policy, optimizer, queue)
    queue.close()
    messages.send("finished", version=version)
    return 0


def publish(directory: Path, version: int, policy: Policy) -> str:
    return sa.weights.publish(directory, version, policy.state_dict(), keep_every=EVALUATE_EVERY)


def commit(
    directory: Path, version: int, policy: Policy, optimizer: torch.optim.Optimizer, queue: Any
) -> None:
    """Save weights and queue state together, then tell the pipeline: only now is the data deleted."""
    queue_state = queue.state_dict()
    save_checkpoint(directory, version, policy, optimizer, queue_state)
    queue.commit(queue_state)


def report(batch: Any, measured: Any) -> dict[str, Any]:
    """What the supervisor shows of one update."""
    staleness = [value for value in batch.staleness if value is not None]
    return {
        "reward": batch.metrics["critic/score/mean"],
        "kl": measured.kl,
        "entropy": measured.entropy,
        "clip_fraction": measured.clip_fraction,
        "trajectories": len(staleness),
        "staleness_sum": sum(staleness),
        "staleness_max": max(staleness, default=0),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
