"""Constants of the library that are others in a world: polls are rarer, and pages and slices may be small."""

from __future__ import annotations

from typing import Any, Final

from ..advantage import worker
from ..archive import follow
from ..batch import ends, record, recovery
from ..grouping import grouper, housekeeping
from ..prompts import steps, stored
from ..run import consumer
from ..status import watchdog
from ..trainer import loop, session

#: A module, a name in it, and its value.
Change = tuple[Any, str, Any]

#: Polls are rarer than in earnest, so that an idle minute costs little.
POLLS: Final = (
    (grouper, "HOUSEKEEPING_S", 6.0),
    (housekeeping, "HOUSEKEEPING_SLICE_S", 0.5),
    (consumer, "BLOCK_MS", 6000),
    (worker, "POLL_S", 10.0),
    (loop, "BLOCK_MS", 6000),
    (watchdog, "LOOK_S", 30.0),
    (session, "LOOK_S", 4.0),
    (follow, "POLL_S", 5.0),
    (steps, "LEFT_PER_LEASE", 3),  # so that a few prompts are leased together
)

#: Pages and slices of a scene that is `in_parts`.
PARTS: Final = (
    (grouper, "TAKE_COUNT", 2),
    (grouper, "TAKE_MEMBERS", 2),
    (housekeeping, "SWEEP_COUNT", 1),
    (housekeeping, "SCORES_COUNT", 1),
    (consumer, "PENDING_PAGE", 1),
    (ends, "COMMIT_SLICE", 1),
    (ends, "DROP_SLICE", 1),
    (recovery, "TRAINED_SLICE", 1),
    (record, "APPLY_SLICE", 1),
    (record, "ITEM_TRAJECTORIES", 2),
    (follow, "PAGE", 1),
    (stored, "PAGE", 2),
)
