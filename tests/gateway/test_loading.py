"""`--load-weights`: engines get the trainer's weights, and rows name the version that has sampled them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamadv as sa
from streamadv import weights
from streamadv.errors import ServerUnreachableError
from streamadv.gateway import engines as engines_module
from streamadv.gateway.engines import Engines
from streamadv.gateway.loading import Loading
from tests.unit.integrations.fake_engine import serving

from .engine import Engine
from .play import Playing, playing, pushed

pytestmark = pytest.mark.server
STEPS = ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"]
STEPS += ["/update_weight_version", "/resume"]


class Loaded(Engine):
    """Has weights: those of a file with one number, and says it."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: f"{self.number:g}")
        self.number, self.version, self.is_paused = -1.0, "default", False
        self.steps: list[str] = []
        self.refuses: str | None = None

    def start_anew(self) -> None:
        self.number, self.version, self.is_paused = -1.0, "default", False

    def info(self, path: str) -> dict[str, Any]:
        return {"weight_version": self.version} if path == "/weight_info" else super().info(path)

    def sample(self, prompt: Any, limit: int | None) -> Any:
        assert not self.is_paused
        return super().sample(prompt, limit)

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        if path not in STEPS:
            return super().answer(path, asked)
        self.steps.append(path)
        if path == self.refuses:
            raise ConnectionResetError("not now")
        if path == STEPS[0]:
            self.is_paused = True
        elif path == STEPS[1]:
            assert self.is_paused
            (file,) = Path(asked["kwargs"]["weights_path"]).glob("*.safetensors")
            weights.load(file, lambda tensors: setattr(self, "number", float(tensors["w"][0])))
        elif path == STEPS[3]:
            self.version = asked["new_version"]
        elif path == STEPS[4]:
            self.is_paused = False
        return {}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.02)
    monkeypatch.setattr(engines_module, "PAUSE_S", 0.02)


def published(folder: Path, version: int, kind: str = "file") -> str:
    """Weights of a version: the number 10 * version + 5."""
    uri = weights.publish(folder, version, {"w": np.full(1, 10.0 * version + 5, "f4")})
    if kind == "file":
        return uri
    own = folder / f"version-{version}"
    own.mkdir()
    weights.path_of(folder, version).rename(own / "model.safetensors")
    return own.as_uri()


@asynccontextmanager
async def loading(
    redis_url: str, run: str, *engines: Engine
) -> AsyncIterator[tuple[Playing, sa.TrainerQueue]]:
    queue = sa.TrainerQueue(redis_url, run, batch_groups=1, chain="grpo")
    async with playing(redis_url, run, *engines, load_weights=True, mode="chat") as gateway:
        try:
            yield gateway, queue
        finally:
            await asyncio.to_thread(queue.close)


async def told(queue: sa.TrainerQueue, uri: str) -> None:
    await asyncio.to_thread(queue.open, weights=uri)


async def until(gateway: Playing, version: int) -> None:
    while any(engine.version != version for engine in gateway.front._engines.all):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["file", "folder"])
async def test_engines_get_the_newest_weights(redis_url: str, run: str, tmp_path: Path, kind: str) -> None:
    with serving(Loaded()) as first, serving(Loaded()) as second:
        assert isinstance(first, Loaded)
        assert isinstance(second, Loaded)
        async with loading(redis_url, run, first, second) as (gateway, queue):
            await told(queue, published(tmp_path, 0, kind))
            rollouts = await gateway.begin(4)
            said = await asyncio.gather(*(gateway.say(rollout, "hello") for rollout in rollouts))
            assert set(said) == {"5"}  # a turn waits for the first weights
            assert first.steps == second.steps == STEPS
            for rollout in rollouts:
                await gateway.end(rollout, reward=1.0)
    for rows in pushed(redis_url, run).values():
        assert {v for v in rows.rows[0]["versions"] if v >= 0} == {0}


async def test_an_engine_that_was_started_anew_gets_them_again(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    with serving(Loaded()) as engine:
        assert isinstance(engine, Loaded)
        async with loading(redis_url, run, engine) as (gateway, queue):
            await told(queue, published(tmp_path, 0))
            (rollout,) = await gateway.begin()
            assert await gateway.say(rollout, "hello") == "5"
            engine.start_anew()
            while engine.steps != STEPS * 2:  # noqa: ASYNC110  another process has no event
                await asyncio.sleep(0.01)
            assert await gateway.say(rollout, "hello", "5", "again") == "5"


@pytest.mark.parametrize("step", STEPS)
async def test_an_engine_that_fails_at_a_step_is_tried_again_and_samples_nothing_in_between(
    redis_url: str, run: str, tmp_path: Path, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Loaded()) as engine, caplog.at_level(logging.WARNING):
        assert isinstance(engine, Loaded)
        async with loading(redis_url, run, engine) as (gateway, queue):
            engine.refuses = step
            await told(queue, published(tmp_path, 0))
            while engine.steps.count(step) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert engine.is_paused == (step != STEPS[0])
            engine.refuses = None
            while engine.is_paused or engine.version != "0":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (rollout,) = await gateway.begin()
            assert await gateway.say(rollout, "hello") == "5"
    (line,) = [r for r in caplog.records if "does not load" in r.getMessage()]
    assert "VLLM_SERVER_DEV_MODE=1" in line.getMessage()


async def test_weights_that_are_not_there_leave_the_engine_as_it_is(
    redis_url: str, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Loaded()) as engine, caplog.at_level(logging.WARNING):
        assert isinstance(engine, Loaded)
        async with loading(redis_url, run, engine) as (gateway, queue):
            await told(queue, (tmp_path / "nowhere").as_uri())
            while "is not there" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert engine.steps == []
            await told(queue, published(tmp_path, 0))
            await until(gateway, 0)


async def test_a_look_for_weights_that_fails_is_told_once(
    redis_url: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with sa.Producer(redis_url, run) as producer:
        loading, engines = Loading(producer), Engines(["http://127.0.0.1:1"])
        is_away = iter((True, True, False, True))
        heartbeat = producer._logic.membership.send_heartbeat

        def send_heartbeat(state: str = "") -> Any:
            if next(is_away, False):
                raise ServerUnreachableError("the server is away")
            return heartbeat(state)

        producer._logic.membership.send_heartbeat = send_heartbeat  # type: ignore[method-assign]
        for _ in range(4):
            await loading.look(engines)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in told] == [
        "no look for weights, tries again: the server is away"
    ] * 2
