"""What a group of a prompt costs beyond the same group by `producer.groups`: the figures of docs/produce/prompts.md.

python -m tests.promises.prompts.cost [--rounds 25] [--prompts 1000000] [--skip-solved 0]

Producer, grouper and trainer are in one thread, so its processor time is theirs. The advantage worker, which knows
nothing of prompts, has a thread of its own, and is left out. Both kinds of group take turns, each as often first as
the other. Of each part the medians of all rounds stand, and that of what prompts take more than the groups beside them.
`commit` has what carries the ends of the prompts; `save` comes once a checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

import streamadv as sa
from streamadv.advantage.worker import run_worker
from streamadv.grouping.housekeeping import Housekeeping
from streamadv.run.consumer import Consumer
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.support import consumer_of, group_all, join

GROUPS: Final = 256
SIZE: Final = 2
PARTS: Final = ("begin", "push", "group", "train", "save", "commit")


class Clock:
    """Microseconds of a group in each part, here and at the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._now = (0.0, 0.0)
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def _read(self) -> tuple[float, float]:
        server: Any = self._connection.scripts.info("cpu")
        return time.thread_time(), server["used_cpu_user"] + server["used_cpu_sys"]

    def start(self) -> None:
        gc.collect()
        self._now = self._read()

    def note(self, part: str) -> None:
        now = self._read()
        self.spent[part].append(
            tuple((after - before) / GROUPS * 1e6 for before, after in zip(self._now, now, strict=True))  # type: ignore[arg-type]
        )
        self._now = self._read()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.promises.prompts.cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--skip-solved", type=int, default=0)
    given = parser.parse_args()
    with EmbeddedServer(None) as server:
        play(server.url, given.rounds, given.prompts, given.skip_solved)


def play(url: str, rounds: int, count: int, skip_solved: int) -> None:
    prompts = sa.Prompts(range(count), epochs=3, skip_solved=skip_solved)
    settings = sa.RunSettings(keep_bytes=0)
    with sa.Producer(url, "cost", settings=settings) as producer:
        run, stop = join(url, "cost"), threading.Event()
        worker = threading.Thread(target=run_worker, args=(join(url, "cost"), stop), kwargs={"device": "cpu"})
        worker.start()
        grouper = consumer_of(run), Housekeeping(run)
        clocks = {"groups": Clock(run.connection), "prompts": Clock(run.connection)}
        kinds = {
            "groups": producer.groups(SIZE, metadata={"prompt": 123_456, "epoch": 0}),
            "prompts": pairs(producer, prompts),
        }
        options: dict[str, Any] = {"batch_groups": GROUPS, "max_staleness": 2, "commit": "manual"}
        with TrainerQueue(url, "cost", chain={"estimator": "grpo"}, **options) as queue:
            for number in range(rounds):
                order = list(kinds) if number % 2 else list(reversed(kinds))
                for kind in order:
                    one_round(clocks[kind], kinds[kind], run, grouper, queue)
        show(clocks)
        stop.set()
        worker.join()
        for kind in kinds.values():
            kind.close()


def pairs(producer: sa.Producer, prompts: sa.Prompts) -> Iterator[Any]:
    for _, group in producer.prompts(prompts, SIZE):
        yield group


def one_round(
    clock: Clock, groups: Iterator[Any], run: Any, grouper: tuple[Consumer, Housekeeping], queue: TrainerQueue
) -> None:
    record = {"input_ids": np.arange(16, dtype=np.int32), "response_mask": np.ones(16, np.uint8)}
    record["rollout_log_probs"] = np.zeros(16, np.float32)
    clock.start()
    begun = [next(groups) for _ in range(GROUPS)]
    clock.note("begin")
    for group in begun:
        with group:
            for rollout in group:
                rollout.push(**record, reward=float(rollout.rollout_index))
    clock.note("push")
    group_all(run, grouper[0], keeper=grouper[1])
    clock.note("group")
    batch = queue.next_batch(timeout=30)
    assert batch is not None
    queue.trained(batch)
    clock.note("train")
    state = queue.state_dict()
    clock.note("save")
    queue.commit(state)
    clock.note("commit")


def show(clocks: dict[str, Clock]) -> None:
    print(f"{'us a group':12}{'groups':>18}{'prompts':>18}{'more':>18}   (here, server)")
    spent = {kind: {part: np.array(clocks[kind].spent[part]) for part in PARTS} for kind in clocks}
    for parts in spent.values():
        parts["all"] = np.sum([parts[part] for part in PARTS], axis=0)
    for part in (*PARTS, "all"):
        groups, prompts = spent["groups"][part], spent["prompts"][part]
        row = np.median([groups, prompts, prompts - groups], axis=1)
        print(f"{part:12}" + "".join(f"{here:10.1f}{server:8.1f}" for here, server in row))


if __name__ == "__main__":
    main()
