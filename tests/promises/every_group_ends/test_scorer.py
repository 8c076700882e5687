"""Scorers: rewards that come between the push and the grouper."""

from __future__ import annotations

import asyncio
import math
import re
import signal
import subprocess
import sys
import threading
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import redis

from streamadv import UnscoredTrajectory, clock
from streamadv.errors import SettingError, StarvedError
from streamadv.grouping import housekeeping
from streamadv.grouping import scorer as scorer_module
from streamadv.grouping.groups_log import read_log
from streamadv.grouping.scorer import TIMEOUT_S, Scorer
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.run.hangs import Stopped
from streamadv.run.manifest import RunSettings
from streamadv.status import read_status
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Trajectory
from tests.clusters import until
from tests.support import (
    Forward,
    consumer_of,
    ended,
    group_all,
    join,
    ledger,
    make_overdue,
    problems,
    producing,
    references,
    threads,
    trajectory,
    unscored,
)

Trajectories = Sequence[UnscoredTrajectory]


def wait_for_rollouts(run: Any, count: int, ended: Callable[[], bool] = lambda: False) -> None:
    """Until the scorers have passed on so many trajectories, or have `ended`."""
    done = threading.Event()
    while not ended() and count > sum(
        fields[b"members"].count(b"\n")
        for keys in run.keys.shards
        for _, fields in run.connection.scripts.xrange(keys.rollouts)
    ):
        done.wait(0.01)


def test_what_a_scoring_function_gets(redis_url: str, run: str) -> None:
    kept: list[UnscoredTrajectory] = []

    def judge(trajectories: Trajectories) -> list[float]:
        kept.extend(trajectories)
        return [1.0] * len(trajectories)

    with producing(redis_url, run, {"scorers": ("judge",)}) as producer:
        joined = join(redis_url, run)
        rows = [
            {"input_ids": [7, 8, 9], "response_mask": [0, 1, 1], "agent": "planner"},
            {"input_ids": [5, 6], "response_mask": [0, 1]},
        ]
        steps = [{"row": 0, "start": 1, "end": 3, "reward": 0.5, "state_key": "s"}]
        fields = {"data_source": "math", "model_version": 3, "rewards": {"format": 0.25}, "steps": steps}
        pushed = {"group_id": "g", "group_size": 1, "rollout_index": 0, "status": "truncated", "rows": rows}
        producer.push([Trajectory(**pushed, **fields, metadata={"answer": [4]}, reward_later=True)])
        scorer = Scorer(redis_url, run, "judge", columns=["input_ids"])
        with threads(lambda stop: scorer.run(judge, stop)):
            wait_for_rollouts(joined, 1)
    (got,) = kept
    assert (got.group_id, got.rollout_index, got.group_size) == ("g", 0, 1)
    assert (got.status, got.data_source, got.model_version) == ("truncated", "math", 3)
    assert {name: column.tolist() for name, column in got.columns.items()} == {"input_ids": [7, 8, 9, 5, 6]}
    assert not got.columns["input_ids"].flags.writeable
    assert (got.row_lengths, got.agents) == ((3, 2), ("planner", None))
    assert got.metadata == {"answer": [4]}
    assert got.steps == ((0, 1, 3, 0.5, "s"),)
    assert (got.reward, got.rewards) == (None, {"format": 0.25})
    assert repr(got) == "<UnscoredTrajectory g/0: truncated, 3 + 2 tokens>"


def test_two_scorers_in_their_order(redis_url: str, run: str) -> None:
    seen: list[tuple[str, list[str]]] = []

    def length(trajectories: Trajectories) -> list[Any]:
        seen.extend(("length", sorted(trajectory.columns)) for trajectory in trajectories)
        return [None if t.rollout_index == 3 else float(len(t.columns["input_ids"])) for t in trajectories]

    def style(trajectories: Trajectories) -> list[Any]:
        seen.extend(("style", sorted(trajectory.columns)) for trajectory in trajectories)
        assert {trajectory.reward for trajectory in trajectories} == {5}
        return [{"style": 0.25, "tone": 0.5}] * len(trajectories)

    with producing(redis_url, run, {"scorers": ("length", "style"), "partial_min_usable": 1}) as producer:
        joined = join(redis_url, run)
        scorers = [Scorer(redis_url, run, name, columns=["input_ids"]) for name in ("length", "style")]
        producer.push([unscored("g", 0, 5), unscored("g", 1, 5), trajectory("g", 2, 5, reward=9.0)])
        producer.push([unscored("g", 3, 5), ended("g", 4, 5, "failed")])
        assert problems(joined) == []
        assert ledger(joined)["queued"] == 5
        with threads(lambda stop: scorers[0].run(length, stop), lambda stop: scorers[1].run(style, stop)):
            wait_for_rollouts(joined, 5)
        assert problems(joined) == []
        assert group_all(joined) == ["partial"]
    (group,) = read_log(joined, 0, "0-0", 10)
    assert [member.reward for member in references(group)] == [5.75, 5.75, 9.0]
    assert references(group)[0].rewards == {"length": 5.0, "style": 0.25, "tone": 0.5}
    assert sorted(name for name, _ in seen) == ["length"] * 3 + ["style"] * 2
    assert all(columns == ["input_ids"] for _, columns in seen)
    assert ledger(joined)["dropped"] == {"failed": 1, "unscorable": 1}
    assert problems(joined) == []


