"""`producer.groups` on a real server: how often it asks, blocking and asyncio."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from streamadv.producer import Producer
from streamadv.store.connection import Connection
from tests.support import group_all, join, ledger, problems

COUNT = 30


def whole(group: Any) -> list[dict[str, Any]]:
    return [
        {"rollout_index": index, "input_ids": [1], "response_mask": [1], "reward": 1.0}
        for index in range(group.size)
    ]


def test_a_group_costs_one_round_trip(redis_url: str, run: str) -> None:
    with Connection(redis_url) as connection, Producer(redis_url, run) as producer:

        def reads() -> int:
            stats: dict[str, Any] = connection.scripts.info("stats")
            return int(stats["total_reads_processed"])

        counts = []
        for ahead in (0, 1):
            before = reads()
            for group in islice(producer.groups(2, ahead=ahead), COUNT):
                group.push(whole(group))
            counts.append(reads() - before)
    assert counts[0] - counts[1] >= COUNT // 2
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
