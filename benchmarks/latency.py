"""`streamadv bench latency`: from the end of a rollout to the trainer, at shares of the highest rate."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final

from .lines import GROUP_SIZE, Line
from .pipeline import clean_up, pipeline_crew

SHARES: Final = (0.1, 0.5, 0.9)
#: Windows are long enough for so many groups.
LEAST_GROUPS: Final = 200

COLUMNS: Final = {
    "traj/s": "per_second",
    "p50 ms": "p50_milliseconds",
    "p99 ms": "p99_milliseconds",
    "max ms": "max_milliseconds",
}


def measure_latency(url: str, tokens: Sequence[int], seconds: float, repeat: int) -> Iterator[dict[str, Any]]:
    """One record for each size and share: seconds from the push that was due to the batch in the trainer's hands.

    Batches are named as soon as a group is there, so that no time is spent waiting for a batch to fill. Whole groups
    end at once. The highest rate is measured first, in the same way.
    """
    for size in tokens:
        line = Line("grpo", size, f"bench-{secrets.token_hex(6)}", min_groups=1)
        try:
            with pipeline_crew(url, line) as crew:
                crew.wait_until_ready()
                most = crew.measure(seconds, seconds / 2).per_second
                for share in SHARES:
                    pace = share * most / GROUP_SIZE
                    windows = [
                        crew.measure(max(seconds, LEAST_GROUPS / pace / repeat), seconds / 2, f"{pace:g}")
                        for _ in range(repeat)
                    ]
                    waits = sorted(wait for window in windows for wait in window.waits)
                    yield {
                        "name": f"{line.name} at {share:.0%}",
                        "chain": line.kind,
                        "tokens": size,
                        "share": share,
                        "highest_per_second": most,
                        "per_second": share * most,
                        "p50_milliseconds": 1e3 * waits[len(waits) // 2],
                        "p99_milliseconds": 1e3 * waits[len(waits) * 99 // 100],
                        "max_milliseconds": 1e3 * waits[-1],
                        "trajectories": len(waits),
                    }
        finally:
            clean_up(url, line)
