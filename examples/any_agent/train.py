"""The trainer: GRPO on what the engine has sampled. Each version of the model is a folder that the gateway loads."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import streamadv as sa


def log_probs_of(model: torch.nn.Module, mb: Any) -> torch.Tensor:
    """[N], 0 at the first token of a row, which nothing predicts."""
    rows = mb.padded()
    logits = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, :-1]
    of_next = torch.log_softmax(logits.float(), -1).gather(-1, rows.input_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(of_next, (1, 0))[rows.attention_mask]


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)

    def save(version: int) -> str:
        """The folder of a version; the last eight stay."""
        folder = options.weights / f"{version:06}"
        model.save_pretrained(folder)
        shutil.rmtree(options.weights / f"{version - 8:06}", ignore_errors=True)
        return folder.absolute().as_uri()

    queue = sa.TrainerQueue(
        sa.redis_url(), chain="grpo", batch_groups=options.batch_groups, commit="each_batch",
        max_staleness=options.max_staleness, max_filtered_batches=None,
    )  # fmt: skip
    queue.open(weights=save(0))  # rollouts begin when the gateway has loaded them
    for batch in queue:
        furthest = 0.0  # of the log-probs from those of the engine, whose weights max_staleness lets be older
        for mb in batch:
            log_probs = log_probs_of(model, mb)
            loss, _ = sa.losses.ppo_clip(log_probs, mb.rollout_log_probs, mb.advantages, mb.response_mask)
            (loss.sum() / batch.num_tokens).backward()
            apart = (log_probs.detach() - mb.rollout_log_probs)[mb.response_mask].abs()
            furthest = max(furthest, apart.max().item())
        optimizer.step()
        optimizer.zero_grad()
        queue.trained(batch, weights=save(batch.version + 1))
        reward = batch.metrics["critic/score/mean"]
        with options.log.open("a") as log:
            log.write(json.dumps({"version": batch.version, "reward": reward, "furthest": furthest}) + "\n")
        print(f"version {batch.version}: mean reward {reward:.2f}", flush=True)
        if batch.version + 1 >= options.updates:
            break
    queue.finish()  # rollouts begin no more groups
    queue.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="model", help="folder, made by model.py, or a model's name")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder of the versions")
    parser.add_argument("--log", type=Path, default=Path("log.jsonl"), help="gets a line for each update")
    parser.add_argument("--batch-groups", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--updates", type=int, default=60, help="after which it ends")
    sa.run_program(main, parser.parse_args())
