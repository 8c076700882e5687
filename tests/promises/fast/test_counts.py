"""What a trajectory costs in numbers that no machine changes: commands, round trips and bytes, against bounds.

A bound that is exceeded means more work for every trajectory of every run: find out why before raising it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import redis

from benchmarks.lines import GROUP_SIZE, KINDS, Line, make_groups
from streamadv import clock
from streamadv.grouping import housekeeping
from streamadv.producer import logic
from streamadv.store import scripts
from streamadv.store.connection import Connection
from streamadv.store.exchange import Client, Piece
from streamadv.trainer.queue import TrainerQueue
from streamadv.trainer.session import Heartbeat
from tests.support import (
    compute_all,
    group_all,
    join,
    ledger,
    make_overdue,
    next_batch,
    problems,
    producing,
    trajectory,
    unscored,
)

LINE_TOKENS = 256
BATCHES = 4
BATCH_GROUPS = 16


class Cost(NamedTuple):
    """What a number of groups has cost the server, columns aside."""

    commands: float  # also those that scripts call
    round_trips: float
    bytes_in: float
    bytes_out: float

    def per(self, count: int) -> Cost:
        return Cost(*(number / count for number in self))


#: Per trajectory, in groups of 8 pushed whole and batches of 16 groups.
BOUNDS = {
    "grpo": Cost(6.3, 0.653, 668, 604),
    "grpo+kl": Cost(6.43, 0.66, 690, 609),
    "gae+kl": Cost(6.45, 0.668, 690, 603),
}
#: Of each further trajectory in a packet. A call of a script takes a bounded number of them, so a few calls more.
FURTHER = {"grpo": Cost(0.04, 0.01, 205, 315), "gae+kl": Cost(0.04, 0.01, 205, 315)}
LARGE_GROUP = 48  # one packet still


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every second or so is not counted: that would go by how long the test takes."""
    monkeypatch.setattr(clock, "now", lambda: 0.0)
    monkeypatch.setattr(logic, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(Heartbeat, "start", lambda heartbeat, session: None)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time a client has sent something and will wait for the reply."""
    times: list[int] = []

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def send(*args: Any, **options: Any) -> None:
            times.append(1)
            original(*args, **options)

        monkeypatch.setattr(owner, name, send)

    count(redis.connection.AbstractConnection, "send_packed_command")
    return times


@pytest.mark.parametrize("name", KINDS)
def test_commands_round_trips_and_bytes_of_a_trajectory(
    name: str, redis_url: str, run: str, sent: list[int]
) -> None:
    bound, cost = BOUNDS[name], cost_of(name, redis_url, run, sent, GROUP_SIZE)
    per_trajectory = cost.per(BATCHES * BATCH_GROUPS * GROUP_SIZE)
    assert all(0 < found <= most for found, most in zip(per_trajectory, bound, strict=True)), per_trajectory


@pytest.mark.parametrize("name", FURTHER)
def test_what_a_packet_costs_is_paid_once(name: str, redis_url: str, run: str, sent: list[int]) -> None:
    """A further trajectory in a packet costs its record in the member table and its columns, and no command."""
    small, large = (
        cost_of(name, redis_url, f"{run}-{size}", sent, size).per(BATCHES * BATCH_GROUPS)
        for size in (GROUP_SIZE, LARGE_GROUP)
    )
    further = Cost(*(more - less for more, less in zip(large, small, strict=True))).per(
        LARGE_GROUP - GROUP_SIZE
    )
    assert all(found <= most for found, most in zip(further, FURTHER[name], strict=True)), further


def test_a_group_is_read_once_for_many_scores(redis_url: str, run: str) -> None:
    """All of them are applied by one script: reading each packet for each score would hold up the server."""
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("g", index, 64) for index in range(64)])
        group_all(joined)
        for index in range(32):
            producer.score("g", index, None)
    before = _hashes_read(joined.connection)
    housekeeping.apply_scores(joined, joined.home)
    assert _hashes_read(joined.connection) - before <= 2
    assert ledger(joined)["dropped"] == {"unscorable": 32}
    assert problems(joined) == []


def test_one_call_applies_scores_of_few_large_groups(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        for number in range(40):
            producer.push([unscored(f"g{number}", index, 64) for index in range(64)])
        group_all(joined)
        for number in range(40):
            producer.score(f"g{number}", 0, None)
    scores, keys, scripts = (
        [f"0 g{number}" for number in range(40)],
        joined.keys.home,
        joined.connection.scripts,
    )
    group_hashes = [keys.group(f"g{number}") for number in range(40)]
    joined.home.call("apply_scores", [*joined.manifest.policy_args, *scores], group_hashes=group_hashes)
    assert scripts.llen(keys.scored) == 40 - 1024 // 64
    housekeeping.apply_scores(joined, joined.home)
    assert ledger(joined)["dropped"] == {"unscorable": 40}
    assert problems(joined) == []


#: Of the commands that one call of a script makes; some take 5 us.
MOST_COMMANDS = 1000


def test_no_script_makes_many_commands(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is served meanwhile: what one call may bring is bounded, in groups and in members."""
    server, send = redis.Redis.from_url(redis_url, decode_responses=True), Client._exchange
    names: dict[bytes, str] = {
        server.script_load(scripts.load(name).text).encode(): name for name in scripts.files()
    }
    made = Counter[str]()

    def counted(client: Client, pieces: Sequence[Piece], *rest: Any) -> Any:
        before = _commands(server)
        reply = send(client, pieces, *rest)
        for sha in re.findall(rb"\$40\r\n([0-9a-f]{40})\r\n", b"".join(map(bytes, pieces))):
            made[names[sha]] = max(made[names[sha]], _commands(server) - before)
        return reply

    monkeypatch.setattr(Client, "_exchange", counted)
    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        queue = TrainerQueue(redis_url, run, batch_groups=400, max_staleness=None, commit="each_batch")
        producer.push_many([[trajectory(f"one-{number}", 0, 1)] for number in range(400)])
        producer.push_many([[trajectory(f"part-{number}", 0, 2)] for number in range(200)])
        producer.push([unscored("large", index, 600) for index in range(600)])
        group_all(joined)
        for index in range(600):
            producer.score("large", index, 1.0)
        for number in range(200):
            make_overdue(joined, f"part-{number}")
        group_all(joined)
        producer.finish()
        assert [next_batch(queue, joined) is None for _ in range(2)] == [False, False]
        queue.close()
    assert made.keys() >= {
        *["push", "take", "apply_scores", "expire", "sweep", "apply_batch", "publish", "commit"]
    }
    assert {name: count for name, count in made.items() if count > MOST_COMMANDS} == {}


def _commands(server: redis.Redis) -> int:
    commands: Any = server.info("commandstats")
    return sum(each["calls"] for name, each in commands.items() if name != "cmdstat_info")


def _hashes_read(connection: Connection) -> int:
    commands: Any = connection.scripts.info("commandstats")
    return int(commands.get("cmdstat_hgetall", {"calls": 0})["calls"])


def cost_of(name: str, redis_url: str, run: str, sent: list[int], size: int) -> Cost:
    """Of BATCHES batches, from `begin_group` to the batch in the trainer's hands."""
    line, kind = Line(name, LINE_TOKENS), KINDS[name]
    settings = {"keep_bytes": 0}  # which groups are kept goes by their ids
    with Connection(redis_url) as connection, producing(connection, run, settings) as producer:
        joined = join(connection, run)
        queue = TrainerQueue(
            connection,
            run,
            batch_groups=BATCH_GROUPS,
            prefetch=BATCHES,
            max_staleness=None,
            chain=kind.chain,
            pushed=kind.late,
            commit="each_batch",
        )
        pool = [
            [{**records[index % GROUP_SIZE], "rollout_index": index} for index in range(size)]
            for records in make_groups(line)
        ]

        def through(batches: int) -> None:
            for number in range(batches * BATCH_GROUPS):
                producer.begin_group(size).push(pool[number % len(pool)])
            group_all(joined)
            for _ in range(batches):
                assert next_batch(queue, joined) is not None
            compute_all(joined)

        through(BATCHES)  # connections, streams, scripts
        commands_before, sent_before = _commands(connection.scripts), len(sent)
        bytes_before = _network_bytes(connection)  # last, and first below: INFO grows with what others run
        through(BATCHES)
        bytes_after, round_trips = _network_bytes(connection), len(sent) - sent_before
        commands = _commands(connection.scripts) - commands_before
        queue.close()
    count = BATCHES * BATCH_GROUPS * size
    bytes_in, bytes_out = (after - before for before, after in zip(bytes_before, bytes_after, strict=True))
    made = 4 * len(kind.made) * LINE_TOKENS
    columns_in = count * (line.size(kind.columns) + made)
    columns_out = count * (line.size(kind.columns) + line.size(kind.read) + made)
    return Cost(commands, round_trips, bytes_in - columns_in, bytes_out - columns_out)


def _network_bytes(connection: Connection) -> tuple[int, int]:
    """Received and sent by the server so far."""
    network: Any = connection.scripts.info("stats")
    return network["total_net_input_bytes"], network["total_net_output_bytes"]
