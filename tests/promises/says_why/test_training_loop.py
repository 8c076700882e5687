"""A training loop that does not commit, or learns nothing, is told so in a line."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from streamadv.run import Run
from streamadv.status import causes, read_status
from streamadv.status.causes import unsaved
from streamadv.status.exported import samples
from streamadv.store.connection import Connection
from streamadv.trainer import loop
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, pushed_run


def queue_of(fake: Connection, **options: Any) -> TrainerQueue:
    return TrainerQueue(fake, "r", **{"batch_groups": 1, "prefetch": 0, "max_staleness": None, **options})


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records if record.levelno >= logging.WARNING]


def is_exported(run: Run) -> bool:
    return ("blocked", ["uncommitted"], 1.0) in list(samples(read_status(run)))


def test_a_loop_that_never_commits_is_told_long_before_its_budget_is_full(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its log once, in the status and in the metric until it does."""
    monkeypatch.setattr(causes, "UNCOMMITTED_BATCHES", 3)
    run, queue = pushed_run(fake, "r", 6), queue_of(fake)
    for trained in range(1, 6):
        queue.trained(delivered_batch(queue, run))
        assert (unsaved(read_status(run)) is not None) == is_exported(run) == (trained >= 3)
        assert events(caplog) == (["uncommitted"] if trained > 3 else [])
    text = "run r: 3 batches are trained and none is committed, so a crash loses all: save a checkpoint every few"
    assert text in caplog.text
    assert "`with queue.checkpoint(folder) as path: ...`" in caplog.text
    queue.commit(queue.state_dict())
    assert unsaved(read_status(run)) is None


def test_uncommitted_batches_that_hold_half_of_the_budget_are_told(fake: Connection) -> None:
    settings = {"max_trajectory_bytes": 300_000, "max_bytes": 1_800_000}
    run = pushed_run(fake, "r", 6, settings=settings, tokens=10_000)
    queue = queue_of(fake, batch_groups=2)
    found = []
    for _ in range(3):
        queue.trained(delivered_batch(queue, run))
        found.append(unsaved(read_status(run)))
    assert found[0] is None
    assert "batches are trained and not committed, and hold some" in str(found[-1])


@pytest.mark.parametrize(("rewards", "told"), [(None, []), (1.0, ["zero_advantages"])])
def test_advantages_that_are_all_0_are_told(
    fake: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rewards: float | None,
    told: list[str],
) -> None:
    """None: rewards differ in each group."""
    monkeypatch.setattr(loop, "FLAT_BATCHES", 2)
    run = pushed_run(fake, "r", 4, **({} if rewards is None else {"reward": rewards}))
    queue = queue_of(fake)
    for _ in range(4):
        queue.trained(delivered_batch(queue, run))
    assert events(caplog) == told
    assert not told or "all advantages of the last 2 batches are 0" in caplog.text
