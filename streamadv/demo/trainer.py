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
from .learning import load_learning, new_optimizer, save_learning, update
from .policy import Policy, seeded_policy
from .settings import BATCH_GROUPS, EVALUATE_EVERY, DemoSettings

CHECKPOINT_EVERY: Final = 5  # updates
LEARNING: Final = "learning.pt"
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


def save(queue: Any, checkpoints: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """What the checkpoint holds is trained: only now is the data deleted."""
    with queue.checkpoint(checkpoints, keep=1) as path:
        save_learning(path / LEARNING, policy, optimizer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
