"""Tokens mode: rows stay whole before an engine whose template writes answers otherwise, and versions are per token."""

from __future__ import annotations

import pytest

from tests.unit.integrations.fake_engine import serving

from .engine import Engine, talkative
from .play import playing, pushed

pytestmark = pytest.mark.server


@pytest.mark.parametrize(("mode", "rows"), [("tokens", 1), ("auto", 1), ("chat", 3)])
async def test_a_template_that_drifts(redis_url: str, run: str, mode: str, rows: int) -> None:
    engine = talkative()
    assert isinstance(engine, Engine)
    engine.drifts = True
    with serving(engine):
        async with playing(redis_url, run, engine, mode=mode) as gateway:
            (rollout,) = await gateway.begin()
            said: list[str] = []
            for number in range(3):
                said.append(f"question {number}")
                said.append(await gateway.say(rollout, *said, max_tokens=5 if number == 1 else None))
            assert (await gateway.end(rollout, reward=1.0))[1]["rows"] == rows
    (found,) = pushed(redis_url, run).values()
    heard = engine.said[1:] if mode == "tokens" and len(engine.said) > 3 else engine.said
    assert [token for ids, _ in found.sampled for token in ids] == [
        token for _, ids, _ in heard[-3:] for token in ids
    ]


async def test_each_token_has_the_version_that_sampled_it(redis_url: str, run: str) -> None:
    engine = talkative()
    assert isinstance(engine, Engine)
    engine.versions = [(7, 0.5), (8, 0.5)]
    with serving(engine):
        async with playing(redis_url, run, engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            await gateway.say(rollout, "hello")
            await gateway.end(rollout, reward=1.0)
    (found,) = pushed(redis_url, run).values()
    (row,) = found.rows
    versions = [version for version, mask in zip(row["versions"], row["response_mask"], strict=True) if mask]
    half = round(len(versions) / 2)
    assert versions == [7] * half + [8] * (len(versions) - half)
