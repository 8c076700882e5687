"""`producer.groups`: groups one after another, several begun in one call."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from streamadv.errors import Busy, SettingError, TrajectoryError
from streamadv.producer import Group
from streamadv.store.connection import Connection
from streamadv.store.scripts import run_script
from tests.support import group_all, heartbeat, join, ledger, problems, producing

ROLLOUT = {"input_ids": [1], "response_mask": [1], "reward": 1.0}


def whole(group: Group) -> list[dict[str, Any]]:
    return [{**ROLLOUT, "rollout_index": rollout.rollout_index} for rollout in group]


def open_groups(connection: Connection) -> int:
    run = join(connection, "r")
    return sum(connection.scripts.zcard(keys.open) for keys in run.keys.shards)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_call_begins_several_groups(fake: Connection, shards: int) -> None:
    with producing(fake, "r", {"shards": shards}) as producer:
        groups = producer.groups(2, data_source="math", metadata={"a": 1}, ahead=2)
        found = []
        for count in (3, 3, 3, 6):
            found.append(next(groups))
            assert open_groups(fake) == count
        assert len({group.group_id for group in found}) == 4
        for group in found:
            assert {(ticket.data_source, ticket.metadata["a"]) for ticket in group.tickets} == {("math", 1)}
            assert group.push(whole(group)).codes == ["pushed"] * 2
    group_all(join(fake, "r"))
    assert open_groups(fake) == 0
    assert problems(join(fake, "r")) == []


def test_by_default_a_group_is_begun_when_it_is_asked_for(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for number, group in enumerate(islice(producer.groups(2), 3), 1):
            assert open_groups(fake) == number
            group.push(whole(group))


def test_as_many_are_begun_as_are_admitted(fake: Connection) -> None:
    with producing(fake, "r", {"batch_groups": 2, "max_staleness": 0}) as producer:
        groups = producer.groups(2, timeout=0.01, ahead=5)
        for group in islice(groups, 2):
            group.push(whole(group))
        with pytest.raises(Busy, match=r"not admitted after 0\.01 s"):
            next(groups)
        assert ledger(join(fake, "r"))["pushed"] == 4


@pytest.mark.parametrize("end", ["close", "forget", "leave"])
def test_groups_that_nobody_asks_for_are_withdrawn(fake: Connection, end: str) -> None:
    with producing(fake, "r") as producer:
        groups = producer.groups(2, ahead=2)
        for group in groups:
            group.push(whole(group))
            break
        assert open_groups(fake) == 3
        if end == "close":
            groups.close()  # type: ignore[attr-defined]
        del groups
        if end != "leave":
            heartbeat(producer)
    run = join(fake, "r")
    assert sorted(group_all(run)) == ["complete"]
    group_all(run)
    assert open_groups(fake) == 0
    assert problems(run) == []


@pytest.mark.parametrize("end", ["finish", "close"])
def test_a_producer_that_ends_leaves_no_group_that_was_begun_ahead(fake: Connection, end: str) -> None:
    with producing(fake, "r") as producer:
        groups = producer.groups(2, ahead=2)  # still there when the producer is not
        for group in islice(groups, 2):
            group.push(whole(group))
        assert open_groups(fake) == 3
        if end == "finish":
            producer.finish()
            group_all(join(fake, "r"))
            assert open_groups(fake) == 0
            group = next(groups)
            group.push(whole(group))
    group_all(join(fake, "r"))
    assert open_groups(fake) == 0
    assert problems(join(fake, "r")) == []


def test_an_answer_that_never_came_leaves_no_open_group(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has opened the groups."""
    from streamadv.producer import producer as module

    def lose(client: Any, call: Any) -> Any:
        reply = run_script(client, call)
        if call.script.name == "begin" and reply[0] == b"ok":
            raise ZeroDivisionError
        return reply

    with producing(fake, "r") as producer:
        with monkeypatch.context() as patch:
            patch.setattr(module, "run_script", lose)
            with pytest.raises(ZeroDivisionError):
                next(producer.groups(2, ahead=3))
        assert open_groups(fake) == 4
        heartbeat(producer)
        group_all(join(fake, "r"))
        assert open_groups(fake) == 0
    assert problems(join(fake, "r")) == []


def test_the_same_call_again_gives_the_same_groups(fake: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamadv.producer import producer as module

    def twice(client: Any, call: Any) -> Any:
        run_script(client, call)
        return run_script(client, call)

    with producing(fake, "r") as producer, monkeypatch.context() as patch:
        patch.setattr(module, "run_script", twice)
        for group in islice(producer.groups(2, ahead=2), 3):
            group.push(whole(group))
    group_all(join(fake, "r"))
    assert open_groups(fake) == 0
    assert problems(join(fake, "r")) == []


def test_wrong_arguments_are_refused(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for ahead in (-1, 64, "2"):
            with pytest.raises(SettingError, match=r"ahead is '?-?\d+'?, needs a whole number from 0 to 63"):
                producer.groups(2, ahead=ahead)  # type: ignore[arg-type]
        with pytest.raises(TrajectoryError, match="group_size is 0"):
            next(producer.groups(0))
