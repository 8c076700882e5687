"""What the machine can do at best: the columns of a line moved as often, by plain pipelined redis-py.

One writer and one reader process: `python -m benchmarks.ceiling writer | reader LINE MEMBERS`. The writer sends
slices of hashes, one field per column, of so many trajectories each. The reader does what worker and trainer do to
them: reads the worker's columns, writes the made ones, reads all, deletes. The two meet on two lists: names of slices,
and permits to write one more. Nothing is validated, grouped, computed or counted.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any, Final

import redis

from streamadv.processes import messages

from .lines import GROUP_SIZE, KINDS, Line, make_groups
from .pace import Pace

#: A slice is about so many bytes, and MAX_SLICE trajectories at most.
SLICE_BYTES: Final = 1 << 20
MAX_SLICE: Final = 64
#: Slices written ahead of the reader.
AHEAD: Final = 4
REPORT_S: Final = 0.25


def write(line: Line, members: int, client: Any, prefix: str) -> None:
    pool = [
        {name: b"".join(record[name].tobytes() for record in together) for name in line.columns}
        for group in make_groups(line)
        for together in (group[first : first + members] for first in range(0, len(group), members))
    ]
    records = itertools.cycle(pool)
    pace = Pace()
    messages.send("ready")
    for number in itertools.count():
        pace.wait_for_turn()
        client.blpop([f"{prefix}permits"])
        pipe = client.pipeline(transaction=False)
        for index in range(slice_of(line, members)):
            pipe.hset(f"{prefix}{number}:{index}", mapping=next(records))
        pipe.rpush(f"{prefix}slices", number)
        pipe.execute()


def read(line: Line, members: int, client: Any, prefix: str) -> None:
    kind = KINDS[line.kind]
    made = {name: bytes(4 * line.tokens * members) for name in kind.made}
    count, due = 0, time.monotonic() + REPORT_S
    client.rpush(f"{prefix}permits", *[1] * AHEAD)
    messages.send("ready")
    while True:
        _, number = client.blpop([f"{prefix}slices"])
        keys = [f"{prefix}{int(number)}:{index}" for index in range(slice_of(line, members))]
        if kind.read:
            pipe = client.pipeline(transaction=False)
            for key in keys:
                pipe.hmget(key, list(kind.read))
            pipe.execute()
        pipe = client.pipeline(transaction=False)
        for key in keys:
            if made:
                pipe.hset(f"{key}:made", mapping=made)
                pipe.hmget(f"{key}:made", list(made))
                pipe.unlink(f"{key}:made")
            pipe.hmget(key, list(kind.columns))
        pipe.unlink(*keys)
        pipe.rpush(f"{prefix}permits", 1)
        pipe.execute()
        count += len(keys) * members
        if time.monotonic() > due:
            messages.send("received", at=time.monotonic(), count=count)
            count, due = 0, time.monotonic() + REPORT_S


def slice_of(line: Line, members: int) -> int:
    """Hashes of a slice."""
    trajectories = max(GROUP_SIZE // 2, min(MAX_SLICE, SLICE_BYTES // line.size(line.columns)))
    return max(1, trajectories // members)


def main(role: str, text: str, members: str) -> None:
    line = Line.from_json(text)
    client = redis.Redis.from_url(os.environ["STREAMADV_REDIS_URL"], protocol=2, socket_timeout=None)
    prefix = f"streamadv-bench:{line.run}:{members}:"
    {"writer": write, "reader": read}[role](line, int(members), client, prefix)


if __name__ == "__main__":
    main(*sys.argv[1:])