def push_alone(producer: Producer, names: Iterable[str]) -> None:
    """Groups of one."""
    for name in names:
        producer.push([unscored(name, 0, 1)])


EIGHT = [f"g{number}" for number in range(8)]


class Broken(UserDict[str, float]):
    def __iter__(self) -> Any:
        raise KeyError("style")


def raising(error: BaseException) -> Callable[..., Any]:
    def answer(*_: Any) -> Any:
        raise error

    return answer


ANSWERS: dict[str, Callable[[], Any]] = {
    "nan": lambda: math.nan,
    "infinite": lambda: np.float32("-inf"),
    "text": lambda: "0.5",
    "a-huge-integer": lambda: 10**400,
    "a-list": lambda: [0.5],
    "an-array": lambda: np.zeros(1),
    "a-component": lambda: {"style": 0.5, "tone": math.nan},
    "a-sum": lambda: {"one": 1.7e308, "two": 1.7e308},
    "a-name": lambda: {3: 0.5},
    "no-text": lambda: {"\ud800": 0.5},
    "a-broken-mapping": lambda: Broken(),
    "a-broken-number": lambda: type("Number", (), {"ndim": 0, "item": raising(RuntimeError("no data"))})(),
    "an-exception": raising(ValueError("no parse")),
    "an-outage": raising(redis.exceptions.ConnectionError("of the judge")),
    "a-cancellation": raising(asyncio.CancelledError()),
    "an-exit": raising(SystemExit("bye")),
}


def test_filters_judge_the_named_reward_that_a_scorer_brings(redis_url: str, run: str) -> None:
    def judge(trajectories: Trajectories) -> list[Any]:
        return [{"correct": 1.0, "style": float(item.rollout_index)} for item in trajectories]

    settings = {"scorers": ("judge",), "zero_variance_filter": True, "filter_by": "correct"}
    with producing(redis_url, run, settings) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("g", index, 2) for index in range(2)])
        scorer = Scorer(redis_url, run, "judge")
        with threads(lambda stop: scorer.run(judge, stop)):
            wait_for_rollouts(joined, 2)
        assert group_all(joined) == ["zero_variance"]
    assert problems(joined) == []


def test_a_trajectory_without_a_score_is_unscorable_alone(
    redis_url: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(trajectories: Trajectories) -> list[Any]:
        return [ANSWERS[r.group_id]() if r.group_id in ANSWERS else np.float32(0.5) for r in trajectories]

    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, [*ANSWERS, "one", "two", "three"])
        with threads(lambda stop: Scorer(redis_url, run, "s", tries=2).run(judge, stop)):
            wait_for_rollouts(joined, len(ANSWERS) + 3)
        assert problems(joined) == []
        assert Counter(group_all(joined)) == {"complete": 3, "incomplete": len(ANSWERS)}
    assert ledger(joined)["dropped"] == {"unscorable": len(ANSWERS)}
    assert problems(joined) == []
    records = [each for each in caplog.records if getattr(each, "event", "") == "trajectories_unscorable"]
    assert sum(getattr(each, "count", 0) for each in records) == len(ANSWERS)
    assert len(records) <= 4  # one of each reason at once, and one for what came after it
    assert {getattr(each, "reason", "") for each in records} == {"exception", "value"}
    said = [each.getMessage() for each in records]
    assert all(text.startswith("scorer s: ") for text in said)
    assert any(
        re.search(r"(Error|Exit): .*\(test_scorer\.py:\d+\)$", text) for text in said
    )  # the line that raised


WRONG: dict[str, Any] = {
    **{"nothing": None, "a-number": 0.5, "no-text": "", "a-mapping": {"s": 1.0}, "a-set": {1.0}},
    **{"two": [1.0, 2.0], "none": [], "an-iterator": iter([1.0]), "of-numpy": np.float64(1)},
}


