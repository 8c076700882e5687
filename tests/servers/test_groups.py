"""`producer.groups` on a real server: how often it asks, blocking and asyncio."""

from __future__ import annotations

import threading
from itertools import islice
from typing import Any

import pytest

from streamadv.producer import Producer
from streamadv.producer import producer as producer_module
from tests.support import group_all, join, ledger, problems

COUNT = 30


def whole(group: Any) -> list[dict[str, Any]]:
    return [
        {"rollout_index": index, "input_ids": [1], "response_mask": [1], "reward": 1.0}
        for index in range(group.size)
    ]


def test_a_group_costs_one_round_trip(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []  # for an answer of the server, of the thread that pushes
    pushing = threading.current_thread()

    def counted(name: str) -> Any:
        send: Any = getattr(producer_module, name)

        def wait(*args: Any) -> Any:
            if threading.current_thread() is pushing:
                waits.append(name)
            return send(*args)

        return wait

    for name in ("run_script", "run_transaction"):
        monkeypatch.setattr(producer_module, name, counted(name))
    with Producer(redis_url, run) as producer:
        counts = []
        for ahead in (0, 1):
            waits.clear()
            for group in islice(producer.groups(2, ahead=ahead), COUNT):
                group.push(whole(group))
            counts.append(len(waits))
    assert 2 * COUNT <= counts[0] <= 2 * COUNT + 5  # the first one learns of the run
    assert counts[1] == COUNT + COUNT // 2
    joined = join(redis_url, run)
    group_all(joined, count=1000)
    assert ledger(joined)["pushed"] == 2 * 2 * COUNT
    assert problems(joined) == []


@pytest.mark.parametrize("ahead", [0, 1])
async def test_by_asyncio(redis_url: str, run: str, ahead: int) -> None:
    async with Producer(redis_url, run) as producer:
        pushed = 0
        async for group in producer.groups(2, ahead=ahead):
            pushed += (await group.push(whole(group))).count("pushed")
            if pushed == 2 * COUNT:
                break
    joined = join(redis_url, run)
    group_all(joined, count=1000)
    group_all(joined, count=1000)
    assert ledger(joined)["pushed"] == 2 * COUNT
    assert problems(joined) == []
