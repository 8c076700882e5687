"""What a trajectory costs in numbers that no machine changes: commands, round trips and bytes, against bounds.

A bound that is exceeded means more work for every trajectory of every run: find out why before raising it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import redis

from streamadv.bench.lines import GROUP_SIZE, KINDS, Line, make_groups
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import compute_all, group_all, join, next_batch, producing

LINE_TOKENS = 256
BATCHES = 4
BATCH_GROUPS = 16


@dataclass(frozen=True)
class Bound:
    """Per trajectory, in groups of 8 pushed whole and batches of 16 groups."""

    commands: float  # also those that scripts call
    round_trips: float
    bytes_in: int  # beyond the columns
    bytes_out: int  # beyond the columns


BOUNDS = {
    "grpo": Bound(15, 0.73, 3850, 3100),
    "grpo+kl": Bound(16, 0.73, 4000, 3500),
    "gae+kl": Bound(17, 0.73, 4250, 3500),
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time a client has sent something and will wait for the reply."""
    times: list[int] = []
    original = redis.connection.AbstractConnection.send_packed_command

    def send(self: Any, command: Any, check_health: bool = True) -> None:
        times.append(1)
        original(self, command, check_health)

    monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", send)
    return times


@pytest.mark.parametrize("name", KINDS)
def test_commands_round_trips_and_bytes_of_a_trajectory(
    name: str, redis_url: str, run: str, sent: list[int]
) -> None:
    line, kind, bound = Line(name, LINE_TOKENS), KINDS[name], BOUNDS[name]
    with Connection(redis_url) as connection, producing(connection, run) as producer:
        joined = join(connection, run)
        queue = TrainerQueue(
            connection,
            run,
            batch_groups=BATCH_GROUPS,
            prefetch=BATCHES,
            max_staleness=None,
            chain=kind.chain,
            pushed=kind.late,
        )
        pool = make_groups(line)

        def through(batches: int) -> None:
            for number in range(batches * BATCH_GROUPS):
                producer.begin_group(GROUP_SIZE).push(pool[number % len(pool)])
            group_all(joined)
            for _ in range(batches):
                assert next_batch(queue, joined) is not None
            compute_all(joined)

        through(1)  # connections, streams, scripts
        before, sent_before = _counts(connection), len(sent)
        through(BATCHES)
        after, round_trips = _counts(connection), len(sent) - sent_before
        queue.close()
    count = BATCHES * BATCH_GROUPS * GROUP_SIZE
    commands, bytes_in, bytes_out = ((b - a) / count for a, b in zip(before, after, strict=True))
    made = 4 * len(kind.made) * LINE_TOKENS
    columns_in = line.size(kind.columns) + made
    columns_out = line.size(kind.columns) + line.size(kind.read) + made
    assert commands <= bound.commands
    assert round_trips / count <= bound.round_trips
    assert 0 < bytes_in - columns_in <= bound.bytes_in
    assert 0 < bytes_out - columns_out <= bound.bytes_out


def _counts(connection: Connection) -> tuple[int, int, int]:
    """Commands, bytes received and bytes sent by the server so far."""
    commands: Any = connection.scripts.info("commandstats")
    network: Any = connection.scripts.info("stats")
    calls = sum(each["calls"] for name, each in commands.items() if name != "cmdstat_info")
    return calls, network["total_net_input_bytes"], network["total_net_output_bytes"]
