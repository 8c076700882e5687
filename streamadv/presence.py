"""Which producers of a run are there, by their heartbeats, and so whether more can come."""

from __future__ import annotations

import re
from typing import Any, Final

from .malformed import reject_item
from .run import Run

HEARTBEAT_S: Final = 10.0
#: A producer silent for longer is taken for dead (three missed heartbeats).
PRODUCER_TIMEOUT_S: Final = 30.0
#: What a heartbeat writes: when (ms) and how.
PRODUCER_STATE: Final = re.compile(r"[0-9]{1,15} (open|finished)")


def is_over(run: Run) -> bool:
    """Whether nothing more can come: a producer has finished, no other is alive, no group is open.

    Removes what is no state of a producer.
    """
    scripts, home = run.connection.scripts, run.keys.home
    producers: Any = scripts.hgetall(home.producers)
    states = []
    for name, value in producers.items():
        if PRODUCER_STATE.fullmatch(value.decode(errors="replace")):
            states.append(value.decode().split(" "))
        else:
            reject_item(run, home, home.producers, name, "no state of a producer", value, removal="HDEL")
    if not any(state == "finished" for _, state in states):
        return False
    now: Any = scripts.time()
    if any(state == "open" and now[0] - int(seen) / 1000 < PRODUCER_TIMEOUT_S for seen, state in states):
        return False
    return not any(
        scripts.zcard(keys.open)
        or scripts.xlen(keys.rollouts)
        or int(scripts.hget(keys.ledger, "scoring") or 0)
        for keys in run.keys.shards
    )
