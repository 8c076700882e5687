"""The timeout of `next_batch` counts from the last progress: a new group, or a batch that is named."""

from __future__ import annotations

import pytest
import redis

from streamadv.batch.session import Session
from streamadv.errors import NoBatchError
from streamadv.store.connection import Connection
from streamadv.trainer import loop
from streamadv.trainer.queue import TrainerQueue
from streamadv.trainer.session import Sessions
from tests.support import Forward, compute_all, group_all, pushed_run


def test_a_batch_that_is_found_named_is_progress(
    fake: Connection, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage longer than the timeout comes before the run can be taken: its batch is waited for all the same."""
    run = pushed_run(fake, "r", 2)
    group_all(run)
    with pytest.raises(NoBatchError):
        TrainerQueue(fake, "r", batch_groups=2, prefetch=0, commit="each_batch").next_batch(timeout=0)
    checked, away = Sessions.checked, iter([True])

    def checked_after_an_outage(self: Sessions) -> Session:
        if next(away, False):
            forward(60)
            raise redis.ConnectionError("away")
        return checked(self)

    monkeypatch.setattr(Sessions, "checked", checked_after_an_outage)
    monkeypatch.setattr(loop, "wait_for_news", lambda *_: compute_all(run))
    assert (
        TrainerQueue(fake, "r", batch_groups=2, prefetch=0, commit="each_batch").next_batch(timeout=5)
        is not None
    )
