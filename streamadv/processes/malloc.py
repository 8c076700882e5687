"""What a process does with memory that it has freed."""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1
_LARGE: Final = 2**30


def keep_freed_memory() -> bool:
    """Let glibc keep large freed buffers for the next ones, instead of giving them back page by page.

    Columns of a few megabytes come and go with every batch; fetching their pages anew can take longer than computing
    on them. For processes that do nothing else: the memory stays at its greatest. False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
