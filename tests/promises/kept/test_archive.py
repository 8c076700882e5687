"""The archive has every kept group once, whatever is killed; what it has can be pushed and computed again."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import redis

import streamadv as sa
from benchmarks.children import Child
from streamadv import cli
from streamadv.archive import follow
from streamadv.archive.folder import create_folder, open_folder
from streamadv.archive.follow import Archive, created_at
from streamadv.errors import Busy, SettingError, StreamadvError
from streamadv.run import dead_letters
from streamadv.run.dead_letters import list_dead
from streamadv.run.run import delete_run
from streamadv.status import read_status
from streamadv.status.causes import reasons_of
from streamadv.status.seen import kept_entries
from streamadv.store.keys import RUNS
from tests.shares import examples
from tests.support import (
    Run,
    group_all,
    housekeep,
    problems,
    producing,
    push_groups,
    trajectory,
)

from ..hostile.test_dead_letters import let_all_die
from .test_kept import kept_run, looked_at, train

pytest.importorskip("pyarrow")

from streamadv.archive.table import PARQUET, read_trajectories

Place = tuple[str, int]


@contextlib.contextmanager
def archiving(run: Run, path: Path) -> Iterator[Archive]:
    with Archive(run, create_folder(path, run.keys, created_at(run)), PARQUET) as archive:
        yield archive


def archive_all(run: Run, path: Path) -> Any:
    """What one `streamadv archive --once` does; what it counts."""
    with archiving(run, path) as archive:
        while archive.look():
            pass
        archive.finish()
        return archive.count


def archived(path: Path) -> dict[Place, sa.Trajectory]:
    """The trajectories of the files. None stands there twice."""
    found = [each for file in open_folder(path).files() for each in read_trajectories(file.path)]
    counts = Counter((each.group_id, each.rollout_index) for each in found)
    assert [place for place, count in counts.items() if count > 1] == []
    return {(each.group_id, each.rollout_index): each for each in found}


def as_json(found: dict[Place, sa.Trajectory]) -> dict[Place, Any]:
    return {place: json.loads(json.dumps(each.to_json())) for place, each in found.items()}


def push_all_kinds(producer: sa.Producer) -> None:
    """Groups to train on, with all that a trajectory can have; one to drop; one for evaluation."""
    push_groups(
        producer, 3, values=np.linspace(0, 1, 5), steps=[{"start": 2, "end": 4}], metadata={"task": 7}
    )
    rows = [{"input_ids": [1, 2], "response_mask": [0, 1], "agent": name, "reward": 0.5} for name in "ab"]
    producer.push([trajectory("rows", index, 2, rows=rows, model_version=(0, 1)) for index in range(2)])
    extra = {"data": [[1.5, 2.5]], "per_token": False}
    producer.push([trajectory("extra", index, 2, box=extra, hint=np.arange(5)) for index in range(2)])
    producer.push([trajectory("flat", index, 2, reward=0.0) for index in range(2)])
    producer.push([trajectory("eval", 0, 1, role="eval", round="step-1", rewards={"f1": 0.5})])


def test_the_files_have_what_is_kept(redis_url: str, run: str, tmp_path: Path) -> None:
    joined = kept_run(redis_url, run, shards=2, zero_variance_filter=True)
    with producing(redis_url, run) as producer:
        push_all_kinds(producer)
        with producer.group(1, group_id="page", columns={"images": np.ones((2, 3), np.uint8)}) as group:
            for rollout in group:
                rollout.push(input_ids=[1, 2], response_mask=[0, 1], reward=1.0)
        train(joined, 5)
    count = archive_all(joined, tmp_path)
    found, kept = archived(tmp_path), looked_at(joined)
    assert (count["groups"], count["trajectories"]) == (8, len(kept))
    (row,) = found.pop(("page", 0)).rows
    assert np.array_equal(row.extras["images"].data, np.ones((2, 3)))
    del kept["page", 0]
    assert as_json(found) == as_json(kept)
    assert archive_all(joined, tmp_path)["groups"] == 0
    assert problems(joined) == []


def test_an_archive_is_pushed_again(redis_url: str, run: str, tmp_path: Path, capsys: Any) -> None:
    joined = kept_run(redis_url, run, zero_variance_filter=True)
    with producing(redis_url, run) as producer:
        push_all_kinds(producer)
        train(joined, 5)
    archive_all(joined, tmp_path)
    again = kept_run(redis_url, f"{run}-again", zero_variance_filter=True)
    assert cli.main(["replay", str(tmp_path), "--redis", redis_url, "--run", again.name]) == 0
    assert "pushed 13, duplicates 0" in capsys.readouterr().out
    train(again, 5)
    before, after = as_json(looked_at(joined)), as_json(looked_at(again))
    assert before == after


def test_late_columns_are_pushed_again_as_columns(redis_url: str, run: str, tmp_path: Path) -> None:
    """A trainer that names them in `pushed` gets the same numbers; one that makes them itself has its own."""

    def values(factor: float) -> dict[str, Any]:
        return {"values": lambda micro_batch: micro_batch.input_ids.float() * factor}

    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push_groups(producer, 3)
        made = train(joined, 3, {"estimator": "gae"}, late=values(0.25))
    archive_all(joined, tmp_path)

    def again(name: str, **options: Any) -> dict[Place, list[float]]:
        other = kept_run(redis_url, f"{run}-{name}")
        assert cli.main(["replay", str(tmp_path), "--redis", redis_url, "--run", other.name]) == 0
        trained = train(other, 3, {"estimator": "gae"}, **options)
        rewound = ["rewind", "--batch", "0", "--device", "cpu", "--redis", redis_url, "--run", other.name]
        assert cli.main(rewound) == 0
        return advantages(trained)

    def advantages(trained: dict[Place, Any]) -> dict[Place, list[float]]:
        return {place: each.rows[0].advantages.tolist() for place, each in trained.items()}

    assert again("pushed", pushed=["values"]) == again("late", late=values(0.25)) == advantages(made)
    assert again("other", late=values(0.5)) != advantages(made)


@pytest.mark.parametrize("chain", ["grpo", "verl/grpo", {"estimator": "gae"}, {"estimator": "gigpo"}])
def test_a_batch_is_computed_again_without_a_server(
    redis_url: str, run: str, tmp_path: Path, capsys: Any, chain: Any
) -> None:
    joined = kept_run(redis_url, run, shards=2)
    options = {"pushed": ["values"]} if isinstance(chain, dict) and chain["estimator"] == "gae" else {}
    steps = [{"start": 2, "end": 4, "state_key": "a"}]
    with producing(redis_url, run) as producer:
        push_groups(producer, 4, values=np.linspace(0, 1, 5), steps=steps, old_log_probs=-np.ones(5))
        train(joined, 4, chain, **options)
    archive_all(joined, tmp_path)
    assert cli.main(["rewind", "--batch", "0", "--archive", str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("bit-identical\n")
    assert cli.main(["rewind", "--batch", "0", "--archive", str(tmp_path), "--chain", "rloo"]) == 0
    assert cli.main(["rewind", "--batch", "9", "--archive", str(tmp_path)]) == 1
    assert f"no group of batch 9 is kept in archive {tmp_path}" in capsys.readouterr().err


def test_a_batch_with_late_columns_is_computed_again_without_a_server(
    redis_url: str, run: str, tmp_path: Path, capsys: Any
) -> None:
    joined = kept_run(redis_url, run, shards=2)
    with producing(redis_url, run) as producer:
        push_groups(producer, 4)
        late = {"values": lambda micro_batch: micro_batch.input_ids * 0.1}
        delivered = train(joined, 4, {"estimator": "gae"}, late=late)
    archive_all(joined, tmp_path)
    assert cli.main(["rewind", "--batch", "0", "--archive", str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("4 groups, 8 rollouts\nbit-identical\n")
    for place, each in archived(tmp_path).items():
        assert np.array_equal(each.rows[0].advantages, delivered[place].rows[0].advantages)


def test_late_log_probs_above_0_can_be_looked_at(redis_url: str, run: str, tmp_path: Path) -> None:
    """A supplier may return anything for tokens that are not trained on; for others rounding may lead above 0."""

    def log_probs(micro_batch: sa.MicroBatch) -> Any:
        return micro_batch.response_mask * -4.99 + 5.0

    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push_groups(producer, 3)
        train(joined, 3, late={"old_log_probs": log_probs})
    assert archive_all(joined, tmp_path)["trajectories"] == len(looked_at(joined)) == 6
    for each in archived(tmp_path).values():
        assert each.rows[0].old_log_probs.tolist() == [0.0] * 5


def archived_run(url: str, run: str, **settings: Any) -> Run:
    """A run with the setting `archive`, whose shares say to keep nothing."""
    nothing = {"trained": 0.0, "dropped": 0.0, "eval": 0.0, "dead": 0.0}
    return kept_run(url, run, **{"keep": nothing, "archive": True, "zero_variance_filter": True, **settings})


def push_dropped(producer: sa.Producer, count: int, prefix: str = "d", tokens: int = 50) -> None:
    """Groups that the filter drops as soon as they are complete."""
    for number in range(count):
        group_id = f"{prefix}{number}"
        producer.push([trajectory(group_id, index, 2, reward=1.0, tokens=tokens) for index in range(2)])


def reasons(run: Run) -> list[str]:
    """Why nothing moves in a run that stands still."""
    return [reason.name for reason in reasons_of(replace(read_status(run), quiet_s=60.0))]


def test_a_lagging_archive_holds_up_new_groups_and_loses_none(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    joined = archived_run(redis_url, run, keep_bytes=20_000)
    with producing(redis_url, run) as producer:
        push_dropped(producer, 30)
        group_all(joined)
        housekeep(joined)
        with pytest.raises(
            Busy, match=r"bytes of ended groups are kept, keep_bytes allows 20000.*\[archive\]"
        ):
            producer.begin_group(2, timeout=0)
        assert len(looked_at(joined)) == 60
        assert "archive" in reasons(joined)
        archive_all(joined, tmp_path)
        housekeep(joined)
        assert len(archived(tmp_path)) == 60
        producer.begin_group(2, timeout=0).cancel(indices=[0, 1])
        assert "archive" not in reasons(joined)
        assert 0 < len(looked_at(joined)) < 30  # those that there is room for can still be looked at
    assert problems(joined) == []


class Killed(BaseException):
    """As if the process were gone."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["_page", "_read", "_finish_file", "_is_mark_right"])
