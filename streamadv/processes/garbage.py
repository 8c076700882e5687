"""Python's garbage collector, in a process that runs for long."""

from __future__ import annotations

import gc
from typing import Final

#: New objects after which it looks for cycles. With Python's 700, hundreds of rollouts under way are walked, and found
#: alive, many times before they end.
NEW_OBJECTS: Final = 20_000


def collect_rarely() -> None:
    """Have the collector leave alone what the process has loaded so far, and look at what is new less often.

    A full collection otherwise walks every module, class and function again and again: with torch hundreds of thousands
    of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
