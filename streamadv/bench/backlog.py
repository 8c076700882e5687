"""`streamadv bench backlog`: what a trajectory costs with many groups open, and with many trajectories queued."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ..store.scripts import load, script_call
from .alone import Alone, Cost
from .lines import GROUP_SIZE, Line
from .stages import middle_cost

OPEN_GROUPS: Final = (1_000, 10_000, 100_000, 1_000_000)
QUEUED: Final = 1_000_000
#: Short trajectories: what is measured is everything but the columns.
TOKENS: Final = 16
#: Bytes reserved for each trajectory of an open group: the least a run allows.
RESERVED: Final = 4096
BATCHES: Final = 4
SLICE: Final = 1000
#: Largest group, to queue many trajectories in few round trips.
LARGE_GROUP: Final = 128
DEADLINE_MS: Final = 86_400_000

COLUMNS: Final = {
    "wall us": "wall_microseconds",
    "client us": "client_microseconds",
    "server us": "server_microseconds",
    "x first": "ratio_to_first",
}


def measure_backlog(
    url: str, open_groups: Sequence[int], queued: int, repeat: int
) -> Iterator[dict[str, Any]]:
    """Cost per trajectory through all stages beside so many open groups; then of push beside queued ones.

    Medians of `repeat` rounds after one that is not counted. `ratio_to_first`: processor time of clients and server.
    """
    line = Line("grpo", TOKENS)
    with Alone(url, line, batches=BATCHES, max_trajectory_bytes=RESERVED) as alone:
        first: Cost | None = None
        opened = 0
        for count in open_groups:
            open_more(alone, count - opened)
            opened = count
            cost = whole_rounds(alone, repeat)
            first = first or cost
            yield _record(f"{count} open groups", "open_groups", count, cost, first)
    with Alone(url, line, batches=BATCHES, max_trajectory_bytes=RESERVED) as alone:
        first = middle_cost([alone.push() for _ in range(repeat)])
        yield _record("push, none queued", "queued", 0, first, first)
        alone.push(queued // LARGE_GROUP, LARGE_GROUP)
        cost = middle_cost([alone.push() for _ in range(repeat)])
        yield _record(f"push, {queued} queued", "queued", queued, cost, first)


def whole_rounds(alone: Alone, repeat: int) -> Cost:
    """All stages together."""
    alone.round()
    rounds = [alone.round().values() for _ in range(repeat)]
    return middle_cost([Cost(*map(sum, zip(*costs, strict=True))) for costs in rounds])


def open_more(alone: Alone, count: int) -> None:
    """Open groups that nothing is pushed to, in few round trips."""
    client = alone.connection.scripts
    client.script_load(load("begin").text)
    prefix = secrets.token_hex(6)
    spec = f"train {GROUP_SIZE} {GROUP_SIZE} {DEADLINE_MS} "
    others = [spec, "bench", f"{RESERVED} {1 << 50} 1 - - - 1", "nonce", ""]
    for start in range(0, count, SLICE):
        pipe = client.pipeline(transaction=False)
        for number in range(start, min(start + SLICE, count)):
            group_id = f"open-{prefix}-{number}"
            call = script_call("begin", alone.keys, [group_id, *others], group=group_id)
            pipe.evalsha(*call.by_hash)
        pipe.execute()


def _record(name: str, kind: str, count: int, cost: Cost, first: Cost) -> dict[str, Any]:
    return {
        "name": name,
        kind: count,
        "wall_microseconds": cost.wall,
        "client_microseconds": cost.client,
        "server_microseconds": cost.server,
        "ratio_to_first": (cost.client + cost.server) / (first.client + first.server),
    }
