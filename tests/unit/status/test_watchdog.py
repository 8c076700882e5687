"""Why nothing comes: the status and the trainer name the same reason, and waiting that cannot end is an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamadv import cli
from streamadv.errors import (
    BatchBudgetError,
    NoBatchError,
    SettingError,
    StarvedError,
    UncommittedBudgetError,
)
from streamadv.producer import Producer, logic
from streamadv.store.connection import Connection
from streamadv.store.waiting import REPORT_S
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    Forward,
    compute_all,
    consumer_of,
    delivered_batch,
    ended,
    group_all,
    heartbeat,
    join,
    make_overdue,
    next_batch,
    producing,
    push_groups,
    push_one,
    trajectory,
    unscored,
)

Blocked = Callable[[], list[str]]
Says = Callable[..., str]


@pytest.fixture
def status(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """What `streamadv status` prints of run r on the fake server."""
    monkeypatch.setattr("streamadv.cli.connect", lambda *_, **__: fake)
    # it would replace caplog's handler
    monkeypatch.setattr("streamadv.cli.set_up_logging", lambda *_, **__: None)

    def printed(*words: str) -> Any:
        capsys.readouterr()
        cli.main(["status", "--run", "r", *words])
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in words else text

    return printed


@pytest.fixture
def blocked(status: Callable[..., Any]) -> Blocked:
    """Names of the reasons in `status --json`."""

    def named() -> list[str]:
        found = status("--json")
        assert len(found["blocked"]) == len(found["waiting"])
        assert ("WAITING" in status()) == bool(found["blocked"])
        return list(found["blocked"])

    return named


@pytest.fixture
def producer(fake: Connection) -> Iterator[Producer]:
    with producing(fake, "r") as one:
        yield one


@pytest.fixture
def says(fake: Connection, forward: Forward, caplog: pytest.LogCaptureFixture) -> Says:
    """The line in which a trainer that waits for long says why; by default one that wants two groups."""

    def line_of(queue: TrainerQueue | None = None) -> str:
        queue = queue or TrainerQueue(fake, "r", batch_groups=2, commit="each_batch")
        caplog.clear()
        look(queue, forward)
        forward(REPORT_S)
        with caplog.at_level(logging.WARNING), pytest.raises(NoBatchError) as caught:
            queue.next_batch(timeout=0.05)
        line = next(each for each in caplog.messages if each.startswith("run r: trainer: no batch for "))
        assert line.count("run r") == 1 + line.count("--run r")
        assert line.partition(": no batch for ")[2].partition(": ")[2][:20] in str(caught.value)
        return line

    return line_of


def look(queue: TrainerQueue, forward: Forward) -> None:
    """Let the trainer wait for a moment."""
    forward(2)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0.05)


def test_a_run_without_anything_lacks_producers(blocked: Blocked, says: Says) -> None:
    line = says()
    assert "no producer is alive (0 finished, 0 lost)" in line
    assert "[no_producer]" in line
    assert blocked() == ["no_producer"]


def test_producers_that_have_finished_and_pushed_all_are_not_asked_for(
    fake: Connection, blocked: Blocked, forward: Forward
) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 1)
        producer.finish()
    forward(60)
    assert blocked() == ["no_grouper"]


def test_a_counter_too_long_to_be_read_stops_no_trainer(fake: Connection) -> None:
    fake.scripts.hset(join(fake, "r").keys.home.ledger, "outcome:complete", "9" * 5000)
    with pytest.raises(NoBatchError):
        TrainerQueue(fake, "r", batch_groups=2, commit="each_batch").next_batch(timeout=0.05)


def test_a_live_producer_is_no_reason(producer: Producer, blocked: Blocked) -> None:
    assert blocked() == []


def test_producers_that_do_nothing_are_named(
    fake: Connection, producer: Producer, blocked: Blocked, says: Says
) -> None:
    push_groups(producer, 1)
    group_all(join(fake, "r"))
    line = says()
    assert "1 producer is alive, no group is open, nothing moved for " in line
    assert blocked() == ["producers_idle"]


@pytest.mark.parametrize("reason", ["groups_coming", "producers_idle", "incomplete_groups"])
def test_a_producer_that_misses_a_heartbeat_is_named_before_it_is_lost(
    fake: Connection, forward: Forward, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(logic, "HEARTBEAT_S", 3600.0)
    queue = TrainerQueue(fake, "r", batch_groups=4, commit="each_batch")
    with producing(fake, "r") as producer:
        (name,) = fake.scripts.hkeys(join(fake, "r").keys.home.producers)
        push_groups(producer, 1)
        group_all(join(fake, "r"))
        if reason == "incomplete_groups":
            producer.begin_group(4)
        for prefix in ("early", "late"):
            forward(11)
            heartbeat(producer)
            forward(0 if prefix == "early" else 15)
            if reason == "groups_coming":
                with producing(fake, "r") as other:
                    push_groups(other, 1, prefix=prefix)
                group_all(join(fake, "r"))
            with pytest.raises(NoBatchError, match=rf"\[{reason}\]") as caught:
                queue.next_batch(timeout=0)
            silent = f"no heartbeat of producer {name.decode()} for 15 s (lost after 30 s)"
            assert (silent in str(caught.value)) == (prefix == "late")


def test_groups_that_lack_a_rollout_are_named(
    fake: Connection, producer: Producer, blocked: Blocked, says: Says
) -> None:
    for number in range(3):
        producer.push([trajectory(f"g{number}", index, 4) for index in range(3)])
    producer.begin_group(4)
    group_all(join(fake, "r"))
    line = says()
    assert "4 of 4 open groups lack 7 of 16 rollouts, nothing moved for " in line
    assert "the oldest is open for " in line
    assert blocked() == ["incomplete_groups"]


def test_groups_that_lack_a_reward_are_named(
    fake: Connection, producer: Producer, blocked: Blocked, says: Says
) -> None:
    producer.push([unscored("g", 0), unscored("g", 1)])
    group_all(join(fake, "r"))
    line = says()
    assert "1 of 1 open groups lack the rewards of 2 rollouts" in line
    assert blocked() == ["missing_scores"]


def test_rewards_that_lack_are_named_before_the_pacing_that_they_cause(
    fake: Connection, producer: Producer, blocked: Blocked, forward: Forward
) -> None:
    queue = TrainerQueue(fake, "r", batch_groups=1, max_staleness=0, prefetch=0, commit="each_batch")
    look(queue, forward)
    producer.push([unscored("g", 0), unscored("g", 1)])
    group_all(join(fake, "r"))
    look(queue, forward)
    forward(REPORT_S)
    assert blocked() == ["missing_scores", "pacing"]


def test_entries_nobody_takes_are_named_at_once(producer: Producer, blocked: Blocked, says: Says) -> None:
    push_one(producer, trajectory())
    assert blocked() == ["no_grouper"]
    line = says()
    assert "1 entry waits for a grouper (none is there), the oldest for " in line


def test_a_scorer_that_is_not_there_is_named(fake: Connection, blocked: Blocked, says: Says) -> None:
    with producing(fake, "r", {"scorers": ("judge",)}) as producer:
        producer.push([unscored("g", 0), trajectory("g", 1)])
        group_all(join(fake, "r"))
        assert blocked() == ["no_scorer"]
        line = says()
        assert "1 entry waits for a scorer judge (none is there)" in line


@pytest.mark.parametrize(("scorers", "reason"), [(("judge",), "no_scorer"), ((), "no_grouper")])
def test_groups_whose_rollouts_nobody_takes_lack_none(
    fake: Connection, blocked: Blocked, scorers: tuple[str, ...], reason: str, says: Says
) -> None:
    with producing(fake, "r", {"scorers": scorers}) as producer:
        for number in range(3):
            fields = {} if not scorers else {"reward": ..., "reward_later": True}
            producer.push([trajectory(f"g{number}", index, **fields) for index in range(2)])
        line = says()
        assert f"[{reason}]" in line
        assert "lack" not in line
        assert blocked() == [reason]
        producer.begin_group(4)
        line = says()
        assert "4 open groups lack 4 of 10 rollouts, 6 others wait for a process" in line
        assert blocked()[:2] == [reason, "incomplete_groups"]


def test_work_that_nobody_computes_is_named(
    fake: Connection, producer: Producer, blocked: Blocked, says: Says
) -> None:
    push_groups(producer, 2)
    group_all(join(fake, "r"))
    line = says()
    assert "1 entry waits for an advantage worker (none is there)" in line
    assert blocked()[0] == "no_advantage_worker"


def test_a_stage_that_does_not_keep_up_is_named(
    fake: Connection, producer: Producer, blocked: Blocked, forward: Forward
) -> None:
    run = join(fake, "r")
    push_groups(producer, 2)
    consumer = consumer_of(run, name="slow")
    assert consumer.read(1)
    assert blocked() == []
    forward(31)
    consumer.read(1)
    assert "backlog" in blocked()
    forward(31)
    assert "no_grouper" in blocked()


def test_groups_without_a_trainer_are_named(fake: Connection, producer: Producer, blocked: Blocked) -> None:
    push_groups(producer, 2)
    group_all(join(fake, "r"))
    assert blocked() == ["no_trainer"]


def test_a_run_in_motion_has_no_reason(fake: Connection, producer: Producer, blocked: Blocked) -> None:
    run = join(fake, "r")
    queue = TrainerQueue(fake, "r", batch_groups=2, commit="each_batch")
    with pytest.raises(NoBatchError, match=r"\[groups_coming\]"):
        queue.next_batch(timeout=0)
    worker = consumer_of(run, "advantage")
    compute_all(run, worker)
    for number in range(6):
        producer.push([trajectory(f"open{number}", 0)])
        push_groups(producer, 2, prefix=f"p{number}", model_version=number)
        group_all(run)
        assert blocked() == []
        if number == 0:
            with pytest.raises(NoBatchError, match=r"\[computing\]"):
                queue.next_batch(timeout=0)
            assert blocked() == []
        compute_all(run, worker)
        assert next_batch(queue, run) is not None
        assert blocked() == []
        producer.push([trajectory(f"open{number}", 1)])


def test_the_time_that_a_trainer_trains_is_no_wait(
    fake: Connection, producer: Producer, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    queue = TrainerQueue(fake, "r", batch_groups=2, commit="each_batch")
    push_groups(producer, 2)
    assert next_batch(queue, join(fake, "r")) is not None
    forward(600)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0.05)
    assert "no batch for" not in caplog.text


def test_the_reason_is_said_at_a_bounded_rate(
    fake: Connection, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    queue = TrainerQueue(fake, "r", batch_groups=1, commit="each_batch")
    with caplog.at_level(logging.WARNING):
        for _ in range(int(3 * REPORT_S) // 5):
            forward(5)
            with pytest.raises(NoBatchError):
                queue.next_batch(timeout=0.05)
    said = [message for message in caplog.messages if "no batch for" in message]
    assert 2 <= len(said) <= 3


# What happens to all that comes


def filtering(fake: Connection) -> Any:
    return producing(fake, "r", {"zero_variance_filter": True})


def test_filters_that_leave_nothing_are_named(fake: Connection, blocked: Blocked, says: Says) -> None:
    with filtering(fake) as producer:
        push_groups(producer, 3, reward=1.0)
        group_all(join(fake, "r"))
        assert blocked() == ["filtered"]
        line = says()
        assert "3 of 3 groups that ended since the last batch are lost (zero_variance 3)" in line


def test_groups_that_end_short_are_named(
    fake: Connection, producer: Producer, blocked: Blocked, says: Says
) -> None:
    run = join(fake, "r")
    producer.push([trajectory("a", 0), ended("a", 1, 2, "failed")])
    producer.push([trajectory("b", 0)])
    group_all(run)
    make_overdue(run, "b")
    group_all(run)
    line = says()
    assert "2 of 2 groups that ended since the last batch are lost (expired 1, incomplete 1)" in line
    assert "ended_short" in blocked()


def trained_to(queue: TrainerQueue, fake: Connection, producer: Producer, version: int) -> None:
    """Train so many batches of fresh groups."""
    for k in range(version):
        push_groups(producer, 2, prefix=f"fresh{k}", model_version=k)
        batch = delivered_batch(queue, join(fake, "r"))
        queue.trained(batch)
        queue.commit(queue.state_dict())


def test_stale_groups_only_are_an_error_after_max_filtered_batches(
    fake: Connection, producer: Producer, blocked: Blocked, forward: Forward, says: Says
) -> None:
    queue = TrainerQueue(
        fake, "r", batch_groups=2, max_staleness=1, drop_after=1, max_filtered_batches=3, commit="manual"
    )
    trained_to(queue, fake, producer, 3)
    push_groups(producer, 2, prefix="old", model_version=0)
    group_all(join(fake, "r"))
    line = says(queue)
    assert "2 of 2 groups that ended since the last batch are lost (stale 2): raise drop_after" in line
    assert "stale" in blocked()
    for number in range(2):
        push_groups(producer, 2, prefix=f"older{number}", model_version=0)
        group_all(join(fake, "r"))
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
    forward(2)
    with pytest.raises(
        StarvedError, match=r"6 groups were too old .*stale 6.*model_version.*max_filtered_batches is 3"
    ):
        queue.next_batch(timeout=0.05)


def test_what_was_dropped_is_told_with_the_next_batch_in_figures(
    fake: Connection, producer: Producer
) -> None:
    queue = TrainerQueue(
        fake,
        "r",
        batch_groups=2,
        max_staleness=1,
        drop_after=1,
        max_filtered_batches=None,
        commit="each_batch",
    )
    trained_to(queue, fake, producer, 3)
    for number in range(3):
        push_groups(producer, 2, prefix=f"old{number}", model_version=0, tokens=6 + number)
        group_all(join(fake, "r"))
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
    push_groups(producer, 2, prefix="new", model_version=3)
    batch = delivered_batch(queue, join(fake, "r"))
    assert batch.metrics["dropped/stale/unknown/groups"] == 6
    assert batch.metrics["dropped/stale/unknown/response_length/mean"] == 5


def test_dead_groups_only_are_an_error_too(
    fake: Connection, producer: Producer, blocked: Blocked, forward: Forward
) -> None:
    queue = TrainerQueue(
        fake,
        "r",
        batch_groups=2,
        chain={"estimator": "gae"},
        pushed=("values",),
        max_filtered_batches=2,
        commit="each_batch",
    )
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    for number in range(2):
        push_groups(producer, 2, prefix=f"bad{number}")
        group_all(join(fake, "r"))
        with pytest.raises(NoBatchError):
            queue.next_batch(timeout=0)
    assert "dead" in blocked()
    forward(2)
    with pytest.raises(StarvedError, match=r"4 groups became dead letters .*dead 4.*streamadv dead list"):
        queue.next_batch(timeout=0.05)


def test_what_a_checkpoint_leaves_behind_is_no_starvation(
    fake: Connection, producer: Producer, blocked: Blocked, forward: Forward
) -> None:
    """Groups that wait when an older checkpoint is loaded are dropped once; those after them count."""
    queue = TrainerQueue(fake, "r", batch_groups=2, max_staleness=None, commit="manual")
    states = [queue.state_dict()]
    trained_to(queue, fake, producer, 2)
    push_groups(producer, 20, prefix="after", model_version=2)
    group_all(join(fake, "r"))
    again = TrainerQueue(
        fake, "r", batch_groups=2, max_staleness=None, max_filtered_batches=2, commit="each_batch"
    )
    again.load_state_dict(states[0])
    for _ in range(12):
        forward(2)
        with pytest.raises(NoBatchError):
            again.next_batch(timeout=0.001)
    assert "rolled_back" in json.dumps(blocked()) or "producers_idle" in blocked()


def test_filtered_groups_only_are_an_error_after_max_filtered_batches(
    fake: Connection, forward: Forward
) -> None:
    with filtering(fake) as producer:
        queue = TrainerQueue(fake, "r", batch_groups=2, max_filtered_batches=3, commit="each_batch")
        look(queue, forward)
        push_groups(producer, 5, prefix="same", reward=1.0)
        group_all(join(fake, "r"))
        look(queue, forward)
        push_groups(producer, 1, prefix="last", reward=0.0)
        group_all(join(fake, "r"))
        forward(2)
        with pytest.raises(StarvedError, match="6 groups were filtered away"):
            queue.next_batch(timeout=0.05)


def test_a_batch_in_between_forgives(fake: Connection, forward: Forward) -> None:
    with filtering(fake) as producer:
        queue = TrainerQueue(fake, "r", batch_groups=2, max_filtered_batches=3, commit="each_batch")
        look(queue, forward)
        for number in range(3):
            push_groups(producer, 5, prefix=f"same{number}", reward=1.0)
            group_all(join(fake, "r"))
            look(queue, forward)
            push_groups(producer, 2, prefix=f"kept{number}")
            assert next_batch(queue, join(fake, "r")) is not None


def test_a_named_batch_that_waits_for_a_worker_is_not_starvation(fake: Connection, forward: Forward) -> None:
    with filtering(fake) as producer:
        queue = TrainerQueue(fake, "r", batch_groups=1, max_filtered_batches=3, commit="each_batch")
        push_groups(producer, 1, prefix="kept")
        group_all(join(fake, "r"))
        look(queue, forward)
        for prefix in ("same", "more"):
            push_groups(producer, 4, prefix=prefix, reward=1.0)
            group_all(join(fake, "r"))
            look(queue, forward)


def test_few_kept_groups_are_warned_of(
    fake: Connection, forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    with filtering(fake) as producer:
        queue = TrainerQueue(
            fake,
            "r",
            batch_groups=3,
            min_kept_ratio=0.3,
            max_filtered_batches=None,
            max_staleness=None,
            commit="each_batch",
        )
        look(queue, forward)
        push_groups(producer, 10, prefix="same", reward=1.0)
        push_groups(producer, 2, prefix="kept")
        group_all(join(fake, "r"))
        look(queue, forward)
    assert "only 2 of the last 12 groups were kept" in caplog.text


# Admission


def test_producers_as_far_ahead_as_allowed_are_named_when_nothing_moves(
    fake: Connection, producer: Producer, blocked: Blocked, forward: Forward
) -> None:
    queue = TrainerQueue(fake, "r", batch_groups=1, max_staleness=1, commit="each_batch")
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    push_groups(producer, 2)
    group_all(join(fake, "r"))
    assert "pacing" not in blocked()
    forward(20)
    assert "pacing" in blocked()


def test_a_trainer_that_waits_for_a_named_batch_does_not_wait_for_producers(
    fake: Connection, producer: Producer, blocked: Blocked, forward: Forward
) -> None:
    run = join(fake, "r")
    compute_all(run, consumer_of(run, "advantage"))  # a worker is there, and slow
    queue = TrainerQueue(fake, "r", batch_groups=1, max_staleness=1, commit="each_batch")
    push_groups(producer, 3)
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    forward(20)
    assert blocked() == ["pacing"]  # which is why producers wait
    with pytest.raises(NoBatchError, match=r"\[computing\]"):
        queue.next_batch(timeout=0)


def test_bytes_that_open_groups_hold_are_named(fake: Connection, blocked: Blocked, says: Says) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": 300_000, "max_bytes": 1_200_000}) as producer:
        producer.begin_group(2)
        producer.begin_group(2)
        line = says()
        assert "[max_bytes]" in line
        assert "[incomplete_groups]" in line
        assert blocked() == ["max_bytes", "incomplete_groups"]


def test_a_budget_below_one_rollout_is_not_waited_for(fake: Connection, status: Callable[..., Any]) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": 4 << 20, "max_bytes": 2 << 20}) as producer:
        with pytest.raises(SettingError, match="max_bytes"):
            producer.begin_group(1)
        shown = status()
    assert (
        "WAITING no group fits: a rollout reserves 4194304 bytes of max_bytes 2097152: raise max_bytes"
        in shown
    )
    assert "wait for commits" not in shown


def test_a_batch_larger_than_the_budget_is_an_error(
    fake: Connection, blocked: Blocked, forward: Forward
) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": 300_000, "max_bytes": 1_200_000}) as producer:
        queue = TrainerQueue(fake, "r", batch_groups=8, max_staleness=None, commit="each_batch")
        push_groups(producer, 2, tokens=20_000)
        group_all(join(fake, "r"))
        look(queue, forward)
        forward(20)
        assert blocked() == ["batch_over_budget"]
        with pytest.raises(
            BatchBudgetError, match=r"2 groups hold .* of max_bytes 1200000.* batch_groups is 8.*raise max"
        ):
            queue.next_batch(timeout=0.05)


@pytest.mark.parametrize(("waiting", "tokens"), [(0, 20_000), (1, 14_000)])
def test_uncommitted_batches_that_fill_the_budget_are_an_error(
    waiting: int, tokens: int, fake: Connection, blocked: Blocked, forward: Forward
) -> None:
    """The producer waits for bytes that only a commit frees; the trainer would wait for the producer."""
    with producing(fake, "r", {"max_trajectory_bytes": 300_000, "max_bytes": 1_200_000}) as producer:
        run = join(fake, "r")
        queue = TrainerQueue(fake, "r", batch_groups=2, commit="manual", max_staleness=None)
        push_groups(producer, 2 + waiting, tokens=tokens)
        batch = delivered_batch(queue, run)
        queue.trained(batch)
        forward(11)
        assert blocked() == ["uncommitted"]
        with pytest.raises(UncommittedBudgetError, match="save a checkpoint every few batches"):
            queue.next_batch(timeout=0.05)
        queue.commit(queue.state_dict())
        look(queue, forward)
