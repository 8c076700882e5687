"""Rollouts of an inference engine: what it refuses is one failed rollout, and nothing is lost track of."""

from __future__ import annotations

from collections.abc import Sequence

import streamadv as sa
from streamadv.integrations.engines import EngineClient, Episode
from tests.support import group_all, join, ledger, problems
from tests.unit.integrations.fake_engine import ROLES, FakeEngine, serving


async def test_rollouts_of_an_engine_that_fails_fail_alone(redis_url: str, run: str) -> None:
    async def play(rollout: sa.AsyncRollout, found: EngineClient) -> None:
        episode = Episode([ROLES["user"], rollout.rollout_index])
        episode.add(await found.complete(episode.tokens, stop=[str(rollout.rollout_index)]))
        assert await rollout.push(**episode.record(), reward=1.0) == "pushed"

    def picky(prompt: Sequence[int]) -> str:
        return "x" * (1 + prompt[-1])

    with serving(FakeEngine(picky)) as engine:
        engine.refusals = [400]
        async with EngineClient(engine.url) as found, sa.Producer(redis_url, run) as producer:
            async with producer.group(size=4) as group:
                await group.run(play, found)
            assert len(group.failures) == 1
            assert all("EngineError" in why for why in group.failures.values())
    joined = join(redis_url, run)
    group_all(joined)
    assert ledger(joined)["dropped"] == {"failed": 1, "incomplete": 3}
    assert problems(joined) == []
