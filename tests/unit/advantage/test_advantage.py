"""The advantage stage: pure, repeatable, and only the first result counts."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from redis.client import Pipeline
from redis.exceptions import ExecAbortError

from streamadv.advantage import worker
from streamadv.advantage.compute import compute, compute_safely, isolate
from streamadv.advantage.prepare import prepare
from streamadv.advantage.worker import publish, run_worker
from streamadv.algorithms.chain import cut_chain
from streamadv.algorithms.device import choose_device
from streamadv.batch.ends import dead_letter_groups
from streamadv.batch.record import Death, name_batch, read_records
from streamadv.batch.recovery import undo_batches
from streamadv.errors import ChainError, NoBatchError, SettingError
from streamadv.grouping.groups_log import LoggedGroup, read_log
from streamadv.run import Run
from streamadv.run.consumer import ADVANTAGE, Consumer
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    CPU,
    compute_all,
    consumer_of,
    fence_of,
    group_all,
    join,
    ledger,
    problems,
    producing,
    pushed_run,
)

TOKENS: Any = {"estimator": "reinforce", "gamma": 0.9, "whiten_advantages": True}


@pytest.fixture(params=["grpo", TOKENS], ids=["rows", "tokens"])
def named(request: pytest.FixtureRequest, fake: Connection) -> Run:
    """A run whose first batch waits for a worker."""
    run = pushed_run(fake, "r", 4)
    group_all(run)
    with pytest.raises(NoBatchError):
        TrainerQueue(
            fake, "r", batch_groups=4, prefetch=0, chain=request.param, commit="each_batch"
        ).next_batch(timeout=0)
    return run


def outputs(run: Run) -> list[bytes]:
    return [key for key in run.connection.scripts.keys("*") if b":output:" in key]


def test_the_same_work_gives_the_same_bits(named: Run) -> None:
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    one, two = (compute(prepare(named, entry), CPU) for _ in range(2))
    assert (one.header, one.results, one.outputs) == (two.header, two.results, two.outputs)
    assert one.results["rewards"]


def test_a_second_result_is_thrown_away(named: Run) -> None:
    """A worker thought dead comes back: its output leaves no key and no byte behind."""
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    result = compute(prepare(named, entry), CPU)
    assert publish(named, result)
    kept = outputs(named)
    assert not publish(named, result)
    assert outputs(named) == kept
    assert named.connection.scripts.xlen(named.keys.home.results) == 1
    assert problems(named) == []


def test_a_server_that_is_full_at_exec_takes_the_result(named: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a transaction may be what fills it: then EXEC is refused, and not each of them."""
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    result = compute(prepare(named, entry), CPU)
    refusals = []

    def refuse(*_: Any, **__: Any) -> None:
        refusals.append(1)
        raise ExecAbortError(
            "Transaction discarded because of: OOM command not allowed, used memory > 'maxmemory'."
        )

    monkeypatch.setattr(Pipeline, "execute", refuse)
    assert publish(named, result)
    assert refusals == [1]
    assert len(outputs(named)) == bool(result.outputs)
    monkeypatch.undo()
    assert problems(named) == []


def test_a_result_after_the_commit_is_thrown_away(named: Run) -> None:
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    result = compute(prepare(named, entry), CPU)
    keys = named.keys.home
    named.connection.scripts.hdel(keys.applied, result.prepared.item.batch)
    assert not publish(named, result)
    assert outputs(named) == []
    assert named.connection.scripts.xlen(keys.results) == 0


def test_work_whose_groups_are_gone_is_finished(named: Run) -> None:
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    named.connection.scripts.delete(named.keys.home.groups)
    assert prepare(named, entry) is None
    assert named.connection.scripts.xlen(named.keys.home.work) == 0


@pytest.mark.parametrize("count", [1, 4])
def test_work_is_done_without_dead_letters_of_its_batch(named: Run, count: int) -> None:
    """A server has lost the results, and the trainer has repeated the dead letters before they are computed again."""
    (record,) = read_records(named).values()
    dead = {pointer.group_id: Death("compute_error", "") for pointer in record.groups[:count]}
    dead_letter_groups(named, record, dead, fence_of(named))
    compute_all(named)
    batch = TrainerQueue(
        named.connection, "r", batch_groups=4, prefetch=0, chain=record.chain, commit="each_batch"
    ).next_batch(0)
    assert batch is not None
    assert {each.group_id for each in batch.references} == {p.group_id for p in record.groups[count:]}


