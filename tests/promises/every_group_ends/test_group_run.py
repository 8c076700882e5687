"""`group.run(play)`: a rollout that fails is one failed rollout, a bug in `play` is raised; blocking and asyncio."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

import streamadv as sa
from streamadv.errors import (
    ManifestMismatchError,
    NotPermittedError,
    ProducerClosedError,
    RunEndedError,
    ServerUnreachableError,
    SettingError,
    TrajectoryError,
)
from streamadv.metrics import instruments
from streamadv.store.connection import Connection
from tests.support import group_all, join, ledger, problems, producing

COLUMNS: dict[str, Any] = {"input_ids": [1, 2], "response_mask": [0, 1], "reward": 1.0}


class Blocking:
    """Groups of one producer, played by a function of the index: False = do not push, a dict = push this as well."""

    def __init__(self, url: str, run: str, **options: Any) -> None:
        self.url, self.run, self.options = url, run, options

    def play(self, size: int, plan: Callable[[int], Any], groups: int = 1) -> list[Any]:
        """(results or the exception raised, failures) of each group."""
        found: list[Any] = []

        def play(rollout: sa.Rollout, answer: str, *, suffix: str) -> str:
            planned = plan(rollout.rollout_index)
            if planned is not False:
                rollout.push(**{**COLUMNS, **(planned or {})})
            return f"{answer}{rollout.rollout_index}{suffix}"

        with producing(self.url, self.run) as producer:
            for _ in range(groups):
                with producer.group(size) as group:
                    try:
                        results: Any = group.run(play, "r", suffix="!", **self.options)
                    except Exception as error:
                        results = error
                found.append((results, group.failures))
        return found


class Asyncio(Blocking):
    def play(self, size: int, plan: Callable[[int], Any], groups: int = 1) -> list[Any]:
        async def play(rollout: sa.AsyncRollout, answer: str, *, suffix: str) -> str:
            await asyncio.sleep(0)
            planned = plan(rollout.rollout_index)
            if planned is not False:
                await rollout.push(**{**COLUMNS, **(planned or {})})
            return f"{answer}{rollout.rollout_index}{suffix}"

        async def work() -> list[Any]:
            found: list[Any] = []
            async with sa.Producer(self.url, self.run) as producer:
                for _ in range(groups):
                    async with producer.group(size) as group:
                        try:
                            results: Any = await group.run(play, "r", suffix="!", **self.options)
                        except Exception as error:
                            results = error
                    found.append((results, group.failures))
            return found

        return asyncio.run(work())


@pytest.fixture(params=["blocking", "in turn", "asyncio"])
def player(request: pytest.FixtureRequest, redis_url: str, run: str) -> Blocking:
    if request.param == "asyncio":
        return Asyncio(redis_url, run)
    return Blocking(redis_url, run, threads=1) if request.param == "in turn" else Blocking(redis_url, run)


def raising(errors: dict[int, Exception]) -> Callable[[int], Any]:
    def plan(index: int) -> None:
        if index in errors:
            raise errors[index]

    return plan


def test_an_error_of_the_environment_is_one_failed_rollout(player: Blocking) -> None:
    def plan(index: int) -> object:
        if index == 3:
            raise TimeoutError("the engine\nis slow" + "!" * 1000)
        return {} if index != 5 else False

    [(results, failures)] = player.play(8, plan)
    assert results == [f"r{index}!" if index != 3 else None for index in range(8)]
    assert sorted(failures) == [3, 5]
    assert failures[3].startswith(r"TimeoutError: the engine\nis slow!!")
    assert len(failures[3]) < 300
    assert re.search(r" \(test_group_run\.py:\d+\)$", failures[3])  # the line that raised
    assert failures[5] == "not_pushed"
    joined = join(player.url, player.run)
    assert group_all(joined) == ["incomplete"]
    found = ledger(joined)
    assert (found["pushed"], found["dropped"]) == (8, {"failed": 2, "incomplete": 6})
    assert problems(joined) == []


def test_a_failed_rollout_is_played_again(player: Blocking, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def plan(index: int) -> object:
        tries.append(index)
        done = tries.count(index)
        if index == 1 and done < 3:
            raise TimeoutError("the engine is slow")
        if index == 2 and done == 1:
            return {"reward": float("nan")}  # refused
        return {} if index != 0 or done > 1 else False  # not pushed

    player.options["retries"] = 2
    before = instruments.REPLAYED._value.get()
    with caplog.at_level(logging.WARNING, "streamadv.producer.failures"):
        [(results, failures)] = player.play(4, plan)
    assert results == [f"r{index}!" for index in range(4)]
    assert failures == {}
    assert sorted(tries) == [0, 0, 1, 1, 1, 2, 2, 3]
    assert instruments.REPLAYED._value.get() == before + 4
    assert sum(int(count) for count in re.findall(r"(\d+) x .*?, played again", caplog.text)) == 4
    joined = join(player.url, player.run)
    assert group_all(joined) == ["complete"]
    assert problems(joined) == []


def test_a_rollout_that_fails_at_each_try_fails(player: Blocking) -> None:
    tries: list[int] = []

    def plan(index: int) -> None:
        tries.append(index)
        if index == 0:
            raise TimeoutError(f"the engine is slow: {len(tries)}")

    player.options["retries"] = 2
    [(results, failures)] = player.play(2, plan)
    assert results == [None, "r1!"]
    assert list(failures) == [0]
    assert tries.count(0) == 3
    assert group_all(join(player.url, player.run)) == ["incomplete"]


def test_what_has_ended_is_not_played_again(fake: Connection) -> None:
    played: list[int] = []

    def play(rollout: sa.Rollout) -> None:
        played.append(rollout.rollout_index)
        if rollout.rollout_index == 0:
            rollout.fail(detail="no use")
        elif rollout.rollout_index == 1:
            rollout.push(**COLUMNS)
            raise TimeoutError("too late")
        else:
            rollout.ticket.to_json()
            raise TimeoutError("somebody else plays it")

    with producing(fake, "r") as producer, producer.group(3) as group:
        group.run(play, retries=5, threads=1)
        group.cancel(indices=[2])
    assert played == [0, 1, 2]


@pytest.mark.parametrize("retries", [-1, 1.5, True])
def test_retries_are_a_whole_number(fake: Connection, retries: Any) -> None:
    with (
        producing(fake, "r") as producer,
        producer.group(1) as group,
        pytest.raises(SettingError, match="retries"),
    ):
        group.run(lambda rollout: rollout.push(**COLUMNS), retries=retries)


def test_failures_are_told_summed_up(player: Blocking, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        player.play(
            8, raising({2: TimeoutError("slow"), 3: TimeoutError("slow"), 4: KeyError("x")}), groups=30
        )
    told = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert 1 <= len(told) <= 5, told
    assert sum(int(text.split()[0]) for text in told) == 90, told
    assert any("TimeoutError: slow" in text for text in told)


def test_refused_records_are_told_summed_up(player: Blocking, caplog: pytest.LogCaptureFixture) -> None:
    def plan(index: int) -> dict[str, Any]:
        return {"reward": float("nan")} if index == 1 else {}

    with caplog.at_level(logging.WARNING):
        player.play(2, plan, groups=30)
    told = [text for text in caplog.messages if "failed" in text]
    assert re.search(r"failed, the last one in group \S+: ", told[0])
    told = [re.sub(r", the last one in group \S+:", ":", text) for text in told]
    assert {re.sub(r"\d+", "N", text).replace("rollouts", "rollout") for text in told} == {
        "N rollout failed: N x TrajectoryError: record N: reward: is nan, needs a finite number"
    }


def test_what_fails_in_every_rollout_of_a_group_is_raised(player: Blocking) -> None:
    def plan(index: int) -> None:
        raise ZeroDivisionError(f"in {index}")

    [(error, failures)] = player.play(4, plan)
    assert isinstance(error, ZeroDivisionError)
    assert sorted(failures) == [0, 1, 2, 3]
    joined = join(player.url, player.run)
    group_all(joined)
    assert ledger(joined)["dropped"] == {"failed": 4}


@pytest.mark.parametrize("other", ["place", "type"])
def test_what_fails_in_different_ways_is_not_raised(player: Blocking, other: str) -> None:
    def plan(index: int) -> None:
        if index < 3:
            raise ValueError("bad")
        if other == "type":
            raise KeyError("bad")
        raise ValueError("bad")

    [(results, failures)] = player.play(4, plan)
    assert results == [None] * 4
    assert len(failures) == 4


def test_groups_of_one_that_fail_three_times_in_a_row_are_raised(player: Blocking) -> None:
    calls: list[int] = []

    def plan(index: int) -> None:
        calls.append(index)
        if len(calls) != 3:
            raise ZeroDivisionError

    outcomes = player.play(1, plan, groups=6)
    assert [isinstance(results, ZeroDivisionError) for results, _ in outcomes] == [False] * 5 + [True]


REFUSED: dict[str, dict[str, Any]] = {
    "reward is nan": {"reward": float("nan")},
    "shape": {"response_mask": [1]},
    "dtype": {"input_ids": [0.5, 1]},
    "token is nan": {"rollout_log_probs": [0.0, float("nan")]},
    "text": {"tool_output": "hello"},
}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_a_record_that_is_refused_is_one_failed_rollout(player: Blocking, wrong: dict[str, Any]) -> None:
    bad = [wrong]  # of the first group alone
    [(results, failures), (more, none)] = player.play(
        3, lambda index: bad.pop() if index == 1 and bad else {}, groups=2
    )
    assert (results, more) == (["r0!", None, "r2!"], ["r0!", "r1!", "r2!"])
    assert (list(failures), none) == ([1], {})
    assert failures[1].startswith("TrajectoryError: ")
    assert next(iter(wrong)) in failures[1]
    joined = join(player.url, player.run)
    assert sorted(group_all(joined)) == ["complete", "incomplete"]
    assert ledger(joined)["dropped"] == {"failed": 1, "incomplete": 2}
    assert problems(joined) == []


def test_records_that_are_refused_in_every_rollout_of_a_group_are_raised(player: Blocking) -> None:
    [(error, failures)] = player.play(3, lambda index: {"reward": float("nan")})
    assert isinstance(error, TrajectoryError)
    assert "reward: is nan" in str(error)
    assert sorted(failures) == [0, 1, 2]


def test_records_that_are_refused_at_different_lines_are_not_raised(fake: Connection) -> None:
    """Which check of streamadv refuses them does not matter."""

    def play(rollout: sa.Rollout) -> None:
        if rollout.rollout_index:
            rollout.push(**{**COLUMNS, "reward": float("nan")})
        rollout.push(**{**COLUMNS, "response_mask": [1]})

    with producing(fake, "r") as producer, producer.group(2) as group:
        assert group.run(play, threads=1) == [None, None]
    assert sorted(group.failures) == [0, 1]


@pytest.mark.parametrize(
    "error",
    [
        *(ProducerClosedError("closed"), ManifestMismatchError("another value"), RunEndedError("over")),
        *(NotPermittedError("no right"), ServerUnreachableError("away"), SettingError("wrong")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_run_is_raised_after_the_others_have_ended(
    player: Blocking, error: Exception
) -> None:
    [(raised, failures)] = player.play(3, raising({0: error}))
    assert raised is error
    assert list(failures) == [0]
    joined = join(player.url, player.run)
    assert group_all(joined) == ["incomplete"]
    assert ledger(joined)["dropped"] == {"failed": 1, "incomplete": 2}


def test_threads_are_a_whole_number(redis_url: str, run: str) -> None:
    with (
        producing(redis_url, run) as producer,
        producer.group(3) as group,
        pytest.raises(SettingError, match="threads is 0"),
    ):
        group.run(lambda rollout: None, threads=0)


def test_play_is_a_function_of_the_producers_kind(redis_url: str, run: str) -> None:
    async def aplay(rollout: Any) -> None: ...

    def play(rollout: Any) -> None: ...

    async def work() -> None:
        async with sa.Producer(redis_url, run) as producer, producer.group(1) as group:
            with pytest.raises(SettingError, match="play"):
                await group.run(play)

    with (
        producing(redis_url, run) as producer,
        producer.group(1) as group,
        pytest.raises(SettingError, match="play is a coroutine function"),
    ):
        group.run(aplay)
    asyncio.run(work())


async def test_cancellation_ends_what_is_open_and_goes_on(redis_url: str, run: str) -> None:
    async def play(rollout: sa.AsyncRollout) -> None:
        if rollout.rollout_index:
            await asyncio.Event().wait()
        await rollout.push(**COLUMNS)
        pushed.set()

    async with sa.Producer(redis_url, run) as producer:
        pushed = asyncio.Event()
        group = await producer.begin_group(3)
        playing = asyncio.create_task(group.run(play))
        await asyncio.wait_for(pushed.wait(), 30)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert group.failures == {1: "cancelled", 2: "cancelled"}
    joined = join(redis_url, run)
    assert group_all(joined) == ["incomplete"]
    assert ledger(joined)["dropped"] == {"cancelled": 2, "incomplete": 1}


async def test_a_rollout_that_somebody_else_cancels_ends_alone(redis_url: str, run: str) -> None:
    """A watchdog of the user's cancels the task of a rollout that takes too long."""
    slow = asyncio.get_running_loop().create_future()

    async def play(rollout: sa.AsyncRollout) -> str:
        if rollout.rollout_index == 0:
            slow.set_result(asyncio.current_task())
            await asyncio.Event().wait()
        (await slow).cancel()
        return await rollout.push(**COLUMNS)

    async with sa.Producer(redis_url, run) as producer, producer.group(3) as group:
        assert await group.run(play) == [None, "pushed", "pushed"]
        assert group.failures == {0: "cancelled"}
    joined = join(redis_url, run)
    assert group_all(joined) == ["incomplete"]
    assert ledger(joined)["dropped"] == {"cancelled": 1, "incomplete": 2}


