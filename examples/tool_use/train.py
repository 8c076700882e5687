"""The trainer: GRPO on batches that older policies have played. Goes on from its checkpoint if there is one."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from learner import CORRECTIONS, Learner

import streamadv as sa


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    learner = Learner(options.correction, lr=options.lr, warm_up=options.warm_up, entropy=options.entropy)
    queue = sa.TrainerQueue(
        sa.redis_url(), run=os.environ["STREAMADV_RUN"], chain="grpo", batch_groups=options.batch_groups,
        max_staleness=options.max_staleness, drop_after=options.max_staleness,  # nothing older is trained on
        commit="manual", max_filtered_batches=None,
    )  # fmt: skip
    version, samples, seconds, rewards = 0, 0, 0.0, list[float]()
    if options.checkpoint.exists():
        state = learner.load(options.checkpoint)
        version, samples, seconds, rewards = (
            state[name] for name in ("version", "samples", "seconds", "rewards")
        )
        queue.load_state_dict(state["queue"])  # the batches after the checkpoint come again
        sa.weights.withdraw(options.weights, above=version)
    else:
        sa.weights.load(options.start, learner.policy)
    queue.open()  # before the weights: rollouts begin when they see some, and are paced then
    sa.weights.publish(options.weights, version, learner.policy.state_dict())

    started, log = time.monotonic() - seconds, options.log.open("a", buffering=1)
    for batch in queue:
        means = learner.update(batch, batch.num_tokens)
        version, samples = batch.version + 1, samples + batch.num_trajectories
        uri = sa.weights.publish(options.weights, version, learner.policy.state_dict())
        queue.trained(batch, weights=uri)  # admits groups, whose weights have to be there by now

        seconds, staleness = time.monotonic() - started, [value or 0 for value in batch.staleness]
        rewards.append(batch.metrics["critic/score/mean"])
        recent = sum(rewards[-10:]) / len(rewards[-10:])
        log.write(json.dumps({
            "version": version, "seconds": seconds, "samples": samples, "reward": rewards[-1], **means,
            "staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness),
            "dropped": batch.metrics.get("trajectories/dropped/stale", 0.0),
            "groups": sorted({reference.group_id for reference in batch.references}),
        }) + "\n")  # fmt: skip
        if version % 10 == 0:
            print(f"version {version}: reward {recent:.2f}, staleness at most {max(staleness)}", flush=True)
        reached = len(rewards) >= 10 and recent >= options.target
        ends = reached or version >= options.updates or seconds >= options.seconds
        if ends or version % options.checkpoint_every == 0:
            state = queue.state_dict()
            learner.save(options.checkpoint, version=version, samples=samples, seconds=seconds, rewards=rewards,
                         queue=state)  # fmt: skip
            queue.commit(state)  # after the checkpoint is saved
        if ends:
            break
    queue.finish()  # rollouts begin no more groups
    queue.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, default=Path("start.safetensors"), help="made by policy.py")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder to publish versions to")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
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
    parser.add_argument(
        "--target", type=float, default=2.0, help="mean reward of ten batches at which it ends"
    )
    sa.run_program(main, parser.parse_args())
