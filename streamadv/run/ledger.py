"""The names of the counters in a run's ledger. A producer can write other fields into it; they are not counters.

Every reader of a ledger reads these names only, so foreign fields cost little and never show under their own name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ..metrics.instruments import KEPT, OUTCOMES
from ..store.replies import as_int

#: Counters that add up to `queued`: with a scorer, in the rollouts stream, in an open group, in the groups log.
QUEUED: Final = ("scoring", "rollouts", "open", "grouped")
#: The counters without a reason.
COUNTERS: Final = (
    "pushed", "trained", *QUEUED, "in_flight", "duplicates", "groups_open", "groups_logged", "rollouts_packets",
    "scoring_packets", "live_bytes", "dead_bytes", "kept_bytes", "groups_abandoned", "groups_eval", "malformed",
)  # fmt: skip
#: How a group ends.
ENDINGS: Final = (*(outcome for outcome in OUTCOMES if outcome != "other"), "dead", "malformed", "trained")
#: Why trajectories are dropped: beside the outcomes of their groups.
DROPPED: Final = (
    *("surplus", "late", "baseline", "failed", "aborted", "unscorable", "wrong_role"),
    *(outcome for outcome in OUTCOMES if outcome not in (*KEPT, "other")),
)
#: Why trajectories are dead.
DEAD: Final = ("undecodable", "compute_error", "missing_column", "malformed")

_REASONS: Final = {"outcome": ENDINGS, "dropped": DROPPED, "dead": DEAD}
#: All counters, those with a reason as `kind:reason`.
NAMES: Final = (*COUNTERS, *(f"{kind}:{reason}" for kind, reasons in _REASONS.items() for reason in reasons))
_KNOWN: Final = frozenset(NAMES)


def by_reason(counters: Mapping[str, int], kind: str) -> dict[str, int]:
    """Counters '<kind>:<reason>' by reason, without those at 0."""
    prefix = f"{kind}:"
    return {
        name.removeprefix(prefix): count
        for name, count in sorted(counters.items())
        if name.startswith(prefix) and count
    }


def known_counters(stored: Mapping[str, Any]) -> Counter[str]:
    """Of the fields of a ledger its counters; reasons that are none of the run's are added up as `other`."""
    counters = Counter[str]()
    for name, value in stored.items():
        if name not in _KNOWN:
            kind = name.partition(":")[0]
            if kind == name or kind not in _REASONS:
                continue
            name = f"{kind}:other"
        if (count := as_int(value)) is not None:
            counters[name] += count
    return counters
