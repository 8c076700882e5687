"""Two groups of two rollouts."""

import streamadv as sa

with sa.Producer("redis://localhost:6379", run="exp1") as producer:
    for _ in range(2):
        with producer.group(2) as group:
            for rollout in group:
                rollout.push(
                    input_ids=[1, 2, 3, 4, 5],
                    response_mask=[0, 0, 1, 1, 1],
                    reward=float(rollout.rollout_index),
                )