def test_a_function_whose_answer_is_no_list_of_scores(redis_url: str, run: str) -> None:
    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, WRONG)
        scorer = Scorer(redis_url, run, "s", tries=1, batch_size=1)
        with threads(lambda stop: scorer.run(lambda trajectories: WRONG[trajectories[0].group_id], stop)):
            wait_for_rollouts(joined, len(WRONG))
        assert group_all(joined) == ["incomplete"] * len(WRONG)
    assert ledger(joined)["dropped"] == {"unscorable": len(WRONG)}
    assert problems(joined) == []


def test_a_function_that_fails_for_a_while_scores_in_the_end(redis_url: str, run: str) -> None:
    calls = []

    async def judge(trajectories: Trajectories) -> list[float]:
        calls.append(len(trajectories))
        if len(calls) < 4:
            raise OSError("the judge is away")
        return [1.0] * len(trajectories)

    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("g", 0, 2), unscored("g", 1, 2)])
        with threads(lambda stop: Scorer(redis_url, run, "s").run(judge, stop)):
            wait_for_rollouts(joined, 2)
        assert group_all(joined) == ["complete"]
    assert calls == [2, 1, 1, 1, 1]
    assert ledger(joined)["dropped"] == {}
    assert not joined.connection.scripts.exists(joined.keys.home.attempts)


def test_what_a_coroutine_function_fails_on_is_looked_for_side_by_side(redis_url: str, run: str) -> None:
    playing: list[str] = []

    async def judge(trajectories: Trajectories) -> list[float]:
        if len(trajectories) > 1:
            raise ValueError("one of them")
        playing.append(trajectories[0].group_id)
        if len(playing) == len(EIGHT):
            all_play.set()
        await asyncio.wait_for(all_play.wait(), 30)
        return [1.0]

    all_play = asyncio.Event()
    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, EIGHT)
        with threads(lambda stop: Scorer(redis_url, run, "s", tries=1).run(judge, stop)):
            wait_for_rollouts(joined, len(EIGHT))
        assert group_all(joined) == ["complete"] * len(EIGHT)
    assert sorted(playing) == EIGHT
    assert problems(joined) == []


async def gathered(trajectories: Trajectories) -> list[Any]:
    return await asyncio.gather(*map(judged, trajectories), return_exceptions=True)


async def judged(item: UnscoredTrajectory) -> float:
    if item.group_id == "g3":
        raise ValueError("no parse")
    return 0.5


def returned(trajectories: Trajectories) -> list[Any]:
    return [ValueError("no parse") if item.group_id == "g3" else 0.5 for item in trajectories]


@pytest.mark.parametrize("function", [gathered, returned])
def test_an_exception_given_for_one_trajectory_costs_its_neighbours_nothing(
    redis_url: str,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[Trajectories], Any],
) -> None:
    monkeypatch.setattr(scorer_module, "FIRST_DELAY_S", 0.0)
    asked: list[list[str]] = []

    def noted(trajectories: Trajectories) -> Any:
        asked.append([item.group_id for item in trajectories])
        return function(trajectories)

    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, EIGHT)
        with threads(lambda stop: Scorer(redis_url, run, "s", tries=2).run(noted, stop)):
            wait_for_rollouts(joined, len(EIGHT))
        assert sorted(group_all(joined)) == ["complete"] * 7 + ["incomplete"]
    assert asked == [EIGHT, ["g3"], ["g3"]]
    assert ledger(joined)["dropped"] == {"unscorable": 1}
    (said,) = [text for text in caplog.messages if "unscorable" in text]
    assert "trajectory g3/0 is unscorable (exception): ValueError: no parse" in said


def waits() -> Any:
    return asyncio.Event().wait()


def blocks() -> Any:
    while True:
        pass


