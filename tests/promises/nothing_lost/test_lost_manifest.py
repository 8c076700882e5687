"""A server that loses the manifest gets back all of it from whoever knows it; whoever knows another one stops.

Also what is given later than others started: it is in force for all of them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from streamadv.advantage.worker import run_worker
from streamadv.cli import main
from streamadv.errors import ManifestMismatchError
from streamadv.grouping.grouper import run_grouper
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer, logic
from streamadv.run import Run, open_run
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.keys import EntryKeys
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.packet import SCHEMA_VERSION
from tests.clusters import until
from tests.support import group_all, join, ledger, problems, producing, push_groups, trajectory, unscored

GIVEN: dict[str, Any] = {
    "shards": 2,
    "scorers": ("judge",),
    "dead_bytes": 12345,
    "zero_variance_filter": True,
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logic, "HEARTBEAT_S", 0.2)


def flushed(server: EmbeddedServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()


def restarted(server: EmbeddedServer) -> None:
    server.kill()
    server.start()


def settings_of(url: str, run: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["runs", "show", "--json", "--redis", url, "--run", run]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {name: shown["settings"][name] for name in shown["given"]}


class Roles:
    """Every role of a run, none of which was given a setting."""

    def __init__(self, url: str, run: str) -> None:
        self.url, self.run = url, run
        self.trained: set[str] = set()
        self.ended: dict[str, BaseException | None] = {}

    @contextmanager
    def going(self) -> Iterator[None]:
        stop = threading.Event()
        roles: dict[str, Callable[[threading.Event], object]] = {
            "grouper": lambda stop: run_grouper(self.join(), stop),
            "worker": lambda stop: run_worker(self.join(), stop, device="cpu", lease_s=0.5),
            "scorer": self._score,
            "trainer": self._train,
        }
        threads = [
            threading.Thread(target=self._play, args=(name, role, stop)) for name, role in roles.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)
        assert not any(thread.is_alive() for thread in threads)

    def join(self) -> Run:
        return open_run(Connection(self.url), self.run)

    def _play(self, name: str, role: Callable[[threading.Event], object], stop: threading.Event) -> None:
        error: BaseException | None = None
        try:
            role(stop)
        except BaseException as caught:
            error = caught
        self.ended[name] = error

    def _score(self, stop: threading.Event) -> None:
        judge = Scorer(self.url, self.run, "judge", lease_s=0.5)
        judge.run(lambda trajectories: [float(t.rollout_index) for t in trajectories], stop)

    def _train(self, stop: threading.Event) -> None:
        queue = TrainerQueue(
            self.url,
            self.run,
            batch_groups=4,
            max_staleness=None,
            chain={"estimator": "reinforce"},
            commit="each_batch",
        )
        for batch in queue:
            self.trained |= {reference.group_id for reference in batch.references}
            if stop.is_set():
                return


@pytest.mark.parametrize("loss", [flushed, restarted])
@pytest.mark.parametrize("creator", ["producer", "runs create"])
@pytest.mark.server
@pytest.mark.slow
def test_a_lost_manifest_is_written_back_whole(
    forgetful: EmbeddedServer,
    run: str,
    loss: Callable[[EmbeddedServer], None],
    creator: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = forgetful.url
    if creator == "runs create":
        words = ["--shards", "2", "--scorers", "judge", "--dead-bytes", "12345", "--zero-variance-filter"]
        assert main(["runs", "create", "--redis", url, "--run", run, *words]) == 0
    given = RunSettings(**GIVEN) if creator == "producer" else None
    roles = Roles(url, run)
    with Producer(url, run, settings=given) as pushing:
        before = settings_of(url, run, capsys)
        assert before == json.loads(json.dumps(GIVEN))
        with roles.going():
            push_groups(pushing, 8, prefix="early")
            until(lambda: len(roles.trained) == 8, "all are trained on")
            until(lambda: ledger(join(url, run))["trained"] == 16, "all are committed")
            loss(forgetful)
            for number in range(12):
                make = unscored if number % 2 else trajectory
                pushing.push([make(f"late{number}", index, 2) for index in range(2)])
            pushing.finish()
            until(lambda: roles.ended or len(roles.trained) >= 20, "they are trained on")
            assert settings_of(url, run, capsys) == before
            until(lambda: "trainer" in roles.ended, "the run ends")
    assert not any(roles.ended.values()), roles.ended
    assert {f"late{number}" for number in range(12)} <= roles.trained
    assert main(["runs", "list", "--redis", url]) == 0
    assert run in capsys.readouterr().out
    assert main(["status", "--check", "--redis", url, "--run", run]) == 0


def test_whoever_knows_another_number_of_shards_stops(redis_url: str, run: str) -> None:
    """A process that did not know the run was first after the loss: nothing goes where nobody reads."""
    roles = Roles(redis_url, run)
    client = redis.Redis.from_url(redis_url)
    with producing(redis_url, run, GIVEN) as pushing, roles.going():
        push_groups(pushing, 4, prefix="early")
        until(lambda: len(roles.trained) == 4, "all are trained on")
        with client.pipeline(transaction=True) as pipe:
            pipe.flushall()
            pipe.hset(
                EntryKeys(run).manifest, mapping={"schema_version": str(SCHEMA_VERSION), "salts": "[0]"}
            )
            pipe.execute()
        for number in range(8):  # on either shard
            with pytest.raises(ManifestMismatchError) as told:
                push_groups(pushing, 1, prefix=f"late{number}-")
        for part in ("shards is 2", "has 1", "stop all processes"):
            assert part in str(told.value)
        until(lambda: len(roles.ended) == 4, "all roles have ended")
        with pytest.raises(ManifestMismatchError):
            pushing.finish()
    for name, error in roles.ended.items():
        assert isinstance(error, ManifestMismatchError), (name, error)
        assert "\n" not in str(error)
    assert [key for key in client.keys("*") if b"payload" in key or b"rollouts" in key] == []


@pytest.mark.parametrize("name", sorted(RunSettings.model_fields))
def test_whoever_knows_another_value_stops(redis_url: str, run: str, name: str) -> None:
    values: dict[str, tuple[Any, str]] = {
        "shards": (2, "1"),
        "group_deadline_s": (60.0, "61.0"),
        "redundancy": (1, "2"),
        "partial_min_usable": (3, "4"),
        "zero_variance_filter": (True, "false"),
        "difficulty_low": (0.1, "0.2"),
        "difficulty_high": (0.9, "0.8"),
        "filter_by": ("correct", '"style"'),
        "scorers": (("a",), '["b"]'),
        "max_trajectory_bytes": (1 << 20, "2097152"),
        "max_bytes": (1 << 30, "2147483648"),
        "dedupe_groups": (10, "20"),
        "dead_bytes": (5, "6"),
        "keep_bytes": (5, "6"),
        "keep": ({"trained": 0.5}, '{"trained": 0.1}'),
        "tokenizer": ("a", '"b"'),
        "archive": (True, "false"),
        "batch_groups": (8, "16"),
        "max_staleness": (1, "2"),
    }
    mine, other = values[name]
    early = open_run(Connection(redis_url), run, RunSettings(**{name: mine}))
    with producing(redis_url, run) as pushing:
        client = early.connection.scripts
        stored: Any = client.hgetall(EntryKeys(run).manifest)
        client.flushall()
        changed = {"salts": "[0]"} if name == "shards" else {name: other}
        client.hset(EntryKeys(run).manifest, mapping={**stored, **changed})
        with pytest.raises(ManifestMismatchError, match=name) as told:
            early.refresh()
        with pytest.raises(ManifestMismatchError, match=name):
            push_groups(pushing, 1, metadata={"correct": 1})
    assert "stop all processes" in str(told.value)
    assert other in str(told.value)


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ({"zero_variance_filter": True}, "zero_variance"),
        ({"difficulty_low": 0.5}, "difficulty"),
        ({"difficulty_high": 0.5}, "difficulty"),
        ({"partial_min_usable": 1}, "partial"),
    ],
    ids=str,
)
def test_a_setting_given_later_is_in_force_for_what_is_pushed_then(
    redis_url: str, run: str, given: dict[str, Any], outcome: str
) -> None:
    reward = 1.0 if given.get("difficulty_high") else 0.5
    stop = threading.Event()
    grouper = threading.Thread(target=run_grouper, args=(join(redis_url, run), stop))
    grouper.start()
    try:
        with producing(redis_url, run) as early:
            push_groups(early, 3, reward=reward, prefix="early")
            seen = join(redis_url, run)
            until(lambda: read_status(seen).groups.outcomes == {"complete": 3}, "they are complete")
            with producing(redis_url, run, given) as late:
                for number in range(40):
                    size = 2
                    records = [
                        trajectory(f"late{number}", index, size, reward=reward) for index in range(size)
                    ]
                    if outcome == "partial":
                        group = late.begin_group(size, group_id=f"late{number}")
                        next(iter(group)).fail()
                        records = records[1:]
                    late.push(records)
                expected = {"complete": 3, outcome: 40}
                until(lambda: sum(read_status(seen).groups.outcomes.values()) == 43, "all have ended")
                assert read_status(seen).groups.outcomes == expected
    finally:
        stop.set()
        grouper.join()
    assert problems(seen) == []


@pytest.mark.parametrize("name", sorted(RunSettings.model_fields.keys() - {"shards"}))
def test_every_setting_given_later_reaches_who_is_running(redis_url: str, run: str, name: str) -> None:
    values: dict[str, Any] = {
        "group_deadline_s": 60.0,
        "redundancy": 1,
        "partial_min_usable": 3,
        "zero_variance_filter": True,
        "difficulty_low": 0.1,
        "difficulty_high": 0.9,
        "filter_by": "correct",
        "scorers": ("a", "b"),
        "max_trajectory_bytes": 1 << 20,
        "max_bytes": 1 << 30,
        "dedupe_groups": 10,
        "dead_bytes": 5,
        "keep_bytes": 5,
        "keep": {"trained": 0.5, "dropped": 0.2, "eval": 1.0, "dead": 1.0},
        "tokenizer": "a",
        "archive": True,
        "batch_groups": 8,
        "max_staleness": 1,
    }
    early = join(redis_url, run)
    open_run(Connection(redis_url), run, RunSettings(**{name: values[name]}))
    group_all(early)
    assert getattr(early.manifest, name) == values[name]


JUNK: dict[Any, Any] = {
    b"\xff\xfe": b"1",
    b"column.\xff": b"1",
    "column.x": b"[[",
    "column.y": b"\xff",
    "dead_bytes": b"[[",
    "dedupe_groups": b"-1",
    "scorers": b'["a", 1, {}]',
    "difficulty_low": b"NaN",
    "redundancy": b"[" * 100_000,
    "max_bytes": b"\xff\x00",
    "group_deadline_s": b"null",
    "unknown": b"\xff",
}


def test_what_cannot_be_read_in_the_manifest_is_ignored_and_named(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with producing(redis_url, run) as pushing:
        early = join(redis_url, run)
        for name, value in JUNK.items():
            early.connection.scripts.hsetnx(EntryKeys(run).manifest, name, value)
        push_groups(pushing, 2, prefix="early")
        group_all(early)
        group_all(join(redis_url, run))
        with producing(redis_url, run) as late:
            push_groups(late, 2)
            group_all(early)
            late.finish()
        pushing.finish()
    assert ledger(early)["queued"] == 8
    where = ["--redis", redis_url, "--run", run]
    capsys.readouterr()
    assert main(["status", "--check", "--deep", *where]) == 0
    out = capsys.readouterr().out
    for name in (
        "dead_bytes",
        "dedupe_groups",
        "scorers",
        "difficulty_low",
        "redundancy",
        "max_bytes",
        "column.x",
    ):
        assert f"IGNORED manifest {name}" in out.replace("'", "")
    assert main(["runs", "show", *where]) == 0
    assert main(["runs", "list", "--redis", redis_url]) == 0


@pytest.mark.parametrize("field", ["salts", "schema_version"])
@pytest.mark.parametrize("value", ["", "[", "{}", '["a"]', "[]", "[1e99]", "[-1]", b"\xff"], ids=repr)
def test_a_manifest_without_salts_that_can_be_read_is_one_clear_error(
    redis_url: str, run: str, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    join(redis_url, run).connection.scripts.hset(EntryKeys(run).manifest, field, value)
    assert main(["status", "--redis", redis_url, "--run", run]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "manifest" in err
    assert main(["runs", "list", "--redis", redis_url]) == 0
    assert re.search(rf"^{run} .*  not readable: ", capsys.readouterr().out, re.MULTILINE)
