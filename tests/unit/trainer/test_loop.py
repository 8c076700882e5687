"""When the supply of batches names the next one."""

from __future__ import annotations

from typing import Any

import pytest

from streamadv.batch.record import read_records
from streamadv.store.connection import Connection
from streamadv.trainer import loop
from streamadv.trainer.queue import TrainerQueue

from ...support import compute_all, group_all, pushed_run


def test_groups_that_come_while_a_batch_is_computed_are_named_before_it_is_delivered(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the advantage workers have the next batch before the trainer asks for it."""
    run = pushed_run(fake, "r", 4)
    group_all(run)
    queue = TrainerQueue(fake, "r", batch_groups=4)
    wait = loop.wait_for_news

    def computed(*arguments: Any) -> None:
        compute_all(run)
        pushed_run(fake, "r", 4, prefix="next")
        group_all(run)
        wait(*arguments)

    monkeypatch.setattr(loop, "wait_for_news", computed)
    assert queue.next_batch(timeout=5) is not None
    assert set(read_records(run)) == {0, 1}
