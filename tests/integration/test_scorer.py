"""Scorers: rewards that come between the push and the grouper."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from streamadv.batches import read_log
from streamadv.errors import SettingError, WireError
from streamadv.manifest import RunSettings
from streamadv.producer import Producer
from streamadv.scorer import Scorer
from streamadv.wire import Payload, Reference

from ..support import ended, group_all, join, ledger, problems, producing, threads, trajectory, unscored


def wait_for_rollouts(run: Any, count: int) -> None:
    """Until the scorers have passed on so many records."""
    done = threading.Event()
    while run.connection.scripts.xlen(run.keys.home.rollouts) < count:
        done.wait(0.01)


def test_two_scorers_in_their_order(redis_url: str, run: str) -> None:
    seen: list[tuple[str, list[str]]] = []

    def length(references: Sequence[Reference], payloads: Sequence[Payload]) -> list[Any]:
        seen.extend(("length", sorted(payload.columns)) for payload in payloads)
        lengths = [float(len(payload.columns["input_ids"])) for payload in payloads]
        return [
            None if reference.rollout_index == 3 else tokens
            for reference, tokens in zip(references, lengths, strict=True)
        ]

    def style(references: Sequence[Reference], payloads: Sequence[Payload]) -> list[Any]:
        seen.extend(("style", sorted(payload.columns)) for payload in payloads)
        assert {reference.reward for reference in references} <= {5, None}, "None: unscorable already"
        return [{"style": 0.25, "tone": 0.5}] * len(references)

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
    assert [member.reward for member in group.members] == [5.75, 5.75, 9.0]
    assert group.members[0].rewards == {"length": 5.0, "style": 0.25, "tone": 0.5}
    assert sorted(name for name, _ in seen) == ["length"] * 3 + ["style"] * 3
    assert all(columns == ["input_ids"] for _, columns in seen)
    assert ledger(joined)["dropped"] == {"failed": 1, "unscorable": 1}
    assert problems(joined) == []


@pytest.mark.parametrize("bad", [[float("nan")], [1.0, 2.0]])
def test_a_wrong_score_ends_the_scorer_and_loses_nothing(redis_url: str, run: str, bad: list[float]) -> None:
    with producing(redis_url, run, {"scorers": ("s",)}) as producer:
        joined = join(redis_url, run)
        producer.push([unscored("g", 0, 1)])
        with pytest.raises((WireError, SettingError), match=r"finite number|2 scores for 1"):
            Scorer(redis_url, run, "s", lease_s=0).run(lambda *_: bad, threading.Event())
        assert problems(joined) == []
        with threads(lambda stop: Scorer(redis_url, run, "s", lease_s=0).run(lambda *_: [1.0], stop)):
            wait_for_rollouts(joined, 1)
        assert group_all(joined) == ["complete"]
    assert problems(joined) == []


def test_a_scorer_must_be_one_of_the_run(redis_url: str, run: str) -> None:
    with Producer(redis_url, run), pytest.raises(SettingError, match="scorer 's' is not one of run"):
        Scorer(redis_url, run, "s")
    Scorer(redis_url, run, "s", settings=RunSettings(scorers=("s",)))
