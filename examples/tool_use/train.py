"""The trainer: GRPO on batches that older policies have played. Goes on from its checkpoint if there is one."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from learner import CORRECTIONS, Learner
from progress import Progress

import streamadv as sa


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    learner = Learner(options.correction, lr=options.lr, warm_up=options.warm_up, entropy=options.entropy)
    progress = Progress(options.log, updates=options.updates, seconds=options.seconds, target=options.target)
    queue = sa.TrainerQueue(
        sa.redis_url(), chain="grpo", batch_groups=options.batch_groups,
        max_staleness=options.max_staleness, drop_after=options.max_staleness,  # nothing older is trained on
        max_filtered_batches=None,
    )  # fmt: skip
    path = queue.resume(options.checkpoints)  # the batches after the checkpoint come again
    if path:
        progress.load_state_dict(learner.load(path / "learner.pt")["progress"])
    else:
        sa.weights.load(options.start, learner.policy)

    def publish(version: int) -> str:
        policy = learner.policy.state_dict()
        return sa.weights.publish(options.weights, version, policy, keep_every=options.keep_every)

    queue.open(weights=publish(progress.version))  # rollouts begin, and are paced
    for batch in queue:
        figures = learner.update(batch, batch.num_tokens)
        weights = publish(batch.version + 1)
        queue.trained(batch, weights=weights)  # admits groups, whose weights have to be there by now
        progress.note(batch, figures)
        if progress.is_over or progress.version % options.checkpoint_every == 0:
            with queue.checkpoint(options.checkpoints) as path:  # what it holds is trained
                learner.save(path / "learner.pt", progress=progress.state_dict())
        if progress.is_over:
            break
    queue.finish()  # rollouts begin no more groups
    queue.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, default=Path("start.safetensors"), help="made by policy.py")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder to publish versions to")
    parser.add_argument("--keep-every", type=int, default=10, metavar="VERSIONS", help="kept for evaluate.py")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="UPDATES")
    parser.add_argument("--log", type=Path, default=Path("log.jsonl"), help="gets a line for each update")
    parser.add_argument("--max-staleness", type=int, default=2, help="0: synchronous")
    parser.add_argument("--correction", choices=CORRECTIONS, default="tis")
    parser.add_argument("--batch-groups", type=int, default=8)
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--warm-up", type=int, default=10, metavar="UPDATES", help="until lr is reached")
    parser.add_argument("--entropy", type=float, default=0.01, help="coefficient")
    parser.add_argument("--updates", type=int, default=100, help="after which it ends")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which it ends")
    parser.add_argument("--target", type=float, default=2.0, help="mean reward of ten batches, where it ends")
    sa.run_program(main, parser.parse_args())
