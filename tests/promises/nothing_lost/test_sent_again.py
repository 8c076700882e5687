"""What is sent again to a server that has lost it comes in an order, and from producers, that lose nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

import streamadv as sa
from streamadv.producer import async_producer as async_module
from streamadv.producer import producer as producer_module
from streamadv.status import read_status
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    delivered_batch,
    ends,
    group_all,
    heartbeat,
    join,
    ledger,
    problems,
    producing,
    trajectory,
    unscored,
)

from .test_server_restart import restart

pytestmark = pytest.mark.server


def test_a_touch_is_sent_again_after_what_opens_its_group(forgetful: EmbeddedServer, run: str) -> None:
    """Begin, touch, push: the server loses all of it."""
    with producing(forgetful.url, run, {"group_deadline_s": 3.0}) as producer:
        group = producer.begin_group(2, group_id="long")
        assert group.touch(600)
        group.push([{"rollout_index": 0, "input_ids": [1], "response_mask": [1], "reward": 1.0}])
        restart(forgetful)
        heartbeat(producer)
        joined = join(forgetful.url, run)
        producer.begin_group(2, group_id="short")
        one, two = (
            joined.connection.scripts.zscore(joined.keys.home.open, name) for name in ("long", "short")
        )
        assert (one - two) / 1000 > 500


def test_a_score_is_sent_again_after_its_trajectory(forgetful: EmbeddedServer, run: str) -> None:
    """The reward is there before its trajectory: the server loses both."""
    with producing(forgetful.url, run) as producer:
        group = producer.begin_group(1, group_id="g")
        assert producer.score("g", 0, 0.5) == "scored"
        assert group.push([unscored("g", 0, 1)]).codes == ["pushed"]
        restart(forgetful)
        heartbeat(producer)
        assert group_all(join(forgetful.url, run)) == ["complete"]


def test_a_score_waits_for_the_producer_that_brings_its_group_back(
    forgetful: EmbeddedServer, run: str
) -> None:
    """Another process brings the reward, and hears first that the server was replaced."""
    with producing(forgetful.url, run) as producer, producing(forgetful.url, run) as judge:
        producer.push([unscored("g", 0, 1)])
        assert judge.score("g", 0, 0.5) == "scored"
        restart(forgetful)
        heartbeat(judge)
        heartbeat(producer)
        heartbeat(judge)
        joined = join(forgetful.url, run)
        assert ledger(joined)["pushed"] == 1
        assert group_all(joined) == ["complete"]


def test_a_score_that_finds_no_group_after_a_loss_is_brought_again(
    forgetful: EmbeddedServer, run: str
) -> None:
    """It is brought to a server that has lost the trajectory: the answer is `unknown`, and nobody brings it again."""
    with producing(forgetful.url, run) as producer, producing(forgetful.url, run) as judge:
        producer.push([unscored("g", 0, 1)])
        restart(forgetful)
        heartbeat(judge)
        said = judge.score("g", 0, 0.5)
        heartbeat(producer)
        heartbeat(judge)
        assert said == "scored" or group_all(join(forgetful.url, run)) == ["complete"]


@pytest.mark.parametrize("first", ["plain", "ticket"])
def test_a_group_comes_back_with_all_its_slots(forgetful: EmbeddedServer, run: str, first: str) -> None:
    """A group with redundancy of its own; a record of it is pushed without a ticket, and comes back first."""
    with producing(forgetful.url, run) as producer, producing(forgetful.url, run) as other:
        group = producer.begin_group(2, group_id="g", redundancy=2)
        assert other.push([trajectory("g", 0, 2)]).codes == ["pushed"]
        assert group.push([trajectory("g", 3, 2)]).codes == ["pushed"]
        restart(forgetful)
        for each in (other, producer) if first == "plain" else (producer, other):
            heartbeat(each)
        joined = join(forgetful.url, run)
        assert ledger(joined)["pushed"] == 2
        assert problems(joined) == []


@pytest.mark.parametrize("first", ["who cancels", "who pushes"])
def test_a_cancellation_is_repeated_for_its_own_slots(
    forgetful: EmbeddedServer, run: str, first: str
) -> None:
    """Sent again, `cancel(count)` takes the slot of a trajectory that is still to be sent again by another process."""
    with producing(forgetful.url, run) as producer, producing(forgetful.url, run) as other:
        mine = producer.begin_group(3, group_id="g", redundancy=1)
        others = other.begin_group(3, group_id="g", redundancy=1)
        assert others.push([trajectory("g", 3, 3)]).codes == ["pushed"]
        assert list(mine.cancel(1).indices) == [2]
        assert mine.push([trajectory("g", index, 3) for index in (0, 1)]).codes == ["pushed"] * 2
        restart(forgetful)
        for each in (producer, other) if first == "who cancels" else (other, producer):
            heartbeat(each)
        assert group_all(join(forgetful.url, run)) == ["complete"]


def test_a_cancellation_that_found_fewer_slots_is_sent_again(forgetful: EmbeddedServer, run: str) -> None:
    """Fewer slots are free than were to be cancelled: those that were are lost with the server's last writes."""
    with producing(forgetful.url, run) as producer, producing(forgetful.url, run) as other:
        mine = producer.begin_group(2, group_id="g")
        assert other.push([trajectory("g", 1, 2)]).codes == ["pushed"]
        with pytest.raises(sa.errors.TrajectoryError):
            mine.cancel(2)  # slot 0 is cancelled
        restart(forgetful)
        heartbeat(producer)
        heartbeat(other)
        assert group_all(join(forgetful.url, run)) == ["incomplete"]


def test_a_finished_producer_is_open_again_after_an_interrupted_begin(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finish; the next begin is interrupted while it says `open`; later ones do not say it."""
    run_script = producer_module.run_script
    said: list[str] = []

    def ask(client: Any, call: Any) -> Any:
        if call.script.name == "heartbeat" and not said and "open" in map(str, call.arguments):
            said.append("interrupted")
            raise KeyboardInterrupt
        return run_script(client, call)

    with producing(redis_url, run) as producer:
        joined = join(redis_url, run)
        producer.finish()
        monkeypatch.setattr(producer_module, "run_script", ask)
        with pytest.raises(KeyboardInterrupt):
            producer.begin_group(1)
        assert said
        options: Any = {"batch_groups": 1, "prefetch": 0, "commit": "each_batch"}
        with TrainerQueue(redis_url, run, **options) as queue:
            next(iter(producer.begin_group(1))).push(input_ids=[1, 2], response_mask=[0, 1], reward=1.0)
            heartbeat(producer)
            queue.trained(delivered_batch(queue, joined))
            assert not ends(queue), "the producer is open, and plays another group"


def test_a_finished_producer_is_open_again_after_a_cancelled_begin(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same by a timeout of asyncio."""
    run_script = async_module.run_script_async
    hangs = [False]

    async def ask(client: Any, call: Any) -> Any:
        if hangs[0] and call.script.name == "heartbeat":
            await asyncio.sleep(3600)
        return await run_script(client, call)

    async def main() -> list[str]:
        async with sa.Producer(redis_url, run) as producer:
            await producer.finish()
            monkeypatch.setattr(async_module, "run_script_async", ask)
            hangs[0] = True
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await producer.begin_group(1)
            hangs[0] = False
            group = await producer.begin_group(1)
            await producer._drive(producer._logic.heartbeat())
            status = await asyncio.to_thread(lambda: read_status(join(redis_url, run)))
            await group.cancel(1)
            return [each.state for each in status.producers]

    assert asyncio.run(main()) == ["open"]
