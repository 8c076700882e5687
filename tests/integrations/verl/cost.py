"""What the queue adds to a step of verl's trainer: the figures of docs/train/verl.md.

python -m tests.integrations.verl.cost [TOKENS]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import ray
import transfer_queue as tq

from streamadv.run.run import find_run
from streamadv.status.read import read_status
from streamadv.store.connection import Connection

from ..cost import GROUPS, RUN, SIZE, STEPS, Times, fed
from .jobs import KWARGS, start_ray, trainer


def main(tokens: int) -> None:
    times = Times(time.process_time)
    start_ray()
    with fed((2 * STEPS + 2) * GROUPS, tokens, range(5, 15)) as url, tempfile.TemporaryDirectory() as folder:
        for advantages, last in (("streamadv", STEPS), ("verl", 2 * STEPS)):
            made = trainer(
                Path(folder),
                url,
                RUN,
                **{
                    f"+{KWARGS}__generate": False,
                    f"+{KWARGS}__max_staleness": "null",
                    f"+{KWARGS}__advantages": advantages,
                    "trainer__total_training_steps": last,
                    "trainer__v1__separate_async__parameter_sync_step": 1,
                    "trainer__save_freq": STEPS // 3,
                    "data__train_batch_size": GROUPS,
                    "actor_rollout_ref__actor__ppo_mini_batch_size": GROUPS,
                    "actor_rollout_ref__rollout__n": SIZE,
                },
            )
            if advantages == "streamadv":
                times.watch(made.replay_buffer, "sample")
                times.watch(made.replay_buffer.queue, "next_batch", "trained", "state_dict", "commit")
            made._compute_advantage = times.of(f"{advantages}'s advantages", made._compute_advantage)
            made.fit(None)
        connection = Connection(url)
        count = times.of(
            "groups ahead", lambda: read_status(find_run(connection, RUN)).admission.groups_ahead
        )
        for _ in range(STEPS):  # what `fill` does each step, where verl plays
            count()
        tq.close()
        ray.shutdown()
    print(f"{GROUPS * SIZE} rows of {tokens} tokens a step, {STEPS} steps")
    times.show()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
