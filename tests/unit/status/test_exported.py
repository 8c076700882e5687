"""The facts of a run as metrics: what status says, within a deadline, whatever the server does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis.exceptions
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streamadv import metrics
from streamadv.run import Run
from streamadv.status import exported, read_status
from streamadv.status.exported import RunFacts
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import Forward, group_all, join, next_batch, producing, push_groups, trajectory, unscored


@pytest.fixture
def busy(fake: Connection) -> Run:
    """A run with something everywhere."""
    with producing(fake, "r", {"scorers": ("s",), "redundancy": 1}) as producer:
        run = join(fake, "r")
        push_groups(producer, 5, model_version=0)
        producer.push([trajectory("open", 0)])
        assert (
            next_batch(TrainerQueue(fake, "r", batch_groups=2, prefetch=0, commit="each_batch"), run)
            is not None
        )
        producer.push([unscored("scored", 0)])
    return run


@pytest.fixture
def facts(busy: Run) -> RunFacts:
    return RunFacts(busy.connection, busy.name)


def values(facts: RunFacts) -> dict[tuple[str, ...], float]:
    """(name without prefix, values of the labels ...) -> value."""
    text = generate_latest(_one(facts)).decode()  # type: ignore[arg-type]
    return {
        (sample.name.removeprefix(exported.PREFIX), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _one(facts: RunFacts) -> Any:
    registry = metrics.collectors.Registry()
    registry.add(facts)
    return registry


def test_the_facts_are_those_of_the_status(busy: Run, facts: RunFacts) -> None:
    status, found = read_status(busy), values(facts)
    assert found["readable",] == 1
    assert found["balanced",] == 1
    assert found["pushed_trajectories_total",] == status.ledger.pushed > 0
    assert found["dropped_trajectories_total", "stale"] == 0
    places = ("scoring", "rollouts", "open", "grouped", "in_flight")
    assert sum(found["trajectories", place] for place in places) == status.ledger.pushed
    assert found["stream_entries", "rollouts"] == status.streams["rollouts"].length
    assert found["max_bytes",] == status.admission.max_bytes
    assert found["trainer", status.trainer.state] == 1
    assert sum(value for name, value in found.items() if name[0] == "trainer") == 1
    assert found["committed_version",] == 0


def test_every_fact_is_declared_and_has_a_sample_where_it_can(facts: RunFacts) -> None:
    names = {name for name, *_ in values(facts)}
    assert names <= exported.FACTS.keys()
    absent = {
        "groups_ahead_limit",
        "server_maxmemory_bytes",
        "server_used_memory_bytes",
        "server_total_memory_bytes",
    }
    eval_facts = {name for name in exported.FACTS if name.startswith(("eval_", "prompt"))}
    assert exported.FACTS.keys() - names <= absent | eval_facts | {"dead_trajectories"}


def test_open_groups_show_by_age_and_by_what_they_lack(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.begin_group(size=2, group_id="none-yet")
        producer.push([trajectory("half", 0)])
        run = join(fake, "r")
        group_all(run)
        found = values(RunFacts(run.connection, "r"))
    missing = {
        rollouts: found["open_groups_missing", rollouts] for rollouts in ("none", "one", "some", "all")
    }
    assert missing == {"none": 0, "one": 1, "some": 0, "all": 1}
    assert found["open_groups_older_than", "3600"] == 0
    assert found["missing_rollouts",] == 3


def test_a_group_that_ends_while_the_run_is_read_has_no_age(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.begin_group(size=2, group_id="g")
        run = join(fake, "r")
        run.connection.scripts.delete(run.home.keys.group("g"))
        found = values(RunFacts(run.connection, "r"))
    assert found["oldest_open_group_seconds",] == 0
    assert found["missing_rollouts",] == 0


def test_the_reason_why_nothing_moves_is_shown(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([trajectory("g", 0)])
        found = values(RunFacts(fake, "r"))
    assert found["blocked", "no_grouper"] == 1
    assert found["blocked", "pacing"] == 0


def test_a_run_that_does_not_exist_yet_cannot_be_read(fake: Connection) -> None:
    facts = RunFacts(fake, "later")
    assert values(facts) == {("readable",): 0}
    with producing(fake, "later"):
        assert values(facts)["readable",] == 1


def test_a_server_that_hangs_does_not_hold_up_a_scrape(
    busy: Run, facts: RunFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, began = threading.Event(), threading.Semaphore(0)

    def hang(_run: Run) -> Any:
        began.release()
        go_on.wait()

    monkeypatch.setattr(exported, "READ_S", 0.01)
    monkeypatch.setattr(exported, "read_status", hang)
    hanging = RunFacts(busy.connection, busy.name)
    for _ in range(3):
        assert values(hanging) == {("readable",): 0}
    assert began.acquire(timeout=30)
    assert not began.acquire(blocking=False), "it is read once"
    go_on.set()


@pytest.mark.parametrize(
    "error", [redis.exceptions.ConnectionError("gone"), redis.exceptions.RedisClusterException("gone")]
)
def test_an_outage_is_logged_once(
    error: Exception, facts: RunFacts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_run: Run) -> Any:
        raise error

    with caplog.at_level("WARNING"):
        for reader, times in ((read_status, 1), (gone, 2), (read_status, 1), (gone, 1)):
            monkeypatch.setattr(exported, "read_status", reader)
            for _ in range(times):
                assert values(facts)["readable",] == (reader is read_status)
    assert caplog.text.count("gone") == 2


@pytest.fixture
def registered(facts: RunFacts) -> Iterator[RunFacts]:
    metrics.REGISTRY.add(facts)
    yield facts
    metrics.REGISTRY._parts.remove(facts)


def test_the_process_keeps_its_own_metrics_while_the_run_cannot_be_read(
    registered: RunFacts, monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    def gone(_run: Run) -> Any:
        raise OSError("gone")

    monkeypatch.setattr(exported, "read_status", gone)
    text = generate_latest(metrics.REGISTRY).decode()  # type: ignore[arg-type]
    assert "streamadv_run_readable 0.0" in text
    assert "streamadv_build_info" in text
