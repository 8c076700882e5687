"""A batch with old log-probs and importance weights, and a policy of one number."""

import torch

import streamadv as sa


class Actor:
    def __init__(self):
        self.shift = torch.zeros((), requires_grad=True)

    def log_probs(self, mb):
        return mb.rollout_log_probs + self.shift


with sa.Producer("redis://localhost:6379", run="exp1") as producer:
    rollouts = [
        {
            "rollout_index": index,
            "input_ids": [5, 6, 7],
            "response_mask": [0, 1, 1],
            "rollout_log_probs": [0.0, -0.5, -0.7],
            "reward": float(index),
        }
        for index in range(2)
    ]
    with producer.group(size=2) as group:
        group.push(rollouts)
    producer.finish()

actor = Actor()
world_size = 1
chain = {"estimator": "grpo", "correction": {"level": "token", "mode": "truncate", "upper": 2.0}}
queue = sa.TrainerQueue(
    "redis://localhost:6379", run="exp1", batch_groups=1, chain=chain, late={"old_log_probs": actor.log_probs}
)
batch = queue.next_batch()
