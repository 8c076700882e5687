"""Rollouts that end without a trajectory: failed, cancelled by count or by name, left when their group was left."""

from __future__ import annotations

import copy
from typing import cast

import fakeredis
import pytest

from streamadv.errors import SettingError, TrajectoryError
from streamadv.producer import Rollout
from streamadv.producer.requests import GroupCall
from streamadv.producer.tickets import GroupSpec, Ticket
from streamadv.store.connection import Connection
from streamadv.store.scripts import ScriptCall
from tests.support import OneClient, group_all, join, ledger, problems, producing


def test_failed_cancelled_and_unscorable_slots_end_without_a_trajectory(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        group = producer.begin_group(5, group_id="g")
        rollouts = list(group)
        assert rollouts[3].fail() == "pushed"
        assert rollouts[3].fail() == "duplicate"
        assert rollouts[4].fail("aborted") == "pushed"
        assert group.cancel(1) == (["pushed"], [2])
        assert rollouts[2].push(input_ids=[1], response_mask=[1], reward=1.0) == "duplicate"
        assert rollouts[1].push(input_ids=[1], response_mask=[1], reward=None) == "pushed"
        assert rollouts[0].push(input_ids=[1], response_mask=[1], reward=1.0) == "pushed"
        assert group_all(run) == ["incomplete"]
    want = {"aborted": 1, "cancelled": 1, "failed": 1, "incomplete": 1, "unscorable": 1}
    assert ledger(run) | {"dropped": want} == ledger(run)
    assert (ledger(run)["pushed"], ledger(run)["queued"]) == (5, 0)
    assert problems(run) == []
    with pytest.raises(TrajectoryError, match="needs 'failed' or 'aborted'"):
        rollouts[0].fail("bored")


def test_leaving_a_group_fails_what_was_not_pushed(fake: Connection) -> None:
    with producing(fake, "r", {"partial_min_usable": 1}) as producer:
        run = join(fake, "r")
        with producer.group(3, group_id="g") as group:
            first, second, _ = group
            with first:
                first.push(input_ids=[1], response_mask=[1], reward=1.0)
            with pytest.raises(RuntimeError, match="boom"), second:
                raise RuntimeError("boom")
        assert group_all(run) == ["partial"]
    assert ledger(run)["dropped"] == {"failed": 2}


def test_a_cancel_that_is_sent_twice_takes_one_place(fake: Connection) -> None:
    """The client repeats a script whose reply was lost."""
    with producing(fake, "r") as producer:
        group = producer.begin_group(4, group_id="g")
        steps = producer._logic.pushes.cancel(GroupSpec.of(group.tickets[0]), 2, [0, 1, 3])
        call = cast(GroupCall, next(steps)).make()
        assert isinstance(call, ScriptCall)
        replies = [fake.scripts.eval(call.script.text, *call.arguments) for _ in range(3)]
        assert replies == [[b"ok", b"3", b"1"]] * 3
    assert ledger(join(fake, "r"))["pushed"] == 2


def test_cancelling_takes_the_highest_slots_that_nobody_plays(fake: Connection) -> None:
    columns = {"input_ids": [1], "response_mask": [1], "reward": 1.0}
    with producing(fake, "r") as producer, producing(fake, "r") as elsewhere:
        run = join(fake, "r")
        group = producer.begin_group(10, group_id="g")
        rollouts = list(group)
        with rollouts[9]:  # is being played
            away = Ticket.from_json(group.tickets[8].to_json())
            copied = copy.deepcopy(group.tickets[7])
            assert elsewhere.begin_group(10, group_id="g").push(
                [{"rollout_index": 6, **columns}]
            ).indices == [6]
            assert group.cancel(2) == (["pushed"] * 2, [5, 4])
            assert [rollout.cancelled for rollout in rollouts] == [index in (4, 5) for index in range(10)]
            assert rollouts[9].push(**columns) == "pushed"
        assert elsewhere.rollout(away).push(**columns) == "pushed"
        assert elsewhere.rollout(copied).push(**columns) == "pushed"
        assert [rollout.push(**columns) for rollout in rollouts[:4]] == ["pushed"] * 4
        assert rollouts[5].push(**columns) == "duplicate"
        assert group_all(run) == ["incomplete"]
    assert ledger(run)["dropped"] == {"cancelled": 2, "incomplete": 8}
    assert problems(run) == []


def test_cancelling_rollouts_by_name(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        group = producer.begin_group(4, group_id="g")
        rollouts = list(group)
        group.tickets[3].to_json()
        rollouts[0].push(input_ids=[1], response_mask=[1], reward=1.0)
        assert group.cancel(indices=[3, 0, 1]) == (["pushed", "duplicate", "pushed"], [3, 1])
        assert [rollout.cancelled for rollout in rollouts] == [False, True, False, True]
        for wrong in (
            {"indices": [4]},
            {"indices": [-1]},
            {"indices": ["0"]},
            {"indices": [True]},
            {"indices": [2.0]},
        ):
            with pytest.raises(TrajectoryError, match="group g has no rollout"):
                group.cancel(**wrong)
        for wrong in ({}, {"count": 1, "indices": [2]}, {"count": -1}, {"count": 1.5}):
            with pytest.raises(SettingError, match="cancel: "):
                group.cancel(**wrong)
        assert group.cancel(0) == ([], ())
        group_all(run)
    assert ledger(run) | {"pushed": 3, "dropped": {"cancelled": 2}} == ledger(run)


def test_cancelling_more_than_nobody_plays_says_so(fake: Connection) -> None:
    with producing(fake, "r") as producer, producing(fake, "r") as elsewhere:
        run = join(fake, "r")
        group = producer.begin_group(3, group_id="g")
        with pytest.raises(TrajectoryError, match="count is 4, of group g 3 rollouts are neither"):
            group.cancel(4)
        assert ledger(run)["pushed"] == 0
        elsewhere.begin_group(3, group_id="g").cancel(indices=[1])
        with pytest.raises(TrajectoryError, match=r"3 rollouts of group g .* 2, 0 cancelled now"):
            group.cancel(3)
        assert group_all(run) == ["incomplete"]
    assert ledger(run)["dropped"] == {"cancelled": 3}


def test_leaving_a_group_leaves_what_was_handed_out_to_others(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        with producer.group(3, group_id="g") as group:
            away = Ticket.from_json(group.tickets[1].to_json())
        group_all(run)
        assert ledger(run)["dropped"] == {"failed": 2}
        assert producer.rollout(away).push(input_ids=[1], response_mask=[1], reward=1.0) == "pushed"


def test_an_interrupt_while_the_server_is_away_does_not_wait_for_it() -> None:
    server = fakeredis.FakeServer()
    connection = OneClient(fakeredis.FakeRedis(server=server))

    def play(rollout: Rollout) -> None:
        server.connected = False
        raise KeyboardInterrupt

    with producing(connection, "r") as producer:
        group = producer.begin_group(2)
        with pytest.raises(KeyboardInterrupt):
            group.run(play, threads=1)
        server.connected = True
