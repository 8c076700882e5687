"""The results log reads each entry once, keeps results by batch, and returns what belongs to none."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import redis
import torch

from streamadv.batch.ends import read_results
from streamadv.batch.progress import NamedBatch
from streamadv.batch.record import read_records, work_items
from streamadv.errors import NoBatchError
from streamadv.run import Run, Shard
from streamadv.run.dead_letters import list_malformed
from streamadv.store.connection import Connection
from streamadv.trainer import loop
from streamadv.trainer.collect import Collector
from streamadv.trainer.plan import Rank
from streamadv.trainer.queue import TrainerQueue

from ...support import compute_all, delivered_batch, fence_of, group_all, problems, pushed_run

#: One work item for each shard.
WHITENED = {"estimator": "grpo", "whiten_advantages": True}


@pytest.fixture
def computed(fake: Connection) -> Run:
    """A run with one named batch whose results are published."""
    run = pushed_run(fake, "r", 4)
    group_all(run)
    with pytest.raises(NoBatchError):
        TrainerQueue(fake, "r", batch_groups=4, prefetch=0, commit="each_batch").next_batch(timeout=0)
    compute_all(run)
    return run


def log_of(run: Run, leads: bool = True) -> Collector:
    """As the rank of a session has it that knows all named batches."""
    batches = {k: NamedBatch(record) for k, record in read_records(run).items()}
    progress = SimpleNamespace(fence=fence_of(run), batches=batches)
    session: Any = SimpleNamespace(run=run, leads=leads, progress=progress, has_same_servers=lambda: True)
    return Collector(session, Rank(0, 1, torch.device("cpu")), {})


def problem_of(run: Run) -> str:
    """Why the one entry that was removed from the results log is none."""
    ((_, note),) = list_malformed(run.home, 0)
    assert note.group_id.startswith("results/")
    return note.detail


def test_results_are_read_once_and_kept_until_the_batch_is_delivered(computed: Run) -> None:
    (record,) = read_records(computed).values()
    items, log = work_items(record), log_of(computed)
    assert log.results_of(record.id, items) is None
    log.read()
    results = log.results_of(record.id, items)
    assert results is not None
    assert [result.header.unit for result in results] == [item.number for item in items]
    log.read()
    assert log.results_of(record.id, items) == results
    log.results.pop(record.id)
    assert log.results_of(record.id, items) is None


def test_the_first_of_several_results_counts_until_it_is_removed(computed: Run) -> None:
    (record,) = read_records(computed).values()
    items, log = work_items(record), log_of(computed)
    scripts, key = computed.connection.scripts, computed.keys.home.results
    ((_, fields),) = scripts.xrange(key)
    scripts.xadd(key, fields)
    log.read()
    (first,) = log.results_of(record.id, items) or []
    assert log.results_of(record.id, items) == [first]
    log.results[record.id].remove(first)
    (second,) = log.results_of(record.id, items) or []
    assert second is not first
    log.results[record.id].remove(second)
    assert log.results_of(record.id, items) is None


def test_rank_0_removes_what_is_of_no_batch(computed: Run) -> None:
    scripts, key = computed.connection.scripts, computed.keys.home.results
    ((entry, fields),) = scripts.xrange(key)
    scripts.xadd(key, {"junk": "1"})
    scripts.xadd(key, {**fields, b"batch": b"none"})
    scripts.xadd(key, {**fields, b"batch": b"7-0123456789ab"})
    log_of(computed, leads=False).read()  # does not know which batches there are
    assert scripts.xlen(key) == 4
    log_of(computed).read()
    assert [left for left, _ in scripts.xrange(key)] == [entry]
    notes = [note.detail for _, note in list_malformed(computed.home, 0)]
    assert notes == ["field batch is missing", "batch 'none' is none of this run"]


def test_another_thread_may_commit_while_results_are_taken(computed: Run) -> None:
    ((k, record),) = read_records(computed).items()
    log = log_of(computed)
    batches: dict[int, Any] = log.session.progress.batches

    class Named:
        results: ClassVar[list[Any]] = []

        @property
        def record(self) -> Any:
            batches.pop(k + 1, None)
            return record

    batches |= {k: Named(), k + 1: Named()}
    log.read()
    assert log.results_of(record.id, work_items(record)) is not None


def test_strays_are_removed_although_the_server_was_away_at_first(
    computed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not removed then is at the next look."""
    scripts, key, call = computed.connection.scripts, computed.keys.home.results, Shard.call
    ((_, fields),) = scripts.xrange(key)
    scripts.xadd(key, {"junk": "1"})
    scripts.xadd(key, {**fields, b"batch": b"7-0123456789ab"})
    away = iter([True])

    def call_or_fail(self: Shard, name: str, *args: Any, **caller_keys: Any) -> Any:
        if name in ("reject", "unapply_batch") and next(away, False):
            raise redis.ConnectionError("away")
        return call(self, name, *args, **caller_keys)

    monkeypatch.setattr(Shard, "call", call_or_fail)
    queue = TrainerQueue(computed.connection, "r", batch_groups=4, prefetch=0, commit="each_batch")
    assert queue.next_batch(timeout=5) is not None
    assert next(away, None) is None
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=1)
    assert scripts.xlen(key) == 0, "neither those nor the committed batch's"


