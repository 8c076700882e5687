"""A checkpoint is there whole or not at all, and says what was trained, whatever kills the trainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from streamadv.errors import BatchLostError, CheckpointError, EpochFencedError, SettingError
from streamadv.run import Run
from streamadv.status.evaluations import read_evaluations
from streamadv.store.connection import Connection
from streamadv.trainer import together
from streamadv.trainer.queue import TrainerQueue
from streamadv.trainer.session import Sessions
from tests.support import (
    delivered_batch,
    group_all,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    pushed_run,
    trajectory,
    working,
)

STATE = "streamadv.json"


def queue_of(fake: Connection | str, run: str = "r", **options: Any) -> TrainerQueue:
    return TrainerQueue(fake, run, **{"batch_groups": 1, "prefetch": 0, "max_staleness": None, **options})


def train(queue: TrainerQueue, run: Run, batches: int = 1) -> list[str]:
    """Train on so many batches; their groups."""
    groups = []
    for _ in range(batches):
        batch = delivered_batch(queue, run)
        groups += sorted({reference.group_id for reference in batch.references})
        queue.trained(batch)
    return groups


def save(queue: TrainerQueue, folder: Path, text: str = "weights", **options: Any) -> Path:
    with queue.checkpoint(folder, **options) as path:
        assert list(path.iterdir()) == []
        (path / "weights").write_text(text)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_commits_what_it_holds_and_the_next_trainer_goes_on_from_it(
    fake: Connection, tmp_path: Path
) -> None:
    run, folder = pushed_run(fake, "r", 5), tmp_path / "made" / "by it"
    queue = queue_of(fake)
    assert queue.resume(folder) is None
    train(queue, run, 2)
    assert ledger(run)["trained"] == 0, "by default nothing is trained before a checkpoint has it"
    save(queue, folder, "two")
    assert ledger(run)["trained"] == 4
    lost = train(queue, run, 2)
    again = queue_of(fake)
    assert again.resume(str(folder)) == folder / "2"
    assert (folder / "2" / "weights").read_text() == "two"
    assert train(again, run, 2) == lost
    save(again, folder)
    assert problems(run) == []


def test_the_newest_stay(fake: Connection, tmp_path: Path) -> None:
    run, queue = pushed_run(fake, "r", 10), queue_of(fake)
    found = []
    for keep in (5, 5, 5, 5, 5, 5, 2, 3, 1):
        train(queue, run)
        save(queue, tmp_path, keep=keep)
        found.append("".join(names(tmp_path)))
    assert found == ["1", "12", "123", "1234", "12345", "23456", "67", "678", "9"]


def test_an_old_checkpoint_that_cannot_be_removed_keeps_no_new_one_from_being_saved(
    fake: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "another disk"
    run, queue = pushed_run(fake, "r", 8), queue_of(fake)
    train(queue, run)
    save(queue, folder, keep=1)
    (folder / "1").rename(elsewhere)
    (folder / "1").symlink_to(elsewhere)
    train(queue, run)
    save(queue, folder, keep=1)
    assert names(folder) == ["2"]
    assert elsewhere.is_dir(), "only the link is removed"

    def busy(path: Path, **_: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    for version in ("3", "4"):
        train(queue, run)
        save(queue, folder, keep=1)
        assert [name for name in names(folder) if not name.startswith(".")] == [version]
    assert "an old checkpoint cannot be removed: [Errno 16] Device or resource busy" in caplog.text
    assert ledger(run)["trained"] == 8


def test_what_is_no_checkpoint_is_left_alone_and_does_not_count(fake: Connection, tmp_path: Path) -> None:
    """Names that are no numbers, and folders without the state of a queue."""
    for name in ("best", "0003", "1", "-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").touch()
    (tmp_path / "best" / STATE).write_text("{}")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "7").touch()
    run, queue = pushed_run(fake, "r", 5), queue_of(fake)
    assert queue.resume(tmp_path) is None
    there = names(tmp_path)
    for _ in range(2):
        train(queue, run, 2)
        save(queue, tmp_path, keep=1)
    assert names(tmp_path) == sorted([*there, "4"])
    train(queue, run, 1)
    (tmp_path / "5").mkdir()
    with pytest.raises(SettingError, match="5 is there and is no checkpoint: give another folder"):
        save(queue, tmp_path)


def test_the_same_version_twice_is_the_second_one(fake: Connection, tmp_path: Path) -> None:
    run, queue = pushed_run(fake, "r", 3), queue_of(fake)
    train(queue, run)
    save(queue, tmp_path, "first")
    save(queue, tmp_path, "second")
    assert names(tmp_path) == ["1"]
    assert (tmp_path / "1" / "weights").read_text() == "second"


@pytest.mark.parametrize("raised", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_leaves_nothing_and_commits_nothing(
    fake: Connection, tmp_path: Path, raised: BaseException
) -> None:
    run, queue = pushed_run(fake, "r", 3), queue_of(fake)
    train(queue, run)

    def fail() -> None:
        with queue.checkpoint(tmp_path) as path:
            (path / "weights").touch()
            raise raised

    with pytest.raises(type(raised)):
        fail()
    assert names(tmp_path) == []
    assert ledger(run)["trained"] == 0
    save(queue, tmp_path)
    assert ledger(run)["trained"] == 2


def test_a_crash_before_the_commit_is_repaired_by_resume(
    fake: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queue = pushed_run(fake, "r", 3), queue_of(fake)
    train(queue, run)
    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(queue, tmp_path)
    assert ledger(run)["trained"] == 0
    assert queue_of(fake).resume(tmp_path) == tmp_path / "1"
    assert ledger(run)["trained"] == 2


def test_a_disk_that_refuses_is_told_in_one_line(fake: Connection, tmp_path: Path, monkeypatch: Any) -> None:
    run, queue = pushed_run(fake, "r", 3), queue_of(fake)
    train(queue, run)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(queue, tmp_path / "file" / "folder")

    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device: see to its disk"):
            save(queue, tmp_path)
    assert names(tmp_path) == ["file"]
    assert ledger(run)["trained"] == 0


def test_everything_is_on_the_disk_before_the_rename(
    fake: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queue = pushed_run(fake, "r", 3), queue_of(fake)
    train(queue, run)
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(number: int) -> None:
        events.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"-> {Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    with queue.checkpoint(tmp_path) as path:
        (path / "part").mkdir()
        (path / "part" / "weights").touch()
    done = events.index("-> 1")
    assert {"weights", "part", path.name} < set(events[:done])
    assert any(STATE in event for event in events[:done])
    assert events[done + 1 :] == [tmp_path.name]


def test_a_checkpoint_that_is_saved_until_the_run_is_taken_is_resumed_from(
    fake: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, old = pushed_run(fake, "r", 3), queue_of(fake)
    train(old, run)
    save(old, tmp_path)
    train(old, run)
    new, current = queue_of(fake), Sessions.current

    def take(sessions: Sessions) -> Any:
        if sessions is new._sessions and not (tmp_path / "2").exists():
            save(old, tmp_path)
        return current(sessions)

    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "current", take)
        assert new.resume(tmp_path) == tmp_path / "2"
    assert train(new, run) == ["g0002"]


def test_a_trainer_that_was_replaced_meanwhile_saves_nothing(fake: Connection, tmp_path: Path) -> None:
    run, old = pushed_run(fake, "r", 3), queue_of(fake)
    train(old, run)
    with pytest.raises(EpochFencedError), old.checkpoint(tmp_path):
        assert queue_of(fake).resume(tmp_path) is None
    assert names(tmp_path) == []


def test_a_trainer_that_was_replaced_does_not_touch_what_its_successor_saves(
    fake: Connection, tmp_path: Path
) -> None:
    """It was writing the same version when the other one began."""
    run, old, new = pushed_run(fake, "r", 3), queue_of(fake), queue_of(fake)
    train(old, run)
    before = old.checkpoint(tmp_path)
    path = before.__enter__()
    assert new.resume(tmp_path) is None
    train(new, run)
    with new.checkpoint(tmp_path) as successors:
        assert path != successors, "what the old one still writes is not in it"
        (successors / "weights").write_text("new")
        with pytest.raises(EpochFencedError):
            before.__exit__(None, None, None)
    assert (tmp_path / "1" / "weights").read_text() == "new"
    assert names(tmp_path) == ["1"]


def test_a_folder_that_goes_while_it_is_written_is_no_checkpoint(fake: Connection, tmp_path: Path) -> None:
    run, queue = pushed_run(fake, "r", 3), queue_of(fake)
    train(queue, run)
    with (
        pytest.raises(CheckpointError, match="No such file or directory"),
        queue.checkpoint(tmp_path) as path,
    ):
        shutil.rmtree(path)
    assert names(tmp_path) == []
    assert ledger(run)["trained"] == 0


def test_a_queue_saves_one_checkpoint_at_a_time(fake: Connection, tmp_path: Path) -> None:
    run, queue = pushed_run(fake, "r", 3), queue_of(fake)
    train(queue, run)
    with queue.checkpoint(tmp_path) as path:
        (path / "weights").write_text("first")
        with pytest.raises(SettingError, match="a checkpoint is being saved: leave its block"):
            save(queue, tmp_path)
    assert (tmp_path / "1" / "weights").read_text() == "first"
    save(queue, tmp_path, "second")
    assert (tmp_path / "1" / "weights").read_text() == "second"


def test_a_folder_of_another_run_or_with_a_later_version_is_refused(fake: Connection, tmp_path: Path) -> None:
    run, queue = pushed_run(fake, "r", 4), queue_of(fake)
    train(queue, run, 2)
    save(queue, tmp_path)
    other = pushed_run(fake, "other", 2)
    stranger = queue_of(fake, "other")
    with pytest.raises(SettingError, match="state is of run 'r', this queue reads 'other'"):
        stranger.resume(tmp_path)
    train(stranger, other)
    with pytest.raises(
        SettingError, match="holds checkpoints of run 'r': give run 'other' a folder of its own"
    ):
        save(stranger, tmp_path)
    state = json.loads((tmp_path / "2" / STATE).read_text())
    queue.load_state_dict({**state, "version": 1})
    with pytest.raises(
        SettingError, match=r"holds checkpoint 2, and .* at version 1: go on from it by queue.resume"
    ):
        save(queue, tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "its streamadv.json cannot be read"),
        ("[]", "its streamadv.json cannot be read .it holds no state"),
        ("{}", "state has no 'groups'"),
        (
            '{"run": "r", "version": 2, "groups": [], "format": 9}',
            "state has format 9, this release reads up to 1",
        ),
        ('{"run": "r", "version": "2", "groups": []}', "version of the state is '2'"),
        ('{"run": "r", "version": 2, "groups": [1]}', "groups of the state are no list of ids"),
    ],
)
def test_a_state_that_cannot_be_used_is_told_in_one_line(
    fake: Connection, tmp_path: Path, text: str, problem: str
) -> None:
    """A newer checkpoint that is broken is never passed over for an older one: that would lose what was committed."""
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / STATE).write_text(text)
    run, living = pushed_run(fake, "r", 2), queue_of(fake)
    train(living, run)
    with pytest.raises(SettingError, match=problem) as caught:
        queue_of(fake).resume(tmp_path)
    assert "\n" not in str(caught.value)
    train(living, run)


def test_a_used_run_without_its_checkpoints_is_refused_and_stays_with_its_trainer(
    fake: Connection, tmp_path: Path
) -> None:
    run, queue = pushed_run(fake, "r", 4), queue_of(fake)
    train(queue, run)
    save(queue, tmp_path / "checkpoints")
    with pytest.raises(
        SettingError, match=r"run r was trained to version 1 .* `streamadv runs delete --run r`"
    ):
        queue_of(fake).resume(tmp_path / "other")
    train(queue, run)
    save(queue, tmp_path / "checkpoints")


def test_evaluations_of_a_checkpoint_stay_where_a_crash_has_kept_its_commit(
    fake: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queue = pushed_run(fake, "r", 4), queue_of(fake)
    train(queue, run)
    save(queue, tmp_path)
    train(queue, run, 2)
    with producing(fake, "r") as producer:
        producer.push([trajectory("asked", role="eval", group_size=1, model_version=3)])
    group_all(run)
    monkeypatch.setattr(queue, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(queue, tmp_path)
    again = queue_of(fake)
    assert again.resume(tmp_path) == tmp_path / "3"
    assert [each.version for each in read_evaluations(run)] == [3]


def test_batches_that_no_checkpoint_has_come_again_from_version_0(fake: Connection, tmp_path: Path) -> None:
    run = pushed_run(fake, "r", 3)
    first = train(queue_of(fake), run, 2)
    again = queue_of(fake)
    assert again.resume(tmp_path) is None
    assert train(again, run, 2) == first
    assert again.state_dict()["version"] == 2


def test_a_batch_in_hand_is_told_not_to_be_in_the_checkpoint(
    fake: Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, queue = pushed_run(fake, "r", 2), queue_of(fake)
    batch = delivered_batch(queue, run)
    save(queue, tmp_path)
    assert "checkpoint 0 does not count batch 0 as trained" in caplog.text
    caplog.clear()
    queue.trained(batch)
    save(queue, tmp_path)
    assert caplog.text == ""


def test_a_queue_that_is_closed_tells_of_batches_in_no_checkpoint(
    fake: Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = pushed_run(fake, "r", 2)
    queue = queue_of(fake)
    train(queue, run)
    queue.close()
    assert "run r: 1 batches are trained and in no checkpoint, and the queue is closed" in caplog.text
    assert vars(caplog.records[-1])["event"] == "closed_uncommitted"
    caplog.clear()
    queue = queue_of(fake)
    train(queue, run)
    save(queue, tmp_path)
    queue.close()
    assert caplog.text == ""


# Several ranks


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process group's store, for ranks that are threads here."""
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=120))
    monkeypatch.setattr(together, "_store", lambda _world_size: made)
    monkeypatch.setattr(together, "LOOK_S", 0.005)
    return made


