"""What a process has loaded is left alone by the garbage collector."""

from __future__ import annotations

import gc

from streamadv.processes.memory import collect_rarely


def test_full_collections_walk_only_what_came_later() -> None:
    existed: list[object] = [[]]
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)  # another test may have called it in this process
        collect_rarely()
        assert gc.get_threshold()[0] > 700
        later: list[object] = [[]]
        walked = {id(item) for item in gc.get_objects()}
        assert id(later) in walked
        assert id(existed) not in walked
    finally:
        gc.set_threshold(*thresholds)
