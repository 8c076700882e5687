"""What an episode costs on its way into a push: the figures of docs/produce/verifiers.md.

python -m tests.integrations.verifiers.cost
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from streamadv.integrations import verifiers

from .test_episodes import episode, said, sampled, trace

TURNS, READ, WRITTEN = 4, 64, 192


def milliseconds(call: Callable[[], object]) -> float:
    """Processor time of a call, the median of many."""
    spent = []
    for _ in range(200):
        began = time.thread_time()
        call()
        spent.append(time.thread_time() - began)
    return 1000 * statistics.median(spent)


def main() -> None:
    nodes = []
    for turn in range(TURNS):
        nodes.append(said(len(nodes) - 1 if turn else None, *range(READ)))
        nodes.append(sampled(len(nodes) - 1, [], *range(1, WRITTEN + 1)))
    made = episode(trace(nodes))
    spent = milliseconds(lambda: verifiers.record(made))
    print(f"record, {TURNS} turns, {TURNS * (READ + WRITTEN)} tokens: {spent:.2f} ms")


if __name__ == "__main__":
    main()
