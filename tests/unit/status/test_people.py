"""Who is there, as status tells it: ranks of the trainer, workers, and those that are dead."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from streamadv.cli.status import lines_of
from streamadv.errors import EpochFencedError
from streamadv.run import Run
from streamadv.run.heartbeats import RANK_TIMEOUT_S, REPORT, Doing, RankReport, heard_ranks
from streamadv.run.run import delete_run
from streamadv.status import read_status
from streamadv.status.causes import reasons_of
from streamadv.status.model import Trainer
from streamadv.store.connection import Connection
from streamadv.trainer import session
from streamadv.trainer.queue import TrainerQueue
from tests.support import consumer_of, group_all, join, next_batch, producing, push_groups

pytestmark = pytest.mark.usefixtures("standing")


@pytest.fixture(autouse=True)
def _beats_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_S", 0.001)


@pytest.fixture
def run(fake: Connection) -> Run:
    """A run with four groups in its log."""
    with producing(fake, "r") as producer:
        joined = join(fake, "r")
        push_groups(producer, 4, model_version=0)
        group_all(joined)
    return joined


def said(run: Run, word: str) -> str:
    """The line of the status that begins with this word."""
    lines = lines_of(read_status(run), run.manifest)
    (line,) = [line.strip() for line in lines if line.strip().startswith(word)]
    return line


def until_heard(run: Run, state: str) -> Trainer:
    """The heartbeat is a thread: look until it has said so."""
    for _ in range(20_000):
        trainer = read_status(run).trainer
        if trainer.state == state and trainer.world_size is not None:
            return trainer
        run.connection.scripts.time()
    raise AssertionError(f"no heartbeat says {state}: {trainer}")


def attend(run: Run, rank: int, report: RankReport, fence: str = "1 1-nonce") -> None:
    run.home.call("attend", [fence, rank, REPORT.dump_json(report)])


def test_a_run_without_a_trainer_says_so(run: Run) -> None:
    assert said(run, "trainer") == "trainer: none has taken the run"
    assert "no_trainer" in [reason.name for reason in reasons_of(read_status(run))]


def test_a_trainer_is_alive_waits_trains_and_leaves(fake: Connection, run: Run) -> None:
    queue = TrainerQueue(fake, "r", batch_groups=2, prefetch=0, commit="each_batch")
    assert queue.epoch == 1
    assert until_heard(run, "waits").batch is None
    assert "trainer: alive, 1 of 1 rank, no batch yet, waits for batch 0 (" in said(run, "trainer")
    assert next_batch(queue, run) is not None
    trainer = until_heard(run, "trains")
    assert trainer.batch == 0
    assert said(run, "trainer").endswith("s ago, trains on it")
    queue.close()
    assert read_status(run).trainer.state == "left"
    assert said(run, "trainer").startswith("trainer: has left, heard of 0.")
    (reason,) = [reason for reason in reasons_of(read_status(run)) if reason.name == "no_trainer"]
    assert reason.text.endswith(" ago, 2 groups wait for a batch, 1 batch is named and not committed")


@pytest.mark.parametrize(
    ("doing", "did"), [("waits", "waited for the next one"), ("trains", "trained on it then")]
)
def test_a_trainer_that_misses_a_heartbeat_is_not_said_to_do_anything(
    run: Run, forward: Callable[[float], None], doing: Doing, did: str
) -> None:
    """It may have been killed, or have ended without `close`."""
    run.home.call("take_epoch", ["", 0, "job", "", "", "nonce", "", "", "", 1])
    attend(run, 0, RankReport(1, doing, 4, 1.0))
    forward(14)
    assert said(run, "trainer") == f"trainer: silent for 14 s, got batch 4 15 s ago, {did}"


def test_a_silent_trainer_is_dead_and_a_reason(
    fake: Connection, run: Run, forward: Callable[[float], None]
) -> None:
    run.home.call("take_epoch", ["", 0, "job", "", "", "nonce", "", "", "", 1])
    attend(run, 0, RankReport(2, "waits", None, None))
    attend(run, 1, RankReport(2, "waits", None, None))
    assert read_status(run).trainer.ranks_alive == 2
    forward(RANK_TIMEOUT_S - 1)
    attend(run, 1, RankReport(2, "waits", None, None))
    forward(2)
    trainer = read_status(run).trainer
    assert (trainer.state, trainer.world_size, trainer.ranks_alive) == ("lost", 2, 1)
    assert said(run, "trainer").startswith("trainer: DEAD, heard of 31 s ago")
    (reason,) = [reason for reason in reasons_of(read_status(run)) if reason.name == "no_trainer"]
    assert reason.text == "the trainer is silent for 31 s, 4 groups wait for a batch"


def test_a_rank_of_a_job_that_lost_the_run_is_not_heard(run: Run) -> None:
    for _ in range(2):
        run.home.call("take_epoch", ["", 0, "job", "", "", "nonce", "", "", "", 1])
    attend(run, 0, RankReport(1, "waits", None, None), fence="2 2-nonce")
    with pytest.raises(EpochFencedError):
        attend(run, 0, RankReport(9, "waits", None, None))
    assert read_status(run).trainer.world_size == 1


def test_a_deleted_run_stays_deleted(fake: Connection, run: Run) -> None:
    queue = TrainerQueue(fake, "r", batch_groups=2, commit="each_batch")
    assert queue.epoch
    until_heard(run, "waits")
    delete_run(run.connection, run.name)
    queue.close()
    assert not fake.scripts.exists(run.keys.home.session)


def test_what_others_write_among_the_heartbeats_is_not_read() -> None:
    sound = RankReport(2, "trains", 3, 1.5)
    said = f"1000 {REPORT.dump_json(sound).decode()}"
    wrong = json.dumps({"world_size": 2, "doing": "sleeps", "batch": 1, "batch_s": 1})
    negative = json.dumps({"world_size": 0, "doing": "waits", "batch": 1, "batch_s": 1})
    session = {
        **{"rank:0": said, "rank:1": "1000 {", "rank:7": said, "rank:x": said, "rank:": said, "other": said},
        **{
            "rank:2": f"x {REPORT.dump_json(sound).decode()}",
            "rank:3": f"1000 {wrong}",
            "rank:4": f"1000 {negative}",
        },
    }
    heard = heard_ranks(session, 3000)
    assert list(heard) == [0]  # rank 7 belongs to an earlier job, which had more ranks
    assert (heard[0].silent_s, heard[0].is_alive) == (2.0, True)


def test_workers_are_named_and_leave_the_list(
    fake: Connection, run: Run, forward: Callable[[float], None]
) -> None:
    staying, leaving = (consumer_of(run, name=name) for name in ("staying", "leaving"))
    for consumer in (staying, leaving):
        consumer.read(1, wait=False)
        consumer.retire()
    assert "staying: alive" in said(run, "grouper staying")
    leaving.give_back()
    assert "leaving" not in [worker.name for worker in read_status(run).streams["rollouts"].workers]
    forward(31)
    assert said(run, "grouper staying") == "grouper staying: DEAD, heard of 31 s ago"
    staying.retire()
    assert said(run, "grouper staying").startswith("grouper staying: alive, heard of 0.")
    assert said(run, "advantage worker") == "advantage worker: none"
