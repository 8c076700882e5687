"""Columns of a group: stored once, delivered with each of its rows, ended with the group however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import streamadv as sa
from streamadv.errors import Busy, TrajectoryError
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    delivered_batch,
    group_all,
    heartbeat,
    join,
    ledger,
    logged,
    make_overdue,
    payload_keys,
    problems,
    producing,
)

PAGE = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)  # two images
COLUMNS = {"images": PAGE, "prompt_state": np.array([0.5, -0.5], np.float32)}


def record(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1], "reward": 1.0, **fields}


def play(producer: Producer, group_id: str, size: int = 2, **options: Any) -> None:
    with producer.group(size, group_id=group_id, **options) as group:
        for rollout in group:
            rollout.push(**record(reward=float(rollout.rollout_index)))


def stored(run: Run) -> int:
    """Payloads that are there; nothing that the run does not account for."""
    group_all(run)
    assert problems(run) == []
    return len(payload_keys(run))


def test_a_row_of_text_and_a_page_of_images_in_one_batch(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        play(producer, "page", columns=COLUMNS)
        play(producer, "text")
    queue = TrainerQueue(fake, "r", batch_groups=2, prefetch=0)
    run = join(fake, "r")
    [mb] = batch = delivered_batch(queue, run)
    assert mb.optional == {"images", "prompt_state"}
    for row, reference in enumerate(mb.references):
        images, state = mb.extras["images"][row], mb.extras["prompt_state"][row]
        if reference.group_id == "page":
            assert np.array_equal(images, PAGE)
            assert state.tolist() == [0.5, -0.5]
            assert (images.dtype, state.dtype) == (np.uint8, np.float32)
        else:
            assert (images, state) == (None, None)
        assert mb.has["images"][row].item() == (reference.group_id == "page")
    first, second = (
        mb.extras["images"][row] for row, one in enumerate(mb.references) if one.group_id == "page"
    )
    assert first is second  # fetched once
    queue.trained(batch)
    queue.commit(queue.state_dict())
    assert stored(run) == 0
    assert ledger(run)["trained"] == 4


@pytest.mark.server
def test_asyncio_brings_the_same(redis_url: str, run: str) -> None:
    async def push() -> None:
        async with (
            sa.Producer(redis_url, run) as producer,
            producer.group(2, group_id="page", columns=COLUMNS) as group,
        ):
            for rollout in group:
                await rollout.push(**record())

    asyncio.run(push())
    joined = join(redis_url, run)
    group_all(joined)
    columns = logged(joined)["page"].columns
    assert columns is not None
    assert columns.names == ("images", "prompt_state")


def test_what_a_rollout_brings_itself_stands_before_the_groups(fake: Connection) -> None:
    with producing(fake, "r") as producer, producer.group(2, columns={"box": [1, 2]}) as group:
        first, second = group
        first.push(**record(box=[3, 4]))
        second.push(**record())
    [mb] = delivered_batch(TrainerQueue(fake, "r", batch_groups=1, prefetch=0), join(fake, "r"))
    assert {
        one.rollout_index: box.tolist() for one, box in zip(mb.references, mb.extras["box"], strict=True)
    } == {
        0: [3, 4],
        1: [1, 2],
    }
    assert mb.optional == set()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ([1], "columns is a list, needs a mapping"),
        ({"input_ids": [1]}, "'input_ids' has a value for each token"),
        ({"values": [1.0]}, "'values' has a value for each token"),
        ({"two words": [1]}, "'two words' is no column name"),
        ({"box": "red"}, "extra column box"),
        ({"box": []}, "'box' is empty"),
        ({"box": {"data": [1], "per_token": True}}, "'box' is stated to be per token"),
        ({"box": np.zeros(5000, np.uint8)}, "columns have 5000 bytes, max_trajectory_bytes is 4096"),
    ],
)
def test_wrong_columns_open_no_group(fake: Connection, columns: Any, problem: str) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": 4096}) as producer:
        with pytest.raises(TrajectoryError) as error:
            producer.begin_group(2, columns=columns)
        assert problem in str(error.value)
    assert join(fake, "r").counters()["groups_open"] == 0


@pytest.mark.parametrize("columns", [None, {}, {"images": None}])
def test_no_columns_are_none(fake: Connection, columns: Any) -> None:
    with producing(fake, "r") as producer:
        play(producer, "g", columns=columns)
    run = join(fake, "r")
    assert stored(run) == 2
    assert logged(run)["g"].columns is None


def test_a_name_has_one_form_in_the_run(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        play(producer, "a", columns={"box": np.zeros((1, 4), np.float32)})
        with pytest.raises(TrajectoryError, match="extra column box has dtype int16"):
            producer.begin_group(2, columns={"box": np.zeros((1, 4), np.int16)})
        play(producer, "b", columns={"box": [[1, 2, 3, 4], [5, 6, 7, 8]]})  # as many entries as it likes


def test_their_bytes_count_in_the_budget(fake: Connection) -> None:
    settings = {"max_trajectory_bytes": 300_000, "max_bytes": 1 << 20}
    with producing(fake, "r", settings) as producer:
        box = np.zeros(250_000, np.uint8)
        producer.begin_group(2, columns={"box": box}, timeout=0)
        with pytest.raises(Busy):  # 850,000 of 1,048,576
            producer.begin_group(1, timeout=0)
        assert stored(join(fake, "r")) == 1


@pytest.mark.parametrize("end", ["cancel", "fail", "late", "unplayed"])
def test_a_group_that_is_dropped_takes_them_along(fake: Connection, end: str) -> None:
    run_of = producing(fake, "r", {"keep_bytes": 0})
    with run_of as producer:
        run = join(fake, "r")
        group = producer.begin_group(2, group_id="g", columns=COLUMNS)
        assert stored(run) == 1
        if end == "cancel":
            group.cancel(2)
        elif end == "fail":
            for rollout in group:
                rollout.fail()
        elif end == "late":
            next(iter(group)).push(**record())
            make_overdue(run, "g")
        else:
            holders: Any = fake.scripts.hget(run.keys.shards[0].group("g"), "holders")
            run.shards[0].call("withdraw", ["g", holders], group="g")
        group_all(run)
        assert stored(run) == 0
        assert run.counters()["groups_open"] == 0


def test_a_filtered_group_takes_them_along(fake: Connection) -> None:
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        with producer.group(2, columns=COLUMNS) as group:
            for rollout in group:
                rollout.push(**record())
        run = join(fake, "r")
        group_all(run)
        assert stored(run) == 0


def test_a_group_that_has_lost_them_is_a_dead_letter(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        play(producer, "g", columns=COLUMNS)
    run = join(fake, "r")
    group_all(run)
    group = logged(run)["g"]
    assert group.columns is not None
    fake.scripts.unlink(group.columns.key)
    queue = TrainerQueue(fake, "r", batch_groups=1, prefetch=0)
    assert not delivered_batch(queue, run)
    letter: Any = fake.scripts.hgetall(run.keys.shards[0].dead_group("g"))
    assert b"group's columns: payload is gone" in letter[b"detail"]
    assert ledger(run)["dead"] == {"undecodable": 2}
    assert problems(run, deep=False) == []


def test_a_dead_group_comes_back_with_them(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        play(producer, "g", columns=COLUMNS)
    run = join(fake, "r")
    group_all(run)
    group = logged(run)["g"]
    run.shards[0].call("set_trainer", ["1 1-aa", 0, "", "", "", "", "", ""])
    run.shards[0].call(
        "dead_letter_group",
        ["1 1-aa", group.entry, "g", "", "undecodable", "test", 2, group.size_bytes],
        dead_group="g",
    )
    assert problems(run) == []
    assert len(payload_keys(run)) == 3
    run.shards[0].call("requeue", ["g"], dead_group="g")
    [back] = logged(run).values()
    assert back.columns == group.columns
    assert problems(run) == []
    letter = ["1 1-aa", back.entry, "g", "", "undecodable", "test", 2, group.size_bytes]
    run.shards[0].call("dead_letter_group", letter, dead_group="g")
    run.shards[0].call("empty_dead", ["purge", -1, "g"], letters=[run.keys.shards[0].dead_group("g")])
    assert stored(run) == 0


@pytest.mark.server
@pytest.mark.parametrize("first", ["player", "beginner"])
def test_a_server_that_has_lost_them_gets_them_again(forgetful: EmbeddedServer, first: str) -> None:
    """Whoever sends its part first: the group waits for its columns."""
    with producing(forgetful.url, "r") as beginner, producing(forgetful.url, "r") as player:
        heartbeat(beginner)
        heartbeat(player)
        group = beginner.begin_group(2, group_id="g", columns=COLUMNS)
        for ticket in group.tickets:
            player.rollout(sa.Ticket.from_json(ticket.to_json())).push(**record())
        forgetful.kill()
        forgetful.start()
        order = [player, beginner] if first == "player" else [beginner, player]
        heartbeat(order[0])
        run = join(forgetful.url, "r")
        group_all(run)
        assert "g" not in logged(run)
        assert problems(run) == []
        heartbeat(order[1])
        group_all(run)
        columns = logged(run)["g"].columns
        assert columns is not None
        assert columns.size == PAGE.nbytes + 8
        assert stored(run) == 3


@pytest.mark.server
def test_a_group_that_never_gets_them_ends_at_its_deadline(forgetful: EmbeddedServer) -> None:
    with (
        producing(forgetful.url, "r", {"partial_min_usable": 1, "keep_bytes": 0}) as beginner,
        producing(forgetful.url, "r") as player,
    ):
        heartbeat(player)
        group = beginner.begin_group(2, group_id="g", columns=COLUMNS)
        for ticket in group.tickets:
            player.rollout(sa.Ticket.from_json(ticket.to_json())).push(**record())
        forgetful.kill()
        forgetful.start()
        heartbeat(player)
        run = join(forgetful.url, "r")
        group_all(run)
        make_overdue(run, "g")
        group_all(run)
        assert stored(run) == 0
        assert ledger(run)["dropped"] == {"expired": 2}
