"""What a soak runs: a grouper, a steady producer, producers that come and go, and a training job of two ranks.

    python -m tests.soak.roles ROLE URL RUN

Some groups fail on purpose, so that everything a run keeps for a while has something to keep: rollouts that fail,
groups that expire, groups without a column the chain needs, groups with equal rewards.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from streamadv import cli
from streamadv.errors import Busy, NoBatchError
from streamadv.processes import messages
from streamadv.producer import Producer
from streamadv.producer import logic as producer_logic
from streamadv.run import dead_letters
from streamadv.run.manifest import RunSettings
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Trajectory
from tests.support import ended, trajectory

SIZE: Final = 2
BATCH_GROUPS: Final = 2
HEARTBEAT_S: Final = 0.5
COMMIT_EVERY: Final = 5
REPORT_EVERY: Final = 50
DEAD_KEPT: Final = 3
EXPIRING: Final = 97  # every so many groups one goes this way
FAILING: Final = 31
INCOMPLETE: Final = 17
EQUAL: Final = 13
CHAIN: Final = {"estimator": "gae", "whiten_advantages": True}
VALUES: Final = [0.5] * 5


def settings(dedupe_groups: int) -> RunSettings:
    """Bounds small enough to be reached in a short run."""
    return RunSettings(
        shards=2,
        group_deadline_s=2.0,
        max_trajectory_bytes=1 << 16,
        max_bytes=1 << 26,
        dedupe_groups=dedupe_groups,
        dead_bytes=1 << 13,
        keep_bytes=1 << 14,
        zero_variance_filter=True,
    )


def members(group_id: str, number: int) -> list[Trajectory]:
    """The members of a producer's n-th group."""
    if number % EXPIRING == 0:
        return [trajectory(group_id, 0, SIZE, values=VALUES)]
    if number % FAILING == 0:
        return [trajectory(group_id, 0, SIZE, values=VALUES), ended(group_id, 1, SIZE, "failed")]
    if number % INCOMPLETE == 0:
        return [trajectory(group_id, index, SIZE) for index in range(SIZE)]
    if number % EQUAL == 0:
        return [trajectory(group_id, index, SIZE, values=VALUES, reward=1.0) for index in range(SIZE)]
    return [trajectory(group_id, index, SIZE, values=VALUES) for index in range(SIZE)]


def group(url: str, run: str) -> None:
    """A grouper that keeps few dead letters."""
    vars(dead_letters)["DEAD_KEPT"] = DEAD_KEPT
    sys.exit(cli.main(["worker", "grouper", "--redis", url, "--run", run, "--metrics-port", "0"]))


def produce(url: str, run: str) -> None:
    """Push groups until the process is ended."""
    with Producer(url, run) as producer:
        for number in itertools.count(1):
            group = producer.begin_group(SIZE)
            group.push(members(group.group_id, number))


def come_and_go(url: str, run: str) -> None:
    """One producer after another: each pushes a group and finishes."""
    for number in itertools.count(1):
        with Producer(url, run) as producer:
            try:
                group = producer.begin_group(SIZE, timeout=5.0)
            except Busy:
                continue
            group.push(members(group.group_id, number))
            producer.finish()


def train(url: str, run: str) -> None:
    """Both ranks of a training job in turn; rank 0 alone marks and commits."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "world_size": 2,
        "job": "soak",
        "batch_groups": BATCH_GROUPS,
        "max_staleness": 64,
        "prefetch": 4,
        "chain": CHAIN,
        "pushed": ("values",),
        "commit": "manual",
        "max_filtered_batches": None,
        "durability_window": 1.0,  # committed groups stay in the state for so long: a short run levels off
    }
    first = TrainerQueue(url, run, rank=0, **options)
    second = TrainerQueue(url, run, rank=1, **options)
    for number in itertools.count(1):
        batch = _next(first, number)
        other = _next(second, number)
        assert batch.id == other.id, f"ranks have batches {batch.id} and {other.id}"
        first.trained(batch)
        if number % COMMIT_EVERY == 0:
            first.commit(first.state_dict())
        if number % REPORT_EVERY == 0:
            states = [len(json.dumps(queue.state_dict())) for queue in (first, second)]
            messages.send("trained", batches=number, states=states)


def _next(queue: TrainerQueue, number: int) -> Any:
    while True:
        try:
            return queue.next_batch(timeout=5.0 + number % 60)
        except NoBatchError as error:
            print(error, file=sys.stderr, flush=True)


ROLES: Final[dict[str, Callable[[str, str], None]]] = {
    "grouper": group,
    "producer": produce,
    "passing": come_and_go,
    "trainer": train,
}


def main() -> None:
    """Run one role until the process is ended; the end of stdin ends it."""
    role, url, run = sys.argv[1:]
    vars(producer_logic)["HEARTBEAT_S"] = HEARTBEAT_S
    threading.Thread(target=lambda: (sys.stdin.read(), sys.exit()), daemon=True).start()
    ROLES[role](url, run)


if __name__ == "__main__":
    main()
