"""A trainer of one rank that trains a table instead of a model: `python examples/trainer.py redis://localhost:6379`."""

from __future__ import annotations

import sys

import torch

import streamadv as sa


def main(url: str) -> None:
    logits = torch.zeros(10, requires_grad=True)  # of each action token
    optimizer = torch.optim.SGD([logits], lr=1.0)
    queue = sa.TrainerQueue(url, run="example", batch_groups=2, chain="grpo", max_staleness=None)
    path = queue.resume("checkpoints")
    if path:
        logits.data.copy_(torch.load(path / "logits.pt"))
    for batch in queue:
        for mb in batch:
            log_probs = torch.log_softmax(logits, 0)[mb.input_ids]
            loss, _ = sa.losses.ppo_clip(log_probs, mb.rollout_log_probs, mb.advantages, mb.response_mask)
            (loss.sum() / batch.num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        queue.trained(batch)
        print(f"version {batch.version + 1}: mean reward {batch.metrics['critic/score/mean']:.2f}")
    with queue.checkpoint("checkpoints") as path:  # in a longer run also every few batches
        torch.save(logits.detach(), path / "logits.pt")
    queue.close()


if __name__ == "__main__":
    sa.run_program(main, sys.argv[1])
