"""The memory of a process that runs for long: Python's garbage collector, and the C library's allocator."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

#: New objects after which it looks for cycles. With Python's 700, hundreds of rollouts under way are walked, and found
#: alive, many times before they end.
NEW_OBJECTS: Final = 20_000


def collect_rarely(*thresholds: int) -> None:
    """Have the collector leave alone what the process has loaded so far, and look at what is new less often.

    A full collection otherwise walks every module, class and function again and again: with torch hundreds of thousands
    of objects. thresholds: as `gc.set_threshold` takes them; none: NEW_OBJECTS.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds or (NEW_OBJECTS,))


_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1
_LARGE: Final = 2**30


def keep_freed_memory() -> bool:
    """Let glibc keep large freed buffers for the next ones instead of returning them to the system.

    Columns of a few megabytes come and go with every batch, and fetching their pages anew can take longer than
    computing on them. Only for processes that do nothing else: their memory never shrinks. Returns False without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
