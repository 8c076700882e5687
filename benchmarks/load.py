"""The two ends of the pipeline as processes: `python -m benchmarks.load producer LINE WAY | trainer LINE`.

Server and run come from the environment, as for the workers between them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from streamadv.processes import messages
from streamadv.processes.memory import collect_rarely
from streamadv.producer.producer import Producer
from streamadv.trajectory.schema import Trajectory

from .lines import GROUP_SIZE, GROUPS_A_CALL, IN_FLIGHT, KINDS, Line, Way, make_groups
from .pace import Pace

Records = list[dict[str, Any]]


def produce(line: Line, url: str, way: Way, pace: Pace) -> None:
    """Push group after group as the pace says, in one of the ways of `lines.WAYS`, until killed."""
    groups = make_groups(line, way)
    collect_rarely()  # as docs/operate/sizing.md has it
    if way.endswith("asyncio"):
        asyncio.run(_one_by_one(line, url, groups, pace))
        return
    with Producer(url, line.run) as producer:
        messages.send("ready")
        {"ahead": _ahead, "many": _together}.get(way, _group_by_group)(producer, groups, pace)


def _ended(record: Mapping[str, Any], moment: float) -> dict[str, Any]:
    """The record with the moment at which its rollout ended, for the latency."""
    return {**record, "metadata": {**record.get("metadata", {}), "ended": moment}}


def _group_by_group(producer: Producer, groups: Sequence[Records], pace: Pace) -> None:
    pool = itertools.cycle(groups)
    while True:
        group = producer.begin_group(GROUP_SIZE)
        # The moment it was due: a push that is late because the one before took long has waited too.
        moment = pace.wait_for_turn()
        group.push([_ended(record, moment) for record in next(pool)])


def _ahead(producer: Producer, groups: Sequence[Records], pace: Pace) -> None:
    pool = itertools.cycle(groups)
    for group in producer.groups(GROUP_SIZE, ahead=7):
        moment = pace.wait_for_turn()
        group.push([_ended(record, moment) for record in next(pool)])


def _together(producer: Producer, groups: Sequence[Records], pace: Pace) -> None:
    pool = itertools.cycle(
        [
            [Trajectory(group_id="pool", group_size=GROUP_SIZE, **record) for record in group]
            for group in groups
        ]
    )
    prefix = secrets.token_hex(6)
    for number in itertools.count():
        call = []
        for place in range(GROUPS_A_CALL):
            own = {"group_id": f"{prefix}-{number}-{place}", "metadata": {"ended": pace.wait_for_turn()}}
            call.append([trajectory.model_copy(update=own) for trajectory in next(pool)])
        producer.push_many(call)


async def _one_by_one(line: Line, url: str, groups: Sequence[Records], pace: Pace) -> None:
    pool = itertools.cycle(groups)
    async with Producer(url, line.run) as producer:
        messages.send("ready")

        async def play() -> None:
            while True:
                if not pace.going:
                    await asyncio.to_thread(pace.wait_until_going)
                group = await producer.begin_group(GROUP_SIZE)
                moment = time.monotonic()
                await asyncio.gather(*(group.push([_ended(record, moment)]) for record in next(pool)))

        await asyncio.gather(*(play() for _ in range(IN_FLIGHT // GROUP_SIZE)))


def train(line: Line, url: str) -> None:
    """Take batch after batch and do nothing with it, until killed; one message for each."""
    import torch

    from streamadv.trainer.queue import TrainerQueue

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
        commit="each_batch",  # nothing is learned
    )
    collect_rarely()  # as docs/operate/sizing.md has it
    messages.send("ready", epoch=queue.epoch)
    for batch in queue:
        now = time.monotonic()
        delivered = batch.delivered if latency else []  # made when asked for
        ended: list[Any] = [item.payload.header.metadata["ended"] for item in delivered]
        waits = [round(now - moment, 6) for moment in ended]
        messages.send("received", at=now, count=batch.num_trajectories, waits=waits)


def main(role: str, text: str, way: Any = "push") -> None:
    line, url = Line.from_json(text), os.environ["STREAMADV_REDIS_URL"]
    if role == "producer":
        produce(line, url, way, Pace())
    else:
        train(line, url)


if __name__ == "__main__":
    main(*sys.argv[1:])
