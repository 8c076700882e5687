"""The C library's allocator: what it does with memory that a process has freed."""

from __future__ import annotations

import ctypes
from typing import Final

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
