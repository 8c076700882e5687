"""`producer.groups`: groups one after another, the next one asked for with the push that ends the one before."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from streamadv.errors import Busy, SettingError, TrajectoryError
from streamadv.producer import Group
from streamadv.store.connection import Connection
from tests.support import group_all, heartbeat, join, ledger, problems, producing

ROLLOUT = {"input_ids": [1], "response_mask": [1], "reward": 1.0}


def whole(group: Group) -> list[dict[str, Any]]:
    return [{**ROLLOUT, "rollout_index": rollout.rollout_index} for rollout in group]


def open_groups(connection: Connection) -> int:
    run = join(connection, "r")
    return connection.scripts.zcard(run.keys.home.open)


def test_the_push_that_ends_a_group_begins_the_next_one(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        groups = producer.groups(2, data_source="math")
        first = next(groups)
        assert next(iter(first)).push(**ROLLOUT) == "pushed"
        assert open_groups(fake) == 1
        assert list(first)[1].push(**ROLLOUT) == "pushed"
        assert open_groups(fake) == 2
        second = next(groups)
        assert open_groups(fake) == 2
        assert {ticket.data_source for ticket in second.tickets} == {"math"}
        assert second.push(whole(second)).codes == ["pushed"] * 2
        third = next(groups)
        third.cancel(2)
        assert open_groups(fake) == 3
        assert next(groups).group_id not in {first.group_id, second.group_id, third.group_id}
    assert problems(join(fake, "r")) == []


def test_without_ahead_a_group_is_begun_when_it_is_asked_for(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for group in islice(producer.groups(2, ahead=0), 3):
            before = open_groups(fake)
            group.push(whole(group))
            assert open_groups(fake) == before


def test_a_push_succeeds_when_the_next_group_is_refused(fake: Connection) -> None:
    """And the iterator waits for it as `begin_group` does."""
    with producing(fake, "r", {"batch_groups": 1, "max_staleness": 0}) as producer:
        groups = producer.groups(2, timeout=0.01)
        group = next(groups)
        assert group.push(whole(group)).codes == ["pushed"] * 2
        with pytest.raises(Busy, match=r"not admitted after 0\.01 s"):
            next(groups)
        assert ledger(join(fake, "r"))["pushed"] == 2


@pytest.mark.parametrize("end", ["close", "forget", "leave"])
def test_a_group_that_nobody_asks_for_is_withdrawn(fake: Connection, end: str) -> None:
    with producing(fake, "r") as producer:
        groups = producer.groups(2)
        for group in groups:
            group.push(whole(group))
            break
        assert open_groups(fake) == 2
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


def test_groups_still_played_when_the_iterator_is_closed_ask_for_no_other(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        groups = producer.groups(2)
        played = list(islice(groups, 3))
        groups.close()  # type: ignore[attr-defined]
        for group in played:
            group.push(whole(group))
        assert open_groups(fake) == 3
    assert problems(join(fake, "r")) == []


@pytest.mark.parametrize("end", ["finish", "close"])
def test_a_producer_that_ends_leaves_no_group_that_was_begun_ahead(fake: Connection, end: str) -> None:
    with producing(fake, "r") as producer:
        groups = producer.groups(2)  # still there when the producer is not
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
    """The server may have opened the group, or not."""
    from streamadv.producer import producer as module
    from streamadv.store.calls import run_script, run_transaction

    def lose(connection: Connection, payloads: Any, call: Any, companion: Any = None) -> Any:
        reply = run_transaction(connection, payloads, call)
        if companion is not None:
            run_script(fake.scripts, companion.call)
            companion.hear(ConnectionError("lost"))
        return reply

    with producing(fake, "r") as producer:
        groups = producer.groups(2)
        group = next(groups)
        with monkeypatch.context() as patch:
            patch.setattr(module, "run_transaction", lose)
            group.push(whole(group))
        assert open_groups(fake) == 2
        other = next(groups)
        assert open_groups(fake) == 3
        other.cancel(2)
        group_all(join(fake, "r"))
        assert open_groups(fake) == 0
    assert problems(join(fake, "r")) == []


def test_wrong_arguments_are_refused(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        with pytest.raises(SettingError, match="ahead is 2, needs 0 or 1"):
            producer.groups(2, ahead=2)
        with pytest.raises(TrajectoryError, match="group_size is 0"):
            next(producer.groups(0))
