"""A chain that fails on every group: nothing is lost or dead for it, everybody says why, another chain goes on."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest

from streamadv.errors import NoBatchError
from streamadv.run import Run
from streamadv.status import read_status
from streamadv.status.causes import reasons_of
from streamadv.store.connection import Connection
from streamadv.store.reasons import listed
from streamadv.trainer.queue import TrainerQueue
from tests.clusters import until
from tests.support import delivered_batch, group_all, join, ledger, next_batch, problems, pushed_run, working

WRONG = {"estimator": "grpo", "reward": {"components": {"nosuch": 1.0}}}
ERROR = "reward.components names 'nosuch'"
KL = {"kl": {"coefficient": 0.1}, "estimator": "reinforce"}


def failing(run: Run) -> str:
    return listed(
        [reason for reason in reasons_of(read_status(run)) if reason.name == "failing_chain"], run.name
    )


def supplied(*_: object) -> NoReturn:
    raise AssertionError("no batch is delivered")


def names_batches(queue: TrainerQueue, run: Run) -> TrainerQueue:
    """As the trainer of a chain that no worker computes."""
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    return queue


def test_workers_live_on_and_another_chain_trains_on_everything(
    redis_url: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 6, finish=True)
    with working(joined):
        wrong = TrainerQueue(connection, run, batch_groups=2, chain=WRONG, commit="manual")
        names_batches(wrong, joined)
        until(lambda: ERROR in failing(joined), "the run says why the chain fails")
        with pytest.raises(
            NoBatchError, match=rf"{ERROR}.*start the trainer with another chain.*failing_chain"
        ):
            wrong.next_batch(timeout=0)
        wrong.close()
        assert ledger(joined)["dead"] == {}
        assert ledger(joined)["in_flight"] == 8
        assert "are dead" not in caplog.text
        fixed = TrainerQueue(connection, run, batch_groups=2, commit="manual")
        trained = [reference.group_id for batch in fixed for reference in batch.references]
        fixed.commit(fixed.state_dict())
    assert len(set(trained)) == 6
    assert len(trained) == 12
    assert "batches 0 to 1 are named again: they were named for another chain" in caplog.text
    assert failing(joined) == ""
    assert ledger(joined)["trained"] == 12
    assert problems(joined) == []


def test_what_a_checkpoint_holds_keeps_its_chain(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the epoch is read before the checkpoint is loaded, and its commit was never made."""
    run = pushed_run(fake, "r", 4, finish=True)
    old = TrainerQueue(fake, "r", batch_groups=1, chain="grpo", commit="manual")
    trained = [delivered_batch(old, run).references[0].group_id for _ in range(2)]
    old.trained(delivered_batch(old, run))  # batch 2
    state = old.state_dict()
    delivered_batch(old, run)  # 3: named, and after the checkpoint
    new = TrainerQueue(fake, "r", batch_groups=1, chain="rloo", commit="manual")
    assert new.epoch == 2
    new.load_state_dict(state)
    assert ledger(run)["trained"] == 6  # the commit is repeated
    last = delivered_batch(new, run)
    assert last.references[0].group_id not in trained
    assert [r.event for r in caplog.records if r.levelno >= logging.WARNING].count("batch_named_again") == 1  # type: ignore[attr-defined]
    new.trained(last)
    new.commit(new.state_dict())
    assert next_batch(new, run) is None
    assert ledger(run)["trained"] == 8
    assert problems(run) == []


def test_other_ranks_wait_for_the_new_names(fake: Connection) -> None:
    run = pushed_run(fake, "r", 2, finish=True)
    old = TrainerQueue(fake, "r", batch_groups=2, chain="grpo", commit="each_batch")
    assert next_batch(old, run) is not None
    ranks = [
        TrainerQueue(
            fake, "r", batch_groups=2, chain="rloo", rank=rank, world_size=2, job="new", commit="each_batch"
        )
        for rank in range(2)
    ]
    ranks[0].open()
    with pytest.raises(NoBatchError):  # the old batch is computed, and not theirs
        ranks[1].next_batch(timeout=0)
    batches = [delivered_batch(queue, run) for queue in ranks]
    assert batches[0].num_tokens == batches[1].num_tokens
    assert [len(batch.references) for batch in batches] == [4, 4]
    assert sum(len(batch.delivered) for batch in batches) == 4


def test_a_rank_with_another_chain_says_so(fake: Connection) -> None:
    run = pushed_run(fake, "r", 2)
    ranks = [
        TrainerQueue(
            fake, "r", batch_groups=2, chain=chain, rank=rank, world_size=2, job="j", commit="each_batch"
        )
        for rank, chain in enumerate(("grpo", "rloo"))
    ]
    delivered_batch(ranks[0], run)
    with pytest.raises(NoBatchError, match=r"rank 1\): batch 0 is named for another chain than this rank's"):
        ranks[1].next_batch(timeout=0)


def test_the_same_chain_keeps_its_batches(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    run = pushed_run(fake, "r", 4, finish=True)
    for _ in range(2):
        queue = TrainerQueue(
            fake, "r", batch_groups=2, chain=KL, late={"ref_log_probs": supplied}, commit="each_batch"
        )
        names_batches(queue, run).close()
    assert "named again" not in caplog.text
    assert join(fake, "r").connection.scripts.hlen(run.keys.home.batches) == 2
