"""Workers as actors of a real Ray cluster: killed, they come back, and nothing is lost; stopped, all are gone."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray

import streamadv as sa
from streamadv.errors import ProcessEndedError, SettingError
from streamadv.integrations.ray import ActorHealth, Actors, ScorerActors, connect, start
from tests.children import descendants, runs, worker_of
from tests.clusters import until
from tests.support import join, ledger, problems

SIZE = 2
DEADLINE_S = 120.0
pytestmark = [
    pytest.mark.server,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(3 * DEADLINE_S),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on this machine, with a GPU that is not there: Ray only counts it, and tells the actor its number."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  at Ray's 15 workers starve beside other tests
    for last in (False, False, True):
        try:
            ray.init(num_cpus=4, num_gpus=1, include_dashboard=False)
            break
        except Exception:  # Ray gives its first node 30 s, which a busy machine may not keep
            ray.shutdown()
            if last:
                raise
    yield
    ray.shutdown()


def of(actors: Actors, name: str) -> ActorHealth:
    return next(each for each in actors.health() if each.name.endswith(name))


class Flow:
    """A producer that pushes without end, and a trainer that notes what it was trained on."""

    def __init__(self, url: str, run: str) -> None:
        self.pushed: list[tuple[str, int]] = []
        self.trained: Counter[tuple[str, int]] = Counter()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, args=(url, run)) for each in (self._push, self._train)]
        for thread in self._threads:
            thread.start()

    def _push(self, url: str, run: str) -> None:
        with sa.Producer(url, run) as producer:
            while not self._over.is_set():
                with producer.group(SIZE) as group:
                    for rollout in group:
                        reward = float(rollout.rollout_index)
                        rollout.push(input_ids=[1, 2, 3], response_mask=[0, 1, 1], reward=reward)
                self.pushed += [(group.group_id, index) for index in range(SIZE)]
            producer.finish()

    def _train(self, url: str, run: str) -> None:
        with closing(
            sa.TrainerQueue(url, run, batch_groups=2, max_staleness=4, drop_after=1000, commit="each_batch")
        ) as queue:
            for batch in queue:
                self.trained.update((each.group_id, each.rollout_index) for each in batch.references)

    def progress(self) -> None:
        """Wait until more has been trained on."""
        before = len(self.trained)
        until(lambda: len(self.trained) > before, "more is trained on", DEADLINE_S)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_killed_actors_and_workers_come_back_and_nothing_is_lost(redis_url: str, run: str) -> None:
    workers = [{"num_cpus": 0.5, "num_gpus": 0.5}, {}]
    with start(redis_url, run, groupers=[{"num_cpus": 0.5}], workers=workers) as actors:
        assert [(each.name, each.state, each.starts) for each in actors.health()] == [
            (f"{run}:grouper-0", "ready", 1),
            (f"{run}:advantage-0", "ready", 1),
            (f"{run}:advantage-1", "ready", 1),
        ]
        given = Path(f"/proc/{worker_of(of(actors, 'advantage-0').pid)}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=0" in given
        flow = Flow(redis_url, run)
        for name in ("grouper-0", "advantage-0", "advantage-1"):
            flow.progress()
            before = of(actors, name)
            os.kill(before.pid, signal.SIGKILL)
            until(lambda: of(actors, name).state == "ready", f"{name} is back", DEADLINE_S)  # noqa: B023
            assert of(actors, name).pid != before.pid
        flow.progress()
        worker = worker_of(of(actors, "grouper-0").pid)
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        until(lambda: of(actors, "grouper-0").starts == 2, "the actor starts another worker", DEADLINE_S)
        actors.wait_until_ready(DEADLINE_S)
        flow.progress()
        flow.end()
        processes = [pid for each in actors.health() for pid in (each.pid, *descendants(each.pid))]
        assert len(processes) >= 6
    until(lambda: not any(map(runs, processes)), "all processes have ended", DEADLINE_S)
    assert set(flow.trained) == set(flow.pushed)
    assert set(flow.trained.values()) == {1}
    joined = join(redis_url, run)
    counted = ledger(joined)
    assert counted["pushed"] == counted["trained"] == len(flow.pushed), counted
    assert problems(joined) == []


def test_scorers_are_actors_too_and_another_driver_may_stop_them(redis_url: str, run: str) -> None:
    scorer = ScorerActors("tests.integrations.ray.scoring:by_index", batch_size=4, timeout_s=10)
    started = start(redis_url, run, scorers=[scorer], detached=True)
    assert [name.removeprefix(f"{run}:") for name in started.names] == [
        "grouper-0",
        "advantage-0",
        "by_index-0",
    ]
    with sa.Producer(redis_url, run) as producer:
        with producer.group(SIZE) as group:
            for rollout in group:
                rollout.push(input_ids=[1, 2, 3], response_mask=[0, 1, 1])
        producer.finish()
    with closing(sa.TrainerQueue(redis_url, run, batch_groups=1, commit="each_batch")) as queue:
        assert [[each.reward for each in batch.references] for batch in queue] == [[0.0, 1.0]]
    found = connect(run)
    assert sorted(found.names) == sorted(started.names)
    found.stop()
    assert {each.state for each in started.health()} == {"stopped"}
    with pytest.raises(SettingError, match=f"run {run} has no actors in Ray's namespace streamadv"):
        connect(run)


def test_actors_that_are_there_are_used_if_they_do_the_same(redis_url: str, run: str) -> None:
    pid = start(redis_url, run, workers=0).health()[0].pid  # and lets the object go
    with start(redis_url, run, workers=1) as more:
        assert [each.state for each in more.health()] == ["ready", "ready"]
        assert of(more, "grouper-0").pid == pid
        with pytest.raises(SettingError, match=r"advantage-0 is there with .*, not .*--import json"):
            start(redis_url, run, groupers=2, workers=1, modules=["json"])
        names = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
        assert names == set(more.names)  # the other grouper is gone


def test_workers_become_fewer(redis_url: str, run: str, caplog: pytest.LogCaptureFixture) -> None:
    with start(redis_url, run, workers=3) as first:
        fewer = start(redis_url, run, workers=1)
        assert "were started before and go on: Actors.reduce" in caplog.text
        assert sorted(fewer.names) == sorted(first.names)
        with pytest.raises(SettingError, match=r"reduce: judge is 1, needs .* actors: advantage, grouper"):
            fewer.reduce(judge=1)
        worker = worker_of(of(fewer, "advantage-2").pid)
        fewer.reduce(advantage=1)
        assert [name.removeprefix(f"{run}:") for name in fewer.names] == ["grouper-0", "advantage-0"]
        assert [each.state for each in fewer.health()] == ["ready", "ready"]
        until(lambda: not runs(worker), "its worker has ended", DEADLINE_S)
        assert sorted(connect(run).names) == sorted(fewer.names)


def test_a_worker_that_refuses_to_start_is_told_and_leaves_nothing(redis_url: str, run: str) -> None:
    with pytest.raises(ProcessEndedError, match=r"advantage-0: .* status 1: .*no_such_module"):
        start(redis_url, run, modules=["no_such_module"])
    assert ray.util.list_named_actors(all_namespaces=True) == []


def test_an_actor_without_room_is_told(redis_url: str, run: str) -> None:
    with pytest.raises(ProcessEndedError, match=r"advantage-0 is unreachable: .*`ray status`"):
        start(redis_url, run, groupers=0, workers=[{"resources": {"a rack": 1}}], wait_s=0.5)


@pytest.mark.parametrize("option", ["name", "namespace", "lifetime", "get_if_exists", "max_concurrency"])
def test_options_of_the_library_are_refused(redis_url: str, run: str, option: str) -> None:
    options: list[dict[str, Any]] = [{option: 1}]
    with pytest.raises(SettingError, match=f"advantage actors: the option {option} is not yours to set"):
        start(redis_url, run, workers=options)