def ranks_of(fake: Connection, job: str = "j", **options: Any) -> list[TrainerQueue]:
    return [queue_of(fake, rank=rank, world_size=2, job=job, batch_groups=2, **options) for rank in range(2)]


def on_all(ranks: list[TrainerQueue], call: Callable[[TrainerQueue], Any]) -> list[Any]:
    """What the call returns or raises on each rank, all at once."""
    results: list[Any] = [None] * len(ranks)

    def body(rank: int) -> None:
        try:
            results[rank] = call(ranks[rank])
        except BaseException as error:
            results[rank] = error

    running = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(240)
        assert not thread.is_alive()
    return results


def write_part(queue: TrainerQueue, folder: Path, raises: int | None = None) -> Path:
    """Every rank writes its part; one of them may raise, before or after the other one has left the block."""
    with queue.checkpoint(folder) as path:
        (path / f"part-{queue.rank}").write_text("part")
        if queue.rank == raises:
            while not (path / f"part-{1 - raises}").exists():
                time.sleep(0.001)
            raise ValueError("out of memory")
    return path


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("store")
def test_ranks_write_into_one_folder_and_resume_from_what_rank_0_finds(
    fake: Connection, tmp_path: Path
) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    assert on_all(ranks, lambda queue: queue.resume(tmp_path)) == [None, None]
    for _ in range(3):
        for queue in ranks:
            train(queue, run)
        on_all(ranks, lambda queue: write_part(queue, tmp_path))
    assert names(tmp_path) == ["2", "3"]
    assert names(tmp_path / "3") == ["part-0", "part-1", STATE]
    assert ledger(run)["trained"] == 12
    again = ranks_of(fake, "k")
    assert on_all(again, lambda queue: queue.resume(tmp_path)) == [tmp_path / "3"] * 2
    assert [queue.state_dict()["version"] for queue in again] == [3, 3]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_keeps_all_from_the_checkpoint_and_nobody_hangs(
    fake: Connection, tmp_path: Path, rank: int
) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    for queue in ranks:
        train(queue, run)
    raised = on_all(ranks, lambda queue: write_part(queue, tmp_path, rank))
    assert str(raised[rank]) == "out of memory"
    assert isinstance(raised[1 - rank], CheckpointError)
    assert str(raised[1 - rank]) == f"rank {rank}: ValueError: out of memory"
    assert names(tmp_path) == []
    assert ledger(run)["trained"] == 0
    on_all(ranks, lambda queue: write_part(queue, tmp_path))
    assert names(tmp_path) == ["1"]


