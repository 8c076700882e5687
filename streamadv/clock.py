"""The one clock by which processes measure waits, leases and windows. Tests set it forward.

Processes never compare it with each other's, nor with the server's clock, which may be set.
"""

from __future__ import annotations

import time

#: Seconds of a clock that never goes back.
now = time.monotonic
