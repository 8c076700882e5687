"""A real server of the protocol, named by STREAMADV_TINKER_URL and STREAMADV_TINKER_MODEL; skipped without.

Seen with SkyRL's of JAX (`skyrl[tinker,jax]` 0.3.0, SDK 0.24.1) and a Qwen3 of random weights, on CPU.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import AdamParams

import streamadv as sa
from streamadv.integrations.engines import Episode
from streamadv.integrations.tinker import TinkerEngine, train
from tests.docs.story import ROOT
from tests.support import join, ledger, problems, working

URL, MODEL = os.environ.get("STREAMADV_TINKER_URL"), os.environ.get("STREAMADV_TINKER_MODEL", "")
BATCHES, GROUPS, SIZE = 8, 2, 4
pytestmark = [
    pytest.mark.skipif(URL is None, reason="STREAMADV_TINKER_URL names no server"),
    *(pytest.mark.server, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)),
]


def service(at: str | None) -> tinker.ServiceClient:
    assert at is not None
    return tinker.ServiceClient(base_url=at, api_key="tml-dummy")


def job(at: str, model: str, url: str, run: str, folder: str, batches: int) -> None:
    """A trainer that ends after so many batches, without a word."""
    client = service(at).create_lora_training_client(base_model=model, rank=8)
    queue = sa.TrainerQueue(url, run, batch_groups=GROUPS, max_staleness=1)

    def log(version: int, figures: object) -> None:
        print(version, figures, flush=True)
        if version == batches:
            os._exit(9)

    adam = AdamParams(learning_rate=2e-2)
    train(
        queue,
        client,
        folder,
        adam=adam,
        divide_by=None,
        weights=True,
        save_every=2,
        max_batches=BATCHES,
        log=log,
    )
    queue.finish()


async def play(url: str, run: str) -> list[float]:
    """Rewards of the rollouts: the share of even tokens."""
    rewards = []
    async with sa.Producer(url, run=run) as producer:
        engine = TinkerEngine(service(URL), max_tokens=6)
        await asyncio.to_thread(engine.refresh, await producer.wait_for_weights())
        async for group in producer.groups(SIZE):
            await asyncio.to_thread(engine.refresh, producer.weights)
            for rollout in group:
                episode = Episode([3, 4, 5])
                episode.add(await engine.complete(episode.tokens))
                reward = float(np.mean([token % 2 == 0 for token in episode.tokens[3:]]))
                await rollout.push(**episode.record(), reward=reward)
                rewards.append(reward)
    return rewards


def test_a_model_learns_and_its_killed_trainer_goes_on(redis_url: str, run: str, tmp_path: Path) -> None:
    with sa.Producer(redis_url, run=run):  # makes the run
        joined = join(redis_url, run)

    def trainer(batches: int) -> int:
        given = (URL, MODEL, redis_url, run, str(tmp_path), batches)
        code = f"from {__name__} import job; job(*{given!r})"
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode

    async def all_of_it() -> list[float]:
        playing = asyncio.create_task(play(redis_url, run))
        assert await asyncio.to_thread(trainer, 5) == 9  # one batch beyond its last checkpoint
        assert await asyncio.to_thread(trainer, 0) == 0
        return await playing

    with working(joined):
        rewards = asyncio.run(all_of_it())
    print(rewards)
    counted = ledger(joined)
    assert counted["trained"] == BATCHES * GROUPS * SIZE, counted
    assert np.mean(rewards[-16:]) > np.mean(rewards[:16])
    assert problems(joined) == []