@pytest.mark.parametrize("count", [-1, 1 << 40, 10**30])
def test_results_of_more_tokens_than_any_batch_has_are_refused(computed: Run, count: int) -> None:
    scripts, key = computed.connection.scripts, computed.keys.home.results
    ((entry, fields),) = scripts.xrange(key)
    header = json.loads(fields[b"header"])
    header["groups"][0][-1] = count
    scripts.xdel(key, entry)
    scripts.xadd(key, {**fields, b"header": json.dumps(header)})
    log_of(computed).read()
    assert problem_of(computed).startswith("header: groups.0")


def test_a_commit_removes_all_results_of_a_batch_that_a_session_before_delivered(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits reads the log entry by entry: the session on another server has read one of several so far."""
    server = "first"
    monkeypatch.setattr(Run, "server_ids_with", lambda _, pipe: ([server, server], pipe.execute()))
    run = pushed_run(fake, "r", 8, settings={"shards": 2})
    queue = TrainerQueue(fake, "r", batch_groups=8, commit="manual", chain=WHITENED)
    batch = delivered_batch(queue, run)
    queue.trained(batch)
    server = "second"
    wait = loop.wait_for_news

    def wait_once(*arguments: Any) -> None:
        wait(*arguments)
        raise NoBatchError("no more")

    monkeypatch.setattr(loop, "wait_for_news", wait_once)
    with pytest.raises(NoBatchError, match="no more"):
        queue.next_batch(timeout=5)
    queue.commit(queue.state_dict())
    assert read_results(run) == []
    assert problems(run) == []


def test_a_size_that_no_output_has_is_no_size(computed: Run) -> None:
    """Python reads no number of so many digits, and a script none beyond 2^53."""
    scripts, key = computed.connection.scripts, computed.keys.home.results
    ((entry, fields),) = scripts.xrange(key)
    scripts.xdel(key, entry)
    output = computed.keys.home.output("0")
    scripts.xadd(key, {**fields, b"output": output, b"output_bytes": b"9" * 5000})
    assert [result.output_bytes for result in read_results(computed)] == [0]
    log_of(computed).read()
    assert problem_of(computed).startswith("output_bytes is ")


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"level": "token"}, "result advantages is unknown at level token"),
        (
            {"metrics": {"a": 1.0}, "weights": {}},
            "header: its metrics cannot be merged: metric a has weight None",
        ),
        (
            {"metrics": {"a_eff_sample_size": 1.0}, "weights": {"a_eff_sample_size": 1.0}},
            "header: its metrics",
        ),
    ],
)
def test_results_that_do_not_fit_together_are_strays(
    computed: Run, header: dict[str, Any], problem: str
) -> None:
    scripts, key = computed.connection.scripts, computed.keys.home.results
    ((entry, fields),) = scripts.xrange(key)
    scripts.xdel(key, entry)
    changed = {**fields, b"header": json.dumps(json.loads(fields[b"header"]) | header)}
    scripts.xadd(key, changed | ({b"advantages": b""} if "level" in header else {}))
    log_of(computed).read()
    assert problem_of(computed).startswith(problem)