@pytest.mark.parametrize("hang", [waits, blocks])
def test_a_coroutine_that_does_not_return_costs_its_neighbours_nothing(
    redis_url: str, run: str, forward: Forward, hang: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that waits, which its event loop can end, nor one that blocks that of its neighbours."""
    monkeypatch.setattr(scorer_module, "FIRST_DELAY_S", 0.0)

    async def judge(trajectories: Trajectories) -> list[float]:
        if len(trajectories) > 1:
            raise ValueError("one of them")
        if trajectories[0].group_id == "g3":
            if hang is blocks:
                forward(2 * TIMEOUT_S)
            await hang()
        await asyncio.sleep(0)
        return [0.5]

    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, EIGHT)
        timeout_s = 0.2 if hang is waits else TIMEOUT_S
        scorer = Scorer(redis_url, run, "s", tries=1, timeout_s=timeout_s)
        with threads(lambda stop: scorer.run(judge, stop)):
            wait_for_rollouts(joined, len(EIGHT))
        assert sorted(group_all(joined)) == ["complete"] * 7 + ["incomplete"]
    assert ledger(joined)["dropped"] == {"unscorable": 1}


def test_a_scorer_that_is_told_to_end_counts_no_try(redis_url: str, run: str) -> None:
    def judge(trajectories: Trajectories) -> list[float]:
        raise errors.pop()

    errors = [Stopped("this process is to end"), OSError("with all")]
    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, ["g"])
        Scorer(redis_url, run, "s").run(judge, threading.Event())
    assert errors == []
    assert not joined.connection.scripts.exists(joined.keys.home.attempts)


CHILD = """
import os, sys, threading, time
import streamadv as sa

def judge(trajectories):
    for reference in trajectories:
        print(reference.group_id, flush=True)
        if reference.group_id == "g3":
            os._exit(9)
    return [1.0 for _ in trajectories]

sa.Scorer(sys.argv[1], sys.argv[2], "s", lease_s=0.3, tries=2).run(judge, threading.Event())
"""


def score_in_a_child(url: str, run: Run, code: str, count: int) -> int:
    """Until so many trajectories are passed on: -SIGKILL, or the status with which the process ends before."""
    child = subprocess.Popen([sys.executable, "-c", code, url, run.name], stdout=subprocess.DEVNULL)
    try:
        wait_for_rollouts(run, count, lambda: child.poll() is not None)
    finally:
        child.kill()
    return child.wait()


@pytest.mark.processes
@pytest.mark.slow
def test_a_trajectory_that_ends_its_scorer_is_worked_alone(redis_url: str, run: str) -> None:
    """A supervisor starts it again and again; it dies once with all, and as often as it is tried alone."""
    with producing(redis_url, run, {"scorers": ("s",), "shards": 2}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, EIGHT)
        deaths = 0
        while score_in_a_child(redis_url, joined, CHILD, 8) == 9:
            deaths += 1
        assert deaths == 3
        assert sorted(group_all(joined)) == ["complete"] * 7 + ["incomplete"]
    assert ledger(joined)["dropped"] == {"unscorable": 1}
    assert problems(joined) == []


@pytest.mark.processes
@pytest.mark.slow
def test_an_exception_is_no_death(redis_url: str, run: str) -> None:
    """A process that ends while suspects are tried side by side costs only the one that ends it its tries."""
    code = CHILD.replace(
        "def judge(trajectories):", "async def judge(trajectories):\n    len(trajectories) == 1 or 1 / 0"
    )
    code = code.replace("tries=2", "tries=1")
    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, EIGHT)
        deaths = 0
        while score_in_a_child(redis_url, joined, code, 8) == 9:
            deaths += 1
        assert deaths == 2  # beside the others, and alone
        assert sorted(group_all(joined)) == ["complete"] * 7 + ["incomplete"]
    assert ledger(joined)["dropped"] == {"unscorable": 1}
    assert problems(joined) == []


def busy() -> None:
    while True:
        pass


def asleep() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("hang", [busy, asleep])
def test_a_function_that_does_not_return_keeps_nobody(
    redis_url: str, run: str, forward: Forward, hang: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its neighbours nor the end of the process; a thread of a test's stands for the main one."""
    monkeypatch.setattr(scorer_module, "FIRST_DELAY_S", 0.0)

    def judge(trajectories: Trajectories) -> list[float]:
        if any(reference.group_id == "g1" for reference in trajectories):
            forward(2 * TIMEOUT_S)
            hang()
        return [1.0] * len(trajectories)

    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, EIGHT[:3])
        scorer = Scorer(redis_url, run, "s", tries=3, batch_size=1)
        with threads(lambda stop: scorer.run(judge, stop)):
            wait_for_rollouts(joined, 3)
        assert sorted(group_all(joined)) == ["complete"] * 2 + ["incomplete"]
    assert ledger(joined)["dropped"] == {"unscorable": 1}


