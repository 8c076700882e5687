"""A judge is asked in its bounds, once for each content, and waits while nobody is there."""

from __future__ import annotations

import asyncio
import errno
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamadv import Judge, clock
from streamadv.errors import JudgeAwayError, SettingError


def item(number: int, **metadata: Any) -> Any:
    """A trajectory of one row, as a score function gets it; its log-probs are nobody else's."""
    columns = {"input_ids": np.array([1, number], np.int32), "rollout_log_probs": np.random.random(2)}
    return SimpleNamespace(
        status="completed", data_source=None, metadata=metadata, row_lengths=(2,), agents=(), columns=columns
    )


class Service:
    """Answers with the last token, and notes how many ask at the same time."""

    def __init__(self, *errors: BaseException) -> None:
        self.asked: list[int] = []
        self.most = self._now = 0
        self._errors = list(errors)

    async def __call__(self, *trajectories: Any) -> float:
        number = int(trajectories[0].columns["input_ids"][1])
        self.asked.append(number)
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        if self._errors:
            raise self._errors.pop(0)
        return float(number)


def ask(judge: Judge, *trajectories: Any) -> list[Any]:
    """As a scorer does: each call in an event loop of its own."""
    return asyncio.run(judge(trajectories))


def test_no_more_requests_than_allowed_at_the_same_time() -> None:
    service = Service()
    assert ask(Judge(service, concurrency=3), *map(item, range(20))) == [float(each) for each in range(20)]
    assert service.most == 3