def test_work_of_a_batch_that_was_named_again_is_finished_and_no_foreign_entry(named: Run) -> None:
    """Undoing a batch leaves its work in the stream: processes of the run have written that."""
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    (record,) = read_records(named).values()
    undo_batches(named, [record], fence_of(named))
    assert name_batch(named, record.model_copy(update={"id": "0-0123456789ab"}), fence_of(named))
    assert prepare(named, entry) is None
    assert named.connection.scripts.xlen(named.keys.home.work) == 0
    assert named.connection.scripts.xlen(named.keys.home.malformed) == 0


def test_work_that_its_shard_knows_is_done_although_the_record_is_of_another_naming(named: Run) -> None:
    """The home shard alone has lost recent writes: the trainer writes the record again, but not the work."""
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    (record,) = read_records(named).values()
    text = record.model_copy(update={"id": "0-0123456789ab"}).model_dump_json()
    named.connection.scripts.hset(named.keys.home.batches, "0", text)
    assert publish(named, compute(prepare(named, entry), CPU))


def test_only_the_columns_of_the_chain_are_fetched(named: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = consumer_of(named, ADVANTAGE).read(1)
    prepared = prepare(named, entry)
    chain, _ = cut_chain(prepared.item.chain, prepared.item.late)
    fetched = {name for columns in prepared.columns.values() for name in columns}
    assert fetched == set(chain.needs)
    assert fetched <= {"response_mask"}


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    if torch.cuda.is_available():
        assert choose_device("auto").type == "cuda"
    else:
        assert choose_device("auto").type == "cpu"
        with pytest.raises(SettingError, match="this machine has none"):
            choose_device("cuda")


def test_a_broken_payload_costs_its_group_only(fake: Connection) -> None:
    run = pushed_run(fake, "r", 3)
    group_all(run)
    queue = TrainerQueue(fake, "r", batch_groups=3, prefetch=0, chain=TOKENS, commit="each_batch")
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    (entry,) = consumer_of(run, ADVANTAGE).read(1)
    victim = next(group.packets[0].key for group in prepare(run, entry).groups if group.group_id == "g0001")
    fake.scripts.hset(victim, "response_mask", b"\x07")
    assert publish(run, compute_safely(run, prepare(run, entry), CPU))
    batch = queue.next_batch(timeout=0)
    assert batch is not None
    assert {reference.group_id for reference in batch.references} == {"g0000", "g0002"}
    assert ledger(run)["dead"] == {"undecodable": 2}
    assert problems(run) == []


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What nobody refers to is freed, cycles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_no_failed_group_stays_in_memory(fake: Connection) -> None:
    run = pushed_run(fake, "r", 3)
    group_all(run)
    held: list[weakref.ref[torch.Tensor]] = []

    def fail(error: type[Exception]) -> NoReturn:
        column = torch.zeros(9)
        held.append(weakref.ref(column))
        raise error(f"column of {len(column)}")

    groups: list[LoggedGroup] = read_log(run, 0, "0-0", 3)
    assert len(isolate(run, groups, lambda _: fail(ValueError))) == 3
    with pytest.raises(ChainError, match="the chain fails by itself: TypeError: column of 9"):
        isolate(run, groups, lambda _: fail(TypeError))
    assert [column() for column in held] == [None] * 6


def test_a_worker_that_is_told_to_end_does_not_wait_for_ever_for_the_server(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads, answers, stop = threading.Event(), threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> list[Any]:
        reads.set()
        answers.wait()
        return []

    monkeypatch.setattr(worker, "SHUTDOWN_S", 0.1)
    monkeypatch.setattr(Consumer, "read", hang)
    with producing(fake, "r"):
        ending = threading.Thread(target=run_worker, args=(join(fake, "r"), stop), kwargs={"device": "cpu"})
        ending.start()
        reads.wait()
        stop.set()
        ending.join(60)
        try:
            assert not ending.is_alive()
            assert "ends without the server's reply to its last read" in caplog.text
        finally:
            answers.set()
