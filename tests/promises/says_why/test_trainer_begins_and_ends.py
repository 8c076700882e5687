"""A trainer that goes on with a run, finds nothing in it, or is interrupted says so in a line."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from typing import Any

import pytest

from streamadv.errors import ServerUnreachableError, StarvedError
from streamadv.run import Run
from streamadv.run.dead_letters import list_dead
from streamadv.store.connection import Connection
from streamadv.store.reasons import REASONS
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.support import (
    delivered_batch,
    ended,
    group_all,
    join,
    next_batch,
    producing,
    push_groups,
    pushed_run,
    trajectory,
)


def queue_of(fake: Connection, **options: Any) -> TrainerQueue:
    return TrainerQueue(
        fake, "r", **{"commit": "each_batch", "batch_groups": 1, "prefetch": 0, "max_staleness": 4, **options}
    )


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def trained(fake: Connection) -> Run:
    """A run whose version is 1, with one more group."""
    run = pushed_run(fake, "r", 2, finish=True)
    queue = queue_of(fake)
    batch = delivered_batch(queue, run)
    queue.trained(batch)
    queue.commit(queue.state_dict())
    return run


def test_a_run_with_history_and_no_checkpoint(
    fake: Connection, trained: Run, caplog: pytest.LogCaptureFixture
) -> None:
    next_batch(queue_of(fake), trained)
    assert events(caplog) == ["run_with_history"]
    assert "run r was trained to version 1 before, and no checkpoint is loaded" in caplog.text
    assert (
        "queue.resume(the folder of its checkpoints), give another run=, or `streamadv runs delete"
        in caplog.text
    )


def test_a_checkpoint_is_no_news(fake: Connection, trained: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the epoch is read before it, so that an older trainer cannot commit meanwhile."""
    first = queue_of(fake)
    state = first.state_dict()
    second = queue_of(fake)
    assert second.epoch > first.epoch
    second.load_state_dict(state)
    next_batch(second, trained)
    assert events(caplog) == []


def test_a_checkpoint_that_is_not_the_newest(
    fake: Connection, trained: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """What commits after it have deleted does not come again."""
    newest = queue_of(fake).state_dict()
    for version, expected in ((0, ["older_checkpoint"]), (1, [])):
        queue = queue_of(fake)
        caplog.clear()
        queue.load_state_dict({**newest, "version": version})
        assert events(caplog) == expected


def test_a_run_that_ended_before_its_trainer_came(
    fake: Connection, trained: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with producing(
        fake, "r"
    ) as producer:  # groups without a figure to teach: not why the next trainer gets none
        producer.push([ended("failed", index, 2, "failed") for index in range(2)])
        producer.finish()
    group_all(trained)
    queue = queue_of(fake)
    assert next_batch(queue, trained) is not None
    assert next_batch(queue, trained) is None
    caplog.clear()
    late = queue_of(fake)
    assert next_batch(late, trained) is None
    assert events(caplog) == ["run_with_history", "ended_without_batch"]
    assert "its producers have finished and no group is left; start producers" in caplog.text
    assert "trajectories were dropped" not in caplog.text


def test_a_run_whose_groups_were_all_dropped_ends_with_an_error_that_counts_them(fake: Connection) -> None:
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        push_groups(producer, 3, reward=1.0)
        producer.push([ended("failed", index, 2, "failed") for index in range(2)])
        producer.push([trajectory("asked", index, role="eval") for index in range(2)])
        producer.finish()
    run = join(fake, "r")
    group_all(run)
    for _ in range(2):  # it is so whenever it is asked
        with pytest.raises(StarvedError) as caught:
            queue_of(fake).next_batch()
        assert str(caught.value) == (
            "run r has ended at version 0 and nothing was trained: 8 of 8 trajectories were dropped: failed 2, "
            f"zero_variance 6; {REASONS['filtered'].remedy}; {REASONS['ended_short'].remedy}"
        )


def test_a_run_that_was_only_evaluated_or_not_at_all_ends_without_an_error(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.finish()
        assert queue_of(fake).next_batch() is None
        producer.push([trajectory("asked", index, role="eval") for index in range(2)])
        producer.finish()
        group_all(join(fake, "r"))
        assert queue_of(fake).next_batch() is None


def test_dropping_earlier_than_pacing_is_told(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    queue_of(fake, max_staleness=4, drop_after=1)
    assert events(caplog) == ["drops_early"]
    caplog.clear()
    for options in (
        {"max_staleness": 4, "drop_after": 4},
        {"max_staleness": 4},
        {"drop_after": 0, "max_staleness": None},
    ):
        queue_of(fake, **options)
    assert events(caplog) == []


def test_a_column_that_producers_should_push_is_named(
    fake: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    chain = {"estimator": "grpo", "kl": {"coefficient": 0.1}}
    with producing(fake, "r") as producer:
        push_groups(producer, 1)
        push_groups(producer, 1, prefix="with", ref_log_probs=[-1.0] * 5)
    run = join(fake, "r")
    assert next_batch(queue_of(fake, chain=chain), run) is not None
    text = "pushed without ref_log_probs, which the chain needs: push it, or give late={'ref_log_probs': function}"
    assert f"group g0000 is not trained on: dead:missing_column ({text})" in caplog.text
    assert [dead.detail for dead in list_dead(run)] == [text]


TRAINER = """
import sys
import streamadv as sa

print("ready", flush=True)
queue = sa.TrainerQueue(sys.argv[1], run=sys.argv[2], batch_groups=1)
for batch in queue:
    print("batch", flush=True)
"""


@pytest.mark.processes
def test_an_interrupted_trainer_ends_at_once_and_shows_its_own_line(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        push_groups(producer, 1)
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, redis_url, run],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        joined = join(redis_url, run)
        until(
            lambda: (
                joined.connection.scripts.hexists(joined.keys.home.session, "settled")
                or trainer.poll() is not None
            ),
            "the trainer waits for its batch",
        )
        trainer.send_signal(signal.SIGINT)
        _, error = trainer.communicate(timeout=240)
    assert trainer.returncode == -signal.SIGINT
    lines = error.splitlines()
    assert lines[-1] == "KeyboardInterrupt"
    assert len(lines) < 15, error
    assert "redis" not in error.replace(redis_url, ""), error


def test_a_queue_shows_where_it_is(fake: Connection, trained: Run) -> None:
    queue = queue_of(fake, commit="manual")
    assert repr(queue) == "TrainerQueue(run='r', rank=0, world_size=1, version=0, committed=0, delivered=0)"
    next_batch(queue, trained)
    assert repr(queue) == "TrainerQueue(run='r', rank=0, world_size=1, version=1, committed=1, delivered=2)"


def test_a_queue_that_is_closed_says_so(fake: Connection) -> None:
    pushed_run(fake, "r", 1)
    with queue_of(fake) as queue:
        assert queue.epoch
    with pytest.raises(ServerUnreachableError, match="run r: this queue is closed, make another one"):
        queue.next_batch()