def test_requests_begin_evenly_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [1000.0], list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    service = Service()
    monkeypatch.setattr(clock, "now", lambda: now[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    judge = Judge(service, per_minute=120, concurrency=1)
    ask(judge, *map(item, range(4)))
    assert [each for each in slept if each] == pytest.approx([0.5] * 3)
    answers = ask(judge, *map(item, range(4, 400)))
    assert 100 < len(service.asked) < 130  # what is left would begin too late
    waiting = [each for each in answers if isinstance(each, JudgeAwayError)]
    assert len(waiting) == 400 - len(service.asked)
    assert "more than it answers in a minute" in str(waiting[0])


def test_equal_content_is_asked_for_once() -> None:
    service = Service()
    judge = Judge(service)
    assert ask(judge, item(1), item(2), item(1), item(1, question=7)) == [1.0, 2.0, 1.0, 1.0]
    assert ask(judge, item(1), item(2)) == [1.0, 2.0]
    assert sorted(service.asked) == [1, 1, 2]
    ask(Judge(service, remember=0), item(1))
    assert len(service.asked) == 4


def test_a_file_remembers_for_other_processes_unless_the_version_differs(tmp_path: Path) -> None:
    service, file = Service(), str(tmp_path / "scores")
    for version in ("a", "a", "b"):
        assert ask(Judge(service, cache=file, version=version), item(1)) == [1.0]
    assert service.asked == [1, 1]
    with pytest.raises(SettingError, match=r"cache is .*, no file of scores"):
        Judge(service, cache=str(tmp_path))


@pytest.mark.parametrize("score", [None, {"style": 0.5, "tone": 1.0}, np.float32(0.5)])
def test_what_is_remembered_is_a_score(score: Any, tmp_path: Path) -> None:
    async def judge(trajectory: Any) -> Any:
        return score

    file = str(tmp_path / "scores")
    assert ask(Judge(judge, cache=file), item(1)) == ask(Judge(judge, cache=file), item(1)) == [score]


@pytest.mark.parametrize("wrong", ["n/a", [1.0], {1: 0.5}, float("nan"), object()])
def test_what_the_scorer_refuses_is_asked_for_again(wrong: Any) -> None:
    answers = [wrong, 1.0]

    async def judge(trajectory: Any) -> Any:
        return answers.pop(0)

    judge_ = Judge(judge)
    ask(judge_, item(1))
    assert ask(judge_, item(1)) == [1.0]


def test_a_cache_that_fails_costs_no_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service, file = Service(), tmp_path / "scores"
    judge = Judge(service, cache=str(file))
    assert ask(judge, item(1)) == [1.0]
    with sqlite3.connect(file) as other:
        other.execute("DROP TABLE scores")
    assert ask(judge, item(2), item(1), item(2)) == [2.0, 1.0, 2.0]
    assert service.asked == [1, 2]
    assert [each.getMessage() for each in caplog.records] == [
        "the judge's cache fails (no such table: scores): scores are remembered by this process alone"
    ]


def test_what_is_no_score_and_what_has_no_key_is_not_remembered() -> None:
    service = Service(ValueError("no verdict"))
    judge = Judge(service)
    (first,) = ask(judge, item(1))
    assert isinstance(first, ValueError)
    assert ask(judge, item(1)) == [1.0]
    judge = Judge(service, key=lambda trajectory: None)
    ask(judge, item(1), item(1))
    assert len(service.asked) == 4


class StatusError(Exception):
    """As httpx has it."""

    def __init__(self, code: int, after: str = "") -> None:
        super().__init__(f"{code} of the judge")
        self.response = SimpleNamespace(status_code=code, headers={"retry-after": after})


class APIConnectionError(Exception):
    """As the SDKs of OpenAI and Anthropic have it."""


@pytest.mark.parametrize(
    "error",
    [
        *(
            ConnectionRefusedError("nobody"),
            socket.gaierror(-3, "no name"),
            OSError(errno.EHOSTUNREACH, "no route"),
        ),
        OSError(
            "Multiple exceptions: [Errno 111] of ::1, [Errno 111] of 127.0.0.1"
        ),  # asyncio.open_connection
        *(StatusError(503), StatusError(429, "7"), APIConnectionError("x")),
    ],
)
def test_an_outage_makes_all_wait_that_have_not_been_asked(error: Exception) -> None:
    service = Service(error)
    answers = ask(Judge(service, concurrency=1), *map(item, range(8)))
    assert service.asked == [0]
    assert all(isinstance(each, JudgeAwayError) for each in answers)
    assert {each.wait_s for each in answers} == {7.0 if "429" in str(error) else 0.0}


def test_an_error_of_one_request_is_its_own() -> None:
    for error in (StatusError(500), OSError(errno.EIO, "disk"), FileNotFoundError("prompt.txt")):
        answers = ask(Judge(Service(error), concurrency=1), item(0), item(1))
        assert answers == [error, 1.0]


def test_a_client_that_finds_nobody_is_an_outage() -> None:
    @asynccontextmanager
    async def client() -> AsyncIterator[None]:
        raise ConnectionRefusedError("nobody")
        yield

    service = Service()
    answers = ask(Judge(lambda client, each: service(each), client=client), item(0), item(1))
    assert [type(each) for each in answers] == [JudgeAwayError] * 2
    assert service.asked == []


def test_an_answer_that_never_comes_is_an_outage() -> None:
    async def judge(trajectory: Any) -> float:
        return float(await asyncio.Event().wait())

    (away,) = ask(Judge(judge, answer_s=0.01), item(0))
    assert isinstance(away, JudgeAwayError)
    assert "no answer within 0.01 s: raise answer_s" in str(away)


def test_a_late_answer_is_an_outage_only_if_no_other_comes() -> None:
    (away,) = ask(Judge(Service(TimeoutError()), concurrency=1), item(0))
    assert isinstance(away, JudgeAwayError)

    async def judge(trajectory: Any) -> float:
        if trajectory.columns["input_ids"][1] == 0:
            await others.wait()
            raise TimeoutError("too long")
        others.set()
        return 1.0

    others = asyncio.Event()
    answers = ask(Judge(judge), item(0), item(1))
    assert answers[1] == 1.0
    assert isinstance(answers[0], TimeoutError)


def test_a_client_lasts_for_requests_made_together() -> None:
    opened: list[str] = []

    @asynccontextmanager
    async def client() -> AsyncIterator[list[str]]:
        opened.append("opened")
        yield opened
        opened.append("closed")

    async def judge(client: list[str], trajectory: Any) -> float:
        client.append("asked")
        return 1.0

    judge_ = Judge(judge, client=client, remember=0)
    assert ask(judge_, item(1), item(2)) == [1.0, 1.0]
    assert opened == ["opened", "asked", "asked", "closed"]
    assert judge_.__name__ == "judge"


async def test_a_function_of_a_group_asks_for_pairs() -> None:
    service = Service()
    judge = Judge(service, concurrency=1)
    first, second = item(1), item(2)
    assert await asyncio.gather(judge.ask(first, second), judge.ask(second, first)) == [1.0, 2.0]
    assert await judge.ask(first, second) == 1.0
    assert len(service.asked) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0, needs"),
        ({"per_minute": 0}, "per_minute is 0, needs"),
        ({"answer_s": 0}, "answer_s is 0, needs"),
        ({"remember": -1}, "remember is -1"),
    ],
)
def test_bounds_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Judge(Service(), **options)