def test_a_rank_that_does_not_come_is_named(fake: Connection, tmp_path: Path, store: Any) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    store.set_timeout(timedelta(seconds=0))
    train(ranks[0], run)
    with pytest.raises(
        CheckpointError, match="rank 1 has not come within 0 s, the timeout of the process group"
    ):
        save(ranks[0], tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("rank", "call"), [(0, "check"), (1, "set"), (1, "check")])
def test_a_store_that_has_gone_is_told_in_one_line(
    fake: Connection, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch, rank: int, call: str
) -> None:
    """It ends with rank 0's process."""

    class Gone(dist.HashStore):  # type: ignore[misc]
        pass

    def raises(*_: Any) -> None:
        raise dist.DistNetworkError("Broken pipe")

    gone = Gone()
    monkeypatch.setattr(Gone, call, raises)
    monkeypatch.setattr(together, "_store", lambda _world_size: gone)
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    for queue in ranks:
        train(queue, run)
    with pytest.raises(CheckpointError, match=r"Broken pipe.*rank 0, has ended: start the job again"):
        save(ranks[rank], tmp_path)
    assert names(tmp_path) == []


@pytest.mark.usefixtures("store")
def test_ranks_at_different_versions_are_refused(fake: Connection, tmp_path: Path) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    for queue in ranks:
        train(queue, run)
    train(ranks[0], run)
    raised = on_all(ranks, lambda queue: write_part(queue, tmp_path))
    assert all("ranks are at versions 2, 1: call checkpoint on each after the same" in str(e) for e in raised)
    assert names(tmp_path) == []