@pytest.mark.parametrize("archive", [False, True])
def test_an_archive_that_is_killed_goes_on_where_its_files_end(
    redis_url: str,
    run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    after: bool,
    archive: bool,
) -> None:
    joined = archived_run(redis_url, run, archive=archive, keep={"dropped": 1.0})
    original: Callable[..., Any] = getattr(follow.ShardArchive, step)
    calls = 0

    def killed(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0 and not after:
            raise Killed
        result = original(self, *arguments)
        if calls % 3 == 0:
            raise Killed
        return result

    monkeypatch.setattr(follow.ShardArchive, step, killed)
    monkeypatch.setattr(follow, "PAGE", 2)
    monkeypatch.setattr(follow, "FILE_BYTES", 2000)
    with producing(redis_url, run) as producer:
        for part in range(4):
            push_dropped(producer, 3, f"part{part}-")
            group_all(joined)
            with contextlib.suppress(Killed):
                archive_all(joined, tmp_path)
            housekeep(joined)
    monkeypatch.undo()
    archive_all(joined, tmp_path)
    assert set(archived(tmp_path)) == {
        (f"part{p}-{n}", i) for p in range(4) for n in range(3) for i in range(2)
    }
    assert calls >= 3 or not archive
    assert problems(joined) == []


def test_a_server_that_has_gone_back_loses_and_doubles_nothing(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    joined = archived_run(redis_url, run)
    key, scripts = joined.home.keys, joined.connection.scripts
    with producing(redis_url, run) as producer:
        push_dropped(producer, 2, "a")
        group_all(joined)
        with archiving(joined, tmp_path) as archive:
            archive.look()
            archive.finish()
            before = scripts.hget(key.trainer, "archived")
            push_dropped(producer, 2, "b")
            group_all(joined)
            archive.look()
            archive.finish()
            *entries, (low, lost), (_, later) = scripts.xrange(key.kept)
            # A replica takes over, which lacks the last writes and whose clock is behind.
            scripts.hset(key.trainer, "archived", before)
            scripts.delete(key.kept)
            for entry, fields in [*entries, (low, {**later, b"group_id": b"c"})]:
                scripts.xadd(key.kept, fields, id=entry)
            scripts.xadd(key.kept, lost)
            while archive.look():
                pass
            archive.finish()
    assert {group_id for group_id, _ in archived(tmp_path)} == {"a0", "a1", "b0", "b1", "c"}


def test_a_lost_group_that_ends_again_much_later_is_not_doubled(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    """Its producer was paused, and the archive has finished other files meanwhile."""
    joined = archived_run(redis_url, run)
    key, scripts = joined.home.keys, joined.connection.scripts
    with producing(redis_url, run) as producer, archiving(joined, tmp_path) as archive:
        push_dropped(producer, 1, "lost")
        group_all(joined)
        archive.look()
        archive.finish()
        [(_, lost)] = scripts.xrange(key.kept)
        scripts.hdel(key.trainer, "archived")  # the server comes back without its last writes
        scripts.delete(key.kept)
        for name in "ab":
            push_dropped(producer, 1, name)
            group_all(joined)
            while archive.look():
                pass
            archive.finish()
        scripts.xadd(key.kept, lost)
        while archive.look():
            pass
        archive.finish()
    assert {group_id for group_id, _ in archived(tmp_path)} == {"lost0", "a0", "b0"}


def test_a_group_lost_before_its_file_was_whole_is_not_doubled(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    """The server has what came after it: that the last group of a file is there does not say that all are."""
    joined = archived_run(redis_url, run)
    key, scripts = joined.home.keys, joined.connection.scripts
    with producing(redis_url, run) as producer, archiving(joined, tmp_path) as archive:
        push_dropped(producer, 1, "lost")
        group_all(joined)
        archive.look()
        [(entry, lost)] = scripts.xrange(key.kept)
        scripts.xdel(key.kept, entry)  # the server comes back without it
        for name in "ab":
            push_dropped(producer, 1, name)
            group_all(joined)
            while archive.look():
                pass
            archive.finish()
        scripts.xadd(key.kept, lost)
        while archive.look():
            pass
        archive.finish()
    assert {group_id for group_id, _ in archived(tmp_path)} == {"lost0", "a0", "b0"}


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_server_keeps_before_the_mark_is_archived(
    redis_url: str, run: str, tmp_path: Path, restarts: bool
) -> None:
    """The mark was moved when the server had lost the entries up to it, and its clock is behind."""
    joined = archived_run(redis_url, run)
    key, scripts = joined.home.keys, joined.connection.scripts
    with producing(redis_url, run) as producer:
        push_dropped(producer, 2, "a")
        push_dropped(producer, 2, "b")
        group_all(joined)
    with archiving(joined, tmp_path) as archive:
        archive.look()
        archive.finish()
        *entries, (_, lost) = scripts.xrange(key.kept)
        scripts.delete(key.kept)
        for entry, fields in [*entries[:2], (entries[2][0], {**lost, b"group_id": b"c"})]:
            scripts.xadd(key.kept, fields, id=entry)
        if not restarts:
            while archive.look():
                pass
            archive.finish()
    if restarts:
        archive_all(joined, tmp_path)
    assert {group_id for group_id, _ in archived(tmp_path)} == {"a0", "a1", "b0", "b1", "c"}
    assert scripts.hget(key.trainer, "archived") == entries[2][0]


def test_one_archive_writes(redis_url: str, run: str, tmp_path: Path) -> None:
    joined = archived_run(redis_url, run)
    with producing(redis_url, run) as producer, archiving(joined, tmp_path / "one") as one:
        with pytest.raises(SettingError, match="another process writes this archive"):
            archive_all(joined, tmp_path / "one")
        one.look()
        push_dropped(producer, 2)
        group_all(joined)
        archive_all(joined, tmp_path / "two")
        with pytest.raises(StreamadvError, match="another `streamadv archive` has taken its groups"):
            one.look()
    other = kept_run(redis_url, f"{run}-other")
    with pytest.raises(SettingError, match=f"has the archive of run {run}, 1 shards, not of run {run}-other"):
        create_folder(tmp_path / "one", other.keys)
    with pytest.raises(SettingError, match="no archive is there"):
        open_folder(tmp_path)


@pytest.mark.parametrize("archive", [False, True])
def test_a_run_that_is_made_anew_has_another_folder(
    redis_url: str, run: str, tmp_path: Path, archive: bool
) -> None:
    """Its groups may have the ids of those before, as those of prompts do."""
    joined = archived_run(redis_url, run, archive=archive, keep={"dropped": 1.0})

    joined.connection.scripts.hset(RUNS, run, 1000)  # it was created long ago

    def push() -> None:
        with producing(redis_url, run) as producer:
            push_dropped(producer, 2)
            group_all(joined)

    with archiving(joined, tmp_path / "before") as archiver:
        push()
        archiver.look()
        archiver.finish()
        delete_run(joined.connection, joined.name)
        joined = archived_run(redis_url, run, archive=archive, keep={"dropped": 1.0})
        push()
        with pytest.raises(SettingError, match=f"archive of run {run} as it was before"):
            archiver.look()
    with pytest.raises(SettingError, match=f"archive of run {run} as it was before"):
        archive_all(joined, tmp_path / "before")
    assert archive_all(joined, tmp_path / "after")["groups"] == 2


def test_what_cannot_be_read_has_a_line_that_says_why(redis_url: str, run: str, tmp_path: Path) -> None:
    joined = archived_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push_dropped(producer, 1)
        group_all(joined)
    (entry,) = joined.connection.scripts.xrange(joined.home.keys.kept)
    key = entry[1][b"payloads"].split()[0]
    joined.connection.scripts.delete(key)
    archive_all(joined, tmp_path)
    import pyarrow.parquet as pq

    (file,) = open_folder(tmp_path).files()
    table = pq.read_table(file.path).to_pylist()
    assert [(line["group_id"], line["rollout_index"], line["problem"]) for line in table] == [
        ("d0", index, "payload is gone, or is no hash") for index in range(2)
    ]
    assert archived(tmp_path) == {}


def test_an_observer_may_archive_what_is_kept(redis_url: str, run: str, tmp_path: Path, capsys: Any) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        train(joined, 2)
    where = ["--redis", redis_url, "--run", run]
    assert cli.main(["archive", "--to", str(tmp_path), "--once", *where]) == 0
    assert capsys.readouterr().out == "archived 2 groups, 4 rollouts in 1 file\n"


def test_above_maxmemory_the_archive_misses_nothing(
    redis_url: str, run: str, tmp_path: Path, limited: redis.Redis
) -> None:
    joined = archived_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        train(joined, 2)
        push_groups(producer, 2, prefix="later")
        limited.config_set("maxmemory", 1_000_000)
        train(joined, 2)
        housekeep(joined)
        assert len(looked_at(joined)) == 8
        archive_all(joined, tmp_path)
        housekeep(joined)
        assert looked_at(joined) == {}
        limited.config_set("maxmemory", 0)
    assert len(archived(tmp_path)) == 8
    assert problems(joined) == []


@pytest.mark.slow
@pytest.mark.processes
def test_kill_9_neither_loses_nor_doubles_a_rollout(redis_url: str, run: str, tmp_path: Path) -> None:
    joined = archived_run(redis_url, run, keep_bytes=100_000)
    folder, killed, pushed = tmp_path / "archive", 0, 0
    words = ["-m", "streamadv", "archive", "--to", str(folder), "--redis", redis_url, "--run", run]
    environment = dict(os.environ)
    archiver = Child("archiver", words, environment=environment, log=tmp_path / "log", inbox=SimpleQueue())
    moments = random.Random(0)
    with producing(redis_url, run) as producer:
        archiver.start()
        while killed < examples(8):
            before = joined.connection.scripts.hget(joined.home.keys.trainer, "archived")
            wanted = moments.randint(1, 40)
            for _ in range(wanted):
                with contextlib.suppress(Busy):
                    push_dropped(producer, 1, f"g{pushed}-", tokens=200)
                    pushed += 1
                group_all(joined)
            housekeep(joined)
            if joined.connection.scripts.hget(joined.home.keys.trainer, "archived") != before:
                archiver.kill()  # wherever it is
                killed += 1
                archiver.start()
        archiver.kill()
    archive_all(joined, folder)
    assert len(archived(folder)) == 2 * pushed
    assert problems(joined) == []


def test_letters_beyond_the_most_are_archived(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the setting archive every group is kept until a file has it."""
    monkeypatch.setattr(dead_letters, "DEAD_KEPT", 2)
    joined = archived_run(redis_url, run, archive=True, zero_variance_filter=False)
    with producing(redis_url, run) as producer:
        push_groups(producer, 5)
        producer.finish()
    let_all_die(joined)
    assert len(list(list_dead(joined))) == 5
    dead_letters.trim_dead(joined.home, joined.manifest.dead_bytes)
    listed = {dead.group_id for dead in list_dead(joined)}
    kept = {entry.fields[b"group_id"].decode() for entry in kept_entries(joined.home)}
    assert len(listed | kept) == 5