@pytest.mark.processes
def test_the_main_thread_of_a_process_is_interrupted(redis_url: str, run: str) -> None:
    """The regular expression takes for ever, and lets no other thread run."""
    hangs = (
        "[lambda: re.match('(x+x+)+y', 'x' * 60), lambda: time.sleep(1e9), lambda: exec('while True: pass')]"
    )
    # By the clock only calls that hang last.
    clock = "from streamadv import clock\nseconds = [0.0]\nclock.now = lambda: seconds[0]"
    code = CHILD.replace(
        'if reference.group_id == "g3":\n            os._exit(9)',
        "if HANGS:\n            seconds[0] += 10.0\n            HANGS.pop()()",
    )
    code = code.replace("import os", f"import re\n{clock}\nHANGS = {hangs}\nimport os", 1)
    code = code.replace("lease_s=0.3, tries=2", "timeout_s=0.4, tries=1, batch_size=1")
    assert "HANGS.pop" in code
    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        push_alone(producer, EIGHT)
        assert score_in_a_child(redis_url, joined, code, 8) == -signal.SIGKILL
        assert sorted(group_all(joined)) == ["complete"] * 7 + ["incomplete"]
    assert ledger(joined)["dropped"] == {"unscorable": 1}  # the third hang was of another, which scored alone


def test_a_function_slower_than_the_lease_scores_everything_once(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    slow, now, lease_s = threading.Event(), [0.0], 0.2
    monkeypatch.setattr(clock, "now", lambda: now[0])

    def judge(trajectories: Trajectories) -> list[float]:
        seen.extend((r.group_id, r.rollout_index) for r in trajectories)
        slow.wait(60)
        return [1.0] * len(trajectories)

    def deliveries() -> list[int]:
        pending: Any = joined.connection.scripts.xpending_range(
            joined.keys.home.scoring("s"), "s", "-", "+", 10
        )
        return [item["times_delivered"] for item in pending]

    def are_renewed() -> bool:
        return all(after > before for before, after in zip(counts, deliveries(), strict=True))

    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        for index in range(6):
            producer.push([unscored("g", index, 6)])
        scorers = [Scorer(redis_url, run, "s", lease_s=lease_s, batch_size=3) for _ in range(3)]
        with threads(*(lambda stop, scorer=scorer: scorer.run(judge, stop) for scorer in scorers)):
            until(lambda: len(seen) == 6, "all are being scored")
            for _ in range(12):
                counts = deliveries()
                until(are_renewed, "their leases are renewed")
                now[0] += lease_s / 4  # so no lease is over, however slow this process is
            slow.set()
            wait_for_rollouts(joined, 6)
        assert group_all(joined) == ["complete"]
    assert sorted(seen) == [("g", index) for index in range(6)]
    assert not joined.connection.scripts.exists(joined.keys.home.attempts)


@pytest.mark.parametrize("scorers", [("s",), ("first", "s")])
@pytest.mark.parametrize("read", [False, True], ids=["nobody has read it", "a scorer died with it"])
def test_a_run_ends_although_nobody_scores(redis_url: str, run: str, scorers: Any, read: bool) -> None:
    with producing(redis_url, run, {"scorers": scorers}) as producer:
        joined = join(redis_url, run)
        names = [f"g{number:03d}" for number in range(150)]
        push_alone(producer, names)
        if read:
            assert consumer_of(joined, scorers[0]).read(1)
        for name in names:
            make_overdue(joined, name)
        producer.finish()
        for _ in range(4):
            group_all(joined)
    queue = TrainerQueue(redis_url, run, batch_groups=1, commit="each_batch")
    with pytest.raises(StarvedError, match="late 150"):
        queue.next_batch(timeout=10)
    queue.close()
    assert (ledger(joined)["queued"], ledger(joined)["dropped"]) == (0, {"late": 150})
    assert {stream.lag for stream in read_status(joined).streams.values()} == {0}
    assert problems(joined) == []


def test_packets_of_ended_groups_go_straight_on(redis_url: str, run: str) -> None:
    with producing(redis_url, run, {"scorers": ("first", "second")}) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("late", 0, 1)])
        make_overdue(joined, "late")
        housekeeping.expire(joined, joined.home)
        producer.push([unscored("g", 0, 1)])
        asked: list[str] = []

        def judge(trajectories: Trajectories) -> list[float]:
            asked.extend(reference.group_id for reference in trajectories)
            return [1.0] * len(trajectories)

        with threads(
            lambda stop: Scorer(redis_url, run, "first").run(judge, stop),
            lambda stop: Scorer(redis_url, run, "second").run(judge, stop),
        ):
            wait_for_rollouts(joined, 2)
        group_all(joined)
    assert asked == ["g", "g"]
    assert ledger(joined)["dropped"] == {"late": 1}
    assert problems(joined) == []


def test_a_scorer_must_be_one_of_the_run(redis_url: str, run: str) -> None:
    with Producer(redis_url, run), pytest.raises(SettingError, match="scorer 's' is not one of run"):
        Scorer(redis_url, run, "s")
    Scorer(redis_url, run, "s", settings=RunSettings(scorers=("s",)))