@pytest.mark.usefixtures("store")
def test_a_refusal_reaches_every_rank(fake: Connection, tmp_path: Path) -> None:
    run, ranks = pushed_run(fake, "r", 4), ranks_of(fake)
    for queue in ranks:
        train(queue, run)
    on_all(ranks, lambda queue: write_part(queue, tmp_path / "here"))
    refused = on_all(ranks_of(fake, "k"), lambda queue: queue.resume(tmp_path / "elsewhere"))
    assert isinstance(refused[0], SettingError)
    assert isinstance(refused[1], CheckpointError)
    assert str(refused[0]) in str(refused[1])


@pytest.mark.usefixtures("store")
def test_a_rank_that_cannot_read_the_checkpoint_keeps_the_run_with_its_trainer(
    fake: Connection, tmp_path: Path
) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    for queue in ranks:
        train(queue, run)
    on_all(ranks, lambda queue: write_part(queue, tmp_path / "0"))
    refused = on_all(ranks_of(fake, "k"), lambda queue: queue.resume(tmp_path / str(queue.rank)))
    assert isinstance(refused[0], CheckpointError)
    assert isinstance(refused[1], SettingError)
    assert str(refused[1]) in str(refused[0])
    for queue in ranks:
        train(queue, run)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_meet_again_after_one_was_interrupted_while_it_waited(
    fake: Connection, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    for queue in ranks:
        train(queue, run)
    is_interrupted = threading.Event()

    def strike(_seconds: float) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    def save_late(queue: TrainerQueue) -> None:
        with queue.checkpoint(tmp_path):
            assert queue.rank == rank or is_interrupted.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(ranks[rank]._together, "_pause", strike)
        raised = on_all(ranks, save_late)
    assert isinstance(raised[rank], KeyboardInterrupt)
    assert f"rank {rank}: KeyboardInterrupt" in str(raised[1 - rank])
    assert names(tmp_path) == []
    assert len(set(on_all(ranks, lambda queue: write_part(queue, tmp_path)))) == 1
    assert names(tmp_path) == ["1"]
    keys = store.num_keys()
    for _ in range(3):
        on_all(ranks, lambda queue: write_part(queue, tmp_path))
    assert store.num_keys() <= keys


@pytest.mark.usefixtures("store")
def test_a_rank_whose_batch_was_named_again_keeps_it_out_of_the_checkpoint(
    fake: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    for queue in ranks:
        train(queue, run)
    checked = Sessions.at_hand

    def look(marks: Sessions) -> Any:
        if marks.rank.number:
            raise BatchLostError("batch 0 is named again")
        return checked(marks)

    monkeypatch.setattr(Sessions, "at_hand", look)
    raised = on_all(ranks, lambda queue: write_part(queue, tmp_path))
    assert isinstance(raised[1], BatchLostError)
    assert "rank 1: BatchLostError" in str(raised[0])
    assert names(tmp_path) == []


def test_several_ranks_without_a_process_group_are_told_what_to_call(
    fake: Connection, tmp_path: Path
) -> None:
    run, ranks = pushed_run(fake, "r", 8), ranks_of(fake)
    train(ranks[0], run)
    for call in (lambda: save(ranks[0], tmp_path), lambda: ranks[0].resume(tmp_path)):
        with pytest.raises(
            SettingError, match=r"world_size is 2 .* save state_dict\(\) and call commit yourself"
        ):
            call()


# Killed at every step

LIVES = textwrap.dedent(
    """
    import json, os, signal, sys
    from pathlib import Path
    from streamadv.trainer.queue import TrainerQueue

    url, run, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    doomed = [0]  # events of the folder that are left to this life; 0 = all

    def note(event, arguments):
        if doomed[0] and event != "os.scandir" and any(str(folder) in str(each) for each in arguments[:2]):
            doomed[0] -= 1
            if not doomed[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)

    def live(events, batches):
        queue = TrainerQueue(url, run, batch_groups=1, prefetch=0, max_staleness=None)
        weights = []
        doomed[0] = events

        def save():
            with queue.checkpoint(folder, keep=1) as path:
                (path / "weights").write_text(json.dumps(weights))

        path = queue.resume(folder)
        weights += json.loads((path / "weights").read_text()) if path else []
        for _ in range(batches):
            batch = queue.next_batch()
            if batch is None:
                break
            weights += [reference.group_id for reference in batch.references]
            queue.trained(batch)
            save()
        save()
        doomed[0] = 0
        queue.close()
        os._exit(0)

    def child(events, batches):
        pid = os.fork()
        if not pid:
            live(events, batches)
        return os.waitpid(pid, 0)[1]

    events = 1
    while child(events, 1):
        events += 1
    print(events, flush=True)
    assert child(0, 1000) == 0
    """
)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.processes
def test_a_trainer_killed_at_any_step_of_a_checkpoint_trains_every_group_once(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    """Every life is killed one event on its folder later than the one before, until one is not killed."""
    folder = tmp_path / "checkpoints"
    with producing(redis_url, run) as producer:
        groups = push_groups(producer, 120, 1)
        producer.finish()
    joined = join(redis_url, run)
    with working(joined):
        done = subprocess.run(
            [sys.executable, "-c", LIVES, redis_url, run, str(folder)], stdout=subprocess.PIPE, check=True
        )
    assert int(done.stdout) > 40, "it has met the steps"
    (whole,) = names(folder)
    assert sorted(json.loads((folder / whole / "weights").read_text())) == groups
    assert ledger(joined)["trained"] == len(groups)
    assert problems(joined) == []


def test_nothing_is_left_to_resume_when_a_run_ends(fake: Connection, tmp_path: Path) -> None:
    run, queue = pushed_run(fake, "r", 1, finish=True), queue_of(fake)
    train(queue, run)
    assert next_batch(queue, run) is None
    save(queue, tmp_path)
    assert ledger(run)["in_flight"] == 0
