"""Python's garbage collector, in a process that runs for long."""

from __future__ import annotations

import gc


def keep_what_exists() -> None:
    """Have the collector leave alone what the process has loaded so far, which stays until it ends.

    A full collection otherwise walks every module, class and function again and again: with torch hundreds of thousands
    of objects.
    """
    gc.collect()
    gc.freeze()
