"""Beginning groups: admission by bytes and by pacing, wrong arguments, deadlines, groups that are open or withdrawn."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any, cast

import pytest

from streamadv.errors import Busy, SettingError, TrajectoryError
from streamadv.producer.async_producer import BeginGroup
from streamadv.producer.requests import OUT_OF_MEMORY, GroupCall, Pause
from streamadv.producer.tickets import GroupRequest, Ticket
from streamadv.status import read_status
from streamadv.store.connection import Connection
from tests.support import group_all, join, ledger, make_overdue, payload_keys, problems, producing, trajectory

MB = 1 << 20


def test_admission_by_bytes(fake: Connection) -> None:
    limits = {"max_bytes": 8 * MB, "max_trajectory_bytes": 2 * MB}
    with producing(fake, "r", limits) as producer:
        run = join(fake, "r")
        first = producer.begin_group(2, timeout=0)
        producer.begin_group(2, timeout=0)
        for attempt in (
            lambda: producer.begin_group(1, timeout=0),
            lambda: producer.push([trajectory("new", 0, 1)]),
        ):
            with pytest.raises(Busy, match=f"{8 * MB} bytes live or reserved of max_bytes {8 * MB}"):
                attempt()
        assert payload_keys(run) == []
        next(iter(first)).push(input_ids=[1], response_mask=[1], reward=1.0)
        first.cancel(1)
        producer.begin_group(1, timeout=0)
        with pytest.raises(SettingError, match="one group of 5 reserves"):
            producer.begin_group(5, timeout=0)
        with pytest.raises(SettingError, match="one group of 5 reserves"):
            producer.push([trajectory("huge", 0, 5)])
    assert problems(run) == []


def test_a_reservation_ends_with_its_group(fake: Connection) -> None:
    with producing(fake, "r", {"max_bytes": 8 * MB, "max_trajectory_bytes": 2 * MB}) as producer:
        run = join(fake, "r")
        for group_id in ("a", "b"):
            producer.begin_group(2, group_id=group_id, timeout=0)
            make_overdue(run, group_id)
        group_all(run)
        assert read_status(run).bytes.reserved == 0
        producer.begin_group(4, timeout=0)
    assert problems(run) == []


def test_a_group_opened_by_a_process_with_a_smaller_limit_releases_no_more_than_it_has(
    fake: Connection,
) -> None:
    with producing(fake, "r") as early, producing(fake, "r", {"max_trajectory_bytes": MB}) as later:
        run = join(fake, "r")
        later.begin_group(2, group_id="g")
        early.push([trajectory("g", 0)])
        assert problems(run) == []
        early.push([trajectory("g", 1)])
        group_all(run)
    assert problems(run) == []


def test_pacing_admits_so_many_groups_ahead(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        keys = run.keys.home
        fake.scripts.hset(keys.trainer, mapping={"max_staleness": "1", "batch_groups": "2"})
        groups = [producer.begin_group(1, timeout=0) for _ in range(4)]
        with pytest.raises(Busy, match="4 groups begun and not yet trained, max_staleness allows 4"):
            producer.begin_group(1, timeout=0)
        with pytest.raises(Busy, match="max_staleness"):
            producer.push([trajectory("new", 0, 1)])
        for group in groups:
            next(iter(group)).push(input_ids=[1], response_mask=[1], reward=1.0)
        group_all(run)
        with pytest.raises(Busy):
            producer.begin_group(1, timeout=0)
        fake.scripts.hset(keys.trainer, "held", "2")  # two of them are trained, the checkpoint is not written
        producer.begin_group(1, timeout=0)
        producer.begin_group(1, timeout=0)
        with pytest.raises(Busy):
            producer.begin_group(1, timeout=0)
        fake.scripts.hset(keys.trainer, "max_staleness", "")
        producer.begin_group(1, timeout=0)
    assert problems(run) == []


def test_an_open_group_gives_its_tickets_again(fake: Connection) -> None:
    with producing(fake, "r") as one, producing(fake, "r") as other:
        opened = one.begin_group(2, group_id="g", redundancy=1)
        again = other.begin_group(2, group_id="g")
        assert [ticket.rollout_index for ticket in again.tickets] == [0, 1, 2]
        assert again.tickets == opened.tickets
        assert ledger(join(fake, "r"))["pushed"] == 0


@pytest.mark.parametrize("size", [0, -1, 5000])
def test_a_group_needs_a_size(fake: Connection, size: int) -> None:
    with producing(fake, "r") as producer, pytest.raises(TrajectoryError, match="group_size is"):
        producer.begin_group(size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"group_id": "a b"}, TrajectoryError, "group_id: is 'a b'"),
        ({"group_id": "line\nbreak"}, TrajectoryError, "group_id: is 'line"),
        ({"group_id": "x" * 5000}, TrajectoryError, "group_id: .*at most 200"),
        ({"group_id": ""}, TrajectoryError, "group_id: "),
        ({"group_id": 7}, TrajectoryError, "group_id: "),
        ({"metadata": ["a"]}, TrajectoryError, r"metadata: .*dictionary"),
        ({"metadata": "text"}, TrajectoryError, r"metadata: .*dictionary"),
        ({"data_source": "x" * 5000}, TrajectoryError, "data_source: .*at most 200"),
        ({"metadata": {"x": float("nan")}}, TrajectoryError, "metadata: holds nan"),
        ({"metadata": {"x": object()}}, TrajectoryError, "metadata.x: "),
        ({"redundancy": 1.5}, TrajectoryError, "redundancy is 1.5"),
        ({"deadline_s": 1e300}, SettingError, "deadline_s is 1e[+]300"),
        ({"deadline_s": -5}, SettingError, "deadline_s is -5"),
        ({"deadline_s": 0}, SettingError, "deadline_s is 0"),
        ({"deadline_s": float("inf")}, SettingError, "deadline_s is inf"),
        ({"deadline_s": float("nan")}, SettingError, "deadline_s is nan"),
        ({"deadline_s": "soon"}, SettingError, "deadline_s is 'soon'"),
        ({"timeout": float("nan")}, SettingError, "timeout is nan"),
        ({"timeout": -1}, SettingError, "timeout is -1"),
    ],
)
def test_a_group_is_begun_only_with_what_can_be_pushed(
    fake: Connection, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with producing(fake, "r") as producer:
        with pytest.raises(error, match=message) as raised:
            producer.begin_group(1, **options)
        assert "\n" not in str(raised.value)
        assert fake.scripts.zcard(join(fake, "r").keys.home.open) == 0


@pytest.mark.parametrize("group_id", ["x" * 200, "käse", "a/b:c{d", "0"])
def test_an_id_that_begins_a_group_can_be_pushed(fake: Connection, group_id: str) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(1, group_id=group_id, data_source="d" * 200, deadline_s=30 * 86400)
        assert next(iter(group)).push(input_ids=[1], response_mask=[1], reward=1.0) == "pushed"


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_deadline_is_extended_by_a_bounded_time(fake: Connection, deadline_s: float) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(1)
        with pytest.raises(SettingError, match="deadline_s is"):
            group.touch(deadline_s)


@pytest.mark.parametrize("group_id", [None, 7, ["g"], b"g", "", "a b", "a}b"])
def test_a_deadline_is_extended_of_a_group_with_a_name(fake: Connection, group_id: Any) -> None:
    with producing(fake, "r") as producer, pytest.raises(TrajectoryError, match="group_id is"):
        producer.touch(group_id)


def test_no_id_ends_the_hash_tag_of_a_key(fake: Connection) -> None:
    """Behind it a key made of the id would look like one of another kind."""
    with producing(fake, "r") as producer:
        ticket = producer.begin_group(1).tickets[0]
        columns = {"input_ids": [1], "response_mask": [1], "reward": 1.0}
        line = json.dumps({**json.loads(ticket.to_json()), "group_id": "a}b"})
        for call in (
            lambda: producer.begin_group(1, group_id="a}b"),
            lambda: producer.push([trajectory("a}b", 0, 1)]),
            lambda: producer.push([trajectory().model_copy(update={"group_id": "a}b"})]),
            lambda: producer.rollout(dataclasses.replace(ticket, group_id="a}b")).push(**columns),
            lambda: producer.score("a}b", 0, 1.0),
            lambda: Ticket.from_json(line),
        ):
            with pytest.raises(TrajectoryError, match=r"group_id\b.*a}b"):
                call()


def test_an_id_in_bytes_is_told_as_text(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(1, group_id=cast(str, b"g"))
        assert group.group_id == "g"
        assert Ticket.from_json(group.tickets[0].to_json()) == group.tickets[0]


def test_touch_extends_a_deadline_and_never_shortens_it(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        group = producer.begin_group(1, group_id="g", deadline_s=100)
        before = fake.scripts.zscore(run.keys.home.open, "g")
        assert group.touch(1)
        assert fake.scripts.zscore(run.keys.home.open, "g") == before
        assert producer.touch("g", 1000)
        assert fake.scripts.zscore(run.keys.home.open, "g") > (before or 0) + 800_000  # type: ignore[operator]
        assert not producer.touch("other")


@pytest.mark.parametrize("how", ["begin", "push"])
def test_a_withdrawn_group_is_begun_again_before_the_grouper_removes_it(fake: Connection, how: str) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        keys = run.keys.home
        producer.begin_group(2, group_id="g")
        nonce = fake.scripts.hget(keys.group("g"), "holders")
        assert run.home.call("withdraw", ["g", nonce], group="g") == 1
        fake.scripts.hset(keys.trainer, "version", "3")
        if how == "begin":
            assert producer.begin_group(2, group_id="g").model_version == 3
        else:
            assert producer.push([trajectory("g", 0)]).codes == ["pushed"]
        assert fake.scripts.zscore(keys.open, "g") != 0.0
        assert group_all(run) == []
        head: Any = fake.scripts.hget(keys.group("g"), "head")
        assert head.split(b" ")[5] == b"3"
        assert producer.push([trajectory("g", 0), trajectory("g", 1)]).codes[1] == "pushed"
        assert group_all(run) == ["complete"]
    assert problems(run) == []


def test_with_and_async_with_are_told_apart(fake: Connection) -> None:
    async def entered(group: Any) -> None:
        async with group:
            pass

    with producing(fake, "r") as producer:
        with pytest.raises(TypeError, match=r"write `with producer\.group"):
            asyncio.run(entered(producer.group(2)))
        group_all(join(fake, "r"))
        assert ledger(join(fake, "r"))["dropped"] == {"cancelled": 2}


async def test_async_with_and_with_are_told_apart() -> None:
    group: Any = BeginGroup(asyncio.sleep(0))  # type: ignore[arg-type]  # never admitted
    with pytest.raises(TypeError, match=r"write `async with producer\.group"), group:
        pass


def test_a_group_waits_out_its_pauses_while_the_server_has_no_memory(fake: Connection) -> None:
    """Such a refusal knows of no announcement, so an earlier one must not end the pause."""
    with producing(fake, "r") as producer:
        steps = producer._logic.begin(GroupRequest(2, *[None] * 6))
        assert isinstance(next(steps), GroupCall)
        assert isinstance(steps.send(OUT_OF_MEMORY), Pause)
        steps.close()
