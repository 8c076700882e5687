"""What the queue adds to a step of verl's trainer: the figures of docs/how-to/verl.md.

python -m tests.integrations.verl.cost [TOKENS]
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue as tq

import streamadv as sa
from streamadv.run.run import find_run
from streamadv.status.read import read_status
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer

from .jobs import KWARGS, start_ray, trainer

STEPS, GROUPS, SIZE = 12, 8, 8
RUN = "cost"


def serve(url: str) -> None:
    """A grouper and an advantage worker, in a process of their own."""
    from streamadv.advantage.worker import run_worker
    from streamadv.grouping.grouper import run_grouper
    from tests.support import join

    threading.Thread(target=run_grouper, args=(join(url, RUN), threading.Event()), daemon=True).start()
    run_worker(join(url, RUN), threading.Event(), device="cpu")


def push(url: str, tokens: int) -> None:
    random = np.random.default_rng(0)
    mask = np.r_[np.zeros(tokens // 2, bool), np.ones(tokens - tokens // 2, bool)]
    with sa.Producer(url, run=RUN) as producer:
        for _ in range((2 * STEPS + 2) * GROUPS):
            with producer.group(SIZE) as group:
                for rollout in group:
                    ids = random.integers(5, 15, tokens)
                    reward = float(random.random())
                    rollout.push(
                        input_ids=ids, response_mask=mask, rollout_log_probs=-2.5 * mask, reward=reward
                    )


def main(tokens: int) -> None:
    spent: dict[str, list[float]] = defaultdict(list)  # this process's processor time
    waited: dict[str, list[float]] = defaultdict(list)  # wall time

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            cpu, wall = time.process_time(), time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[name].append(time.process_time() - cpu)
                waited[name].append(time.perf_counter() - wall)

        return call

    start_ray()
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        push(server.url, tokens)
        worker = multiprocessing.get_context("spawn").Process(target=serve, args=(server.url,), daemon=True)
        worker.start()
        for advantages, last in (("streamadv", STEPS), ("verl", 2 * STEPS)):
            made = trainer(
                Path(folder),
                server.url,
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
            sampler = made.replay_buffer
            if advantages == "streamadv":
                for owner, name in (
                    (sampler, "sample"),
                    (sampler.queue, "next_batch"),
                    (sampler.queue, "trained"),
                    (sampler.queue, "state_dict"),
                    (sampler.queue, "commit"),
                ):
                    setattr(owner, name, timed(name, getattr(owner, name)))
            made._compute_advantage = timed(f"{advantages}'s advantages", made._compute_advantage)
            made.fit(None)
        connection = Connection(server.url)
        count = timed("groups ahead", lambda: read_status(find_run(connection, RUN)).admission.groups_ahead)
        for _ in range(STEPS):  # what `fill` does each step, where verl plays
            count()
        worker.kill()
        tq.close()
        ray.shutdown()
    print(f"{GROUPS * SIZE} rows of {tokens} tokens a step, {STEPS} steps")
    for name, calls in spent.items():
        cpu, wall = (statistics.median(times[name]) * 1000 for times in (spent, waited))
        print(f"{name:24} {cpu:8.1f} ms processor time, {wall:8.1f} ms wall, median of {len(calls)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
