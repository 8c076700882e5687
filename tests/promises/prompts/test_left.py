"""What a producer has leased or begun when it leaves, or is lost, is there for others, whatever a server loses."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

import streamadv as sa
import streamadv.producer.logic
from streamadv.grouping import housekeeping
from streamadv.producer import Producer
from streamadv.producer import producer as producer_module
from streamadv.run import RunSettings
from streamadv.run.heartbeats import PRODUCER_TIMEOUT_S
from streamadv.status import read_status
from streamadv.store.embedded import EmbeddedServer
from tests.support import Forward, heartbeat, join, producing

from .test_once import SIZE, prompts, stored

pytestmark = pytest.mark.server


class Past:
    """A server's folder, and what it was at some moment."""

    def __init__(self, path: Path) -> None:
        self.data, self.copy = path / "data", path / "copy"

    def note(self) -> None:
        shutil.copytree(self.data, self.copy)

    def back(self, server: EmbeddedServer) -> None:
        server.kill()
        shutil.rmtree(self.data)
        self.copy.rename(self.data)
        server.start()


@pytest.mark.slow
def test_a_lease_is_given_back_again_after_a_loss(
    tmp_path: Path, run: str, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grouper has given back a lost producer's prompts; the server loses that."""
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 3600.0)
    past = Past(tmp_path)
    with EmbeddedServer(past.data, appendfsync="always") as server, ExitStack() as stack:
        killed = stack.enter_context(Producer(server.url, run, name="engine"))
        iterator = killed.prompts(prompts(epochs=1), SIZE)
        next(iterator)
        with Producer(server.url, run) as other:
            joined = join(server.url, run)
            rounds = housekeeping.Housekeeping(joined)
            for _ in range(5):
                rounds.round()
                forward(PRODUCER_TIMEOUT_S / 5)
                heartbeat(other)
            assert len(stored(joined).of("-")) == 0
            past.note()
            rounds.round()
            assert len(stored(joined).of("-")) == 1
            past.back(server)
            for _ in range(12):
                rounds.round()
                forward(PRODUCER_TIMEOUT_S / 5)
                heartbeat(other)
            assert len(stored(joined).of("-")) == 1


@pytest.mark.slow
def test_groups_of_a_lost_producer_stop_counting_again_after_a_loss(
    tmp_path: Path, run: str, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grouper has said that a lost producer's groups do not count; the server loses that."""
    monkeypatch.setattr(streamadv.producer.logic, "HEARTBEAT_S", 3600.0)
    past = Past(tmp_path)
    with EmbeddedServer(past.data, appendfsync="always") as server, ExitStack() as stack:
        settings = RunSettings(batch_groups=2, max_staleness=1)
        killed = stack.enter_context(Producer(server.url, run, settings=settings))
        for _ in range(4):
            killed.begin_group(2, timeout=0)
        joined = join(server.url, run)
        rounds = housekeeping.Housekeeping(joined)
        for _ in range(5):
            rounds.round()
            forward(PRODUCER_TIMEOUT_S / 5)
        past.note()
        rounds.round()
        assert read_status(joined).groups.abandoned == 4
        rounds.round()  # a second later: nothing is left to do
        past.back(server)
        for _ in range(12):
            rounds.round()
            forward(PRODUCER_TIMEOUT_S / 5)
        assert read_status(joined).groups.abandoned == 4


@pytest.mark.parametrize("way", ["break", "error", "terminated"])
def test_an_asyncio_producer_gives_back_its_prompts_as_it_leaves(redis_url: str, run: str, way: str) -> None:
    """The loop over prompts is left, and with it the producer: what was leased and not begun is for others."""
    many = sa.Prompts(list(range(2000)), epochs=1)

    async def main() -> None:
        async with sa.Producer(redis_url, run) as producer:
            async for _, group in producer.prompts(many, SIZE):
                await group.cancel(len(group))
                if way == "break":
                    break
                if way == "error":
                    raise RuntimeError
                task = asyncio.current_task()
                assert task is not None
                task.cancel()  # as asyncio.run does on a signal
                await asyncio.sleep(1)

    with suppress(RuntimeError, asyncio.CancelledError):
        asyncio.run(main())
    owned = [entry for entry in stored(join(redis_url, run)).entries.values() if entry.count(" ") > 2]
    assert len(owned) <= 1, owned[:2]


@pytest.mark.parametrize(("way", "most"), [("kept in a variable", 1), ("server away", 1), ("thread", 20)])
def test_a_blocking_producer_gives_back_its_prompts_as_it_leaves(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, way: str, most: int
) -> None:
    """What a blocking iterator has leased and not begun, when it cannot give it back at once."""
    many = sa.Prompts(list(range(2000)), epochs=1)
    run_script = producer_module.run_script

    def ask(client: Any, call: Any) -> Any:
        if call.script.name == "leave_prompts":
            raise redis.exceptions.ConnectionError("away")
        return run_script(client, call)

    with Producer(redis_url, run) as producer:
        if way == "thread":
            began = threading.Event()

            def loop() -> None:
                with suppress(sa.errors.ProducerClosedError):
                    for _, group in producer.prompts(many, SIZE):
                        group.cancel(len(group))
                        began.set()
                        threading.Event().wait(0.05)

            thread = threading.Thread(target=loop)
            thread.start()
            began.wait()
        else:
            groups = producer.prompts(many, SIZE)
            _, group = next(groups)
            group.cancel(len(group))
        if way == "server away":
            monkeypatch.setattr(producer_module, "run_script", ask)
            groups.close()
            monkeypatch.setattr(producer_module, "run_script", run_script)
            heartbeat(producer)
    if way == "thread":
        thread.join()
    owned = [entry for entry in stored(join(redis_url, run)).entries.values() if entry.count(" ") > 2]
    assert len(owned) <= most


def test_a_loop_over_prompts_plays_what_another_one_of_its_producer_has_not_begun(
    redis_url: str, run: str
) -> None:
    """Somebody asked that one for a prompt, which leases several, and asks for no more."""
    with producing(redis_url, run) as producer:
        many = sa.Prompts(list(range(400)), epochs=1)
        left, other = producer.prompts(many, SIZE), producer.prompts(many, SIZE)
        first = next(left)[1].group_id
        assert len(stored(join(redis_url, run)).entries) > 1
        ids = [next(other)[1].group_id for _ in range(399)]
    assert len({first, *ids}) == 400
