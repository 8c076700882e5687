"""The trainer: GRPO. Started again after a crash, it goes on from its newest checkpoint."""

import torch
from policy import SETTINGS, TOKENIZER, new_policy

import streamadv as sa

training = SETTINGS["training"]
policy = new_policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=training["lr"], weight_decay=0.0)


def publish(version):
    return sa.weights.publish("weights", version, policy.state_dict())


def save(queue):
    with queue.checkpoint("checkpoints") as path:  # what it holds is trained
        torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, path / "state.pt")


def update(batch):
    for mb in batch:
        rows = mb.padded()  # [rows, tokens]
        logits = policy(rows.input_ids[:, :-1]).logits.float()  # position t - 1 predicts token t
        log_probs = torch.log_softmax(logits, -1).gather(-1, rows.input_ids[:, 1:, None]).squeeze(-1)
        loss, _ = sa.losses.ppo_clip(
            log_probs, rows.rollout_log_probs[:, 1:], rows.advantages[:, 1:], rows.response_mask[:, 1:]
        )
        (loss.sum() / batch.num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main():
    with sa.TrainerQueue(
        sa.redis_url(), chain="grpo", batch_groups=training["batch_groups"], max_staleness=training["max_staleness"],
        tokens_per_micro_batch=training["tokens_per_micro_batch"], settings=sa.RunSettings(tokenizer=TOKENIZER),
    ) as queue:  # fmt: skip
        path = queue.resume("checkpoints")  # such as checkpoints/20, or None
        if path:
            saved = torch.load(path / "state.pt")
            policy.load_state_dict(saved["policy"])
            optimizer.load_state_dict(saved["optimizer"])
        queue.open(weights=publish(int(path.name) if path else 0))  # the producer begins
        for batch in queue:
            update(batch)
            queue.trained(batch, weights=publish(batch.version + 1))
            print(f"version {batch.version + 1}: reward {batch.metrics['critic/score/mean']:.2f}")
            if (batch.version + 1) % training["checkpoint_every"] == 0:
                save(queue)
        save(queue)


sa.run_program(main)
