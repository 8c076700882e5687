"""The two ends of the pipeline as processes: `python -m streamadv.bench.load producer | trainer LINE`.

Server and run come from the environment, as for the workers between them.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

from ..processes import messages
from ..producer.producer import Producer
from .lines import GROUP_SIZE, KINDS, Line, make_groups
from .pace import Pace


def produce(line: Line, url: str) -> None:
    """Push group after group as the pace says, each in one piece, until killed."""
    pool = itertools.cycle(make_groups(line))
    pace = Pace()
    with Producer(url, line.run) as producer:
        messages.send("ready")
        while True:
            group = producer.begin_group(GROUP_SIZE)
            # The moment it was due: a push that is late because the one before took long has waited too.
            ended = {"ended": pace.wait_for_turn()}
            group.push([{**record, "metadata": ended} for record in next(pool)])


def train(line: Line, url: str) -> None:
    """Take batch after batch and do nothing with it, until killed; one message for each."""
    import torch

    from ..trainer.queue import TrainerQueue

    torch.set_num_threads(1)
    kind, latency = KINDS[line.kind], line.min_groups is not None
    queue = TrainerQueue(
        url,
        line.run,
        world_size=line.world_size,
        batch_groups=line.batch_groups,
        min_groups=line.min_groups,
        chain=kind.chain,
        pushed=kind.late,
    )
    messages.send("ready", epoch=queue.epoch)
    for batch in queue:
        now = time.monotonic()
        ended: list[Any] = [item.payload.header.metadata["ended"] for item in batch.delivered if latency]
        waits = [round(now - moment, 6) for moment in ended]
        messages.send("received", at=now, count=batch.num_trajectories, waits=waits)


def main(role: str, text: str) -> None:
    line = Line.from_json(text)
    {"producer": produce, "trainer": train}[role](line, os.environ["STREAMADV_REDIS_URL"])


if __name__ == "__main__":
    main(*sys.argv[1:])