def test_an_interrupt_ends_what_is_open_and_goes_on(redis_url: str, run: str) -> None:
    entered, end = threading.Barrier(3, timeout=30), threading.Event()

    def play(rollout: sa.Rollout) -> None:
        entered.wait()
        if rollout.rollout_index == 0:
            raise KeyboardInterrupt
        end.wait(30)

    with producing(redis_url, run) as producer:
        group = producer.begin_group(3)
        with pytest.raises(KeyboardInterrupt):
            group.run(play)
        assert group.failures == dict.fromkeys(range(3), "cancelled")
        assert all(rollout.cancelled for rollout in group)
        end.set()
    joined = join(redis_url, run)
    assert group_all(joined) == ["incomplete"]
    assert ledger(joined)["dropped"] == {"cancelled": 3}


async def test_siblings_of_a_failed_rollout_in_gather_are_pushed(redis_url: str, run: str) -> None:
    """The pattern with tasks of one's own: leaving the group waits for rollouts that are being played."""
    failed = asyncio.Event()

    async def play(rollout: sa.AsyncRollout) -> None:
        async with rollout:
            if rollout.rollout_index == 1:
                failed.set()
                raise TimeoutError("slow")
            await failed.wait()
            await asyncio.sleep(0.02)
            await rollout.push(**COLUMNS)

    async with sa.Producer(redis_url, run) as producer:
        with pytest.raises(TimeoutError):
            async with producer.group(4) as group:
                await asyncio.gather(*(play(rollout) for rollout in group))
        assert list(group.failures) == [1]
        assert group.failures[1].startswith("TimeoutError: slow (")
    joined = join(redis_url, run)
    group_all(joined)
    assert ledger(joined)["dropped"] == {"failed": 1, "incomplete": 3}


async def test_a_rollout_that_is_cancelled_by_a_siblings_error_says_so(redis_url: str, run: str) -> None:
    async def play(rollout: sa.AsyncRollout) -> None:
        async with rollout:
            if rollout.rollout_index == 1:
                raise TimeoutError("slow")
            await asyncio.Event().wait()

    async with sa.Producer(redis_url, run) as producer:
        group = await producer.begin_group(3)

        async def play_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for rollout in group:
                    tasks.create_task(play(rollout))

        with pytest.raises(ExceptionGroup):
            await play_all()
        assert sorted(group.failures) == [0, 1, 2]
        assert group.failures[1].startswith("TimeoutError: slow (")
        assert {group.failures[0], group.failures[2]} == {"cancelled"}
    joined = join(redis_url, run)
    group_all(joined)
    assert ledger(joined)["dropped"] == {"cancelled": 2, "failed": 1}


def test_groups_and_rollouts_are_documented() -> None:
    for kind in (sa.Group, sa.Rollout, sa.AsyncGroup, sa.AsyncRollout, sa.AsyncProducer):
        for name in [name for name in dir(kind) if not name.startswith("_")]:
            assert getattr(kind, name).__doc__, f"{kind.__name__}.{name}"
