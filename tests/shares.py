"""What `make test` takes of the cases that `make test-all` goes through."""

from __future__ import annotations

import os
from typing import Final

#: Of the examples of a property. They are drawn anew each time, so that many short runs see as much as a long one.
EXAMPLES: Final = float(os.environ.get("STREAMADV_TEST_EXAMPLES", "0.25"))


def examples(count: int) -> int:
    """How many of a property's `count` examples are drawn; `make test-all` draws all."""
    return max(1, round(count * EXAMPLES))
