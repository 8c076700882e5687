"""What a process has loaded is left alone by the garbage collector."""

from __future__ import annotations

import gc

from streamadv.processes.garbage import keep_what_exists


def test_full_collections_walk_only_what_came_later() -> None:
    existed: list[object] = [[]]
    try:
        keep_what_exists()
        later: list[object] = [[]]
        walked = {id(item) for item in gc.get_objects()}
        assert id(later) in walked
        assert id(existed) not in walked
    finally:
        gc.unfreeze()
