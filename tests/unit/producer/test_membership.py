"""A producer as a member of its run: settings that come later, and whether more will come."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from streamadv.errors import SettingError
from streamadv.producer import Producer
from streamadv.producer import producer as producer_module
from streamadv.producer.admission import BeginCall
from streamadv.producer.membership import Membership
from streamadv.producer.requests import Attempt
from streamadv.run import open_run
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.scripts import ScriptCall
from streamadv.trainer.queue import TrainerQueue
from tests.support import Forward, heartbeat, join, problems, producing, trajectory, unscored


def test_a_setting_given_by_a_later_process_is_heard_of(fake: Connection) -> None:
    with producing(fake, "r") as early, producing(fake, "r", {"scorers": ("s",), "redundancy": 1}):
        run = join(fake, "r")
        heartbeat(early)
        early.push([unscored("g", 0)])
        assert fake.scripts.xlen(run.keys.home.scoring("s")) == 1
        assert len(early.begin_group(2, group_id="h")) == 3
    assert problems(run) == []


def test_producers_say_whether_more_will_come(fake: Connection) -> None:
    def states() -> list[str]:
        return sorted(producer.state for producer in read_status(join(fake, "r")).producers)

    with producing(fake, "r") as one:
        with producing(fake, "r"):
            assert states() == ["open", "open"]
        assert states() == ["open"]
        one.finish()
        assert states() == ["finished"]
        one.push([trajectory()])
        assert states() == ["open"]
        one.finish()
    assert states() == ["finished"]


def test_a_heartbeat_that_is_repeated_late_leaves_a_producer_finished(fake: Connection) -> None:
    """The client repeats one whose reply was lost, maybe after another thread has said the last word."""
    with producing(fake, "r") as producer:
        call = next(producer._logic.heartbeat())
        assert isinstance(call, ScriptCall)
        producer.finish()
        fake.scripts.eval(call.script.text, *call.arguments)
        assert [each.state for each in read_status(join(fake, "r")).producers] == ["finished"]


def test_a_server_that_has_lost_that_a_producer_goes_on_hears_it(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.finish()
        (before,) = fake.scripts.hgetall(run.keys.home.producers).items()
        producer.begin_group(2)
        fake.scripts.hset(run.keys.home.producers, *before)
        monkeypatch.setattr(producer_module, "server_ids", lambda _, shards: ["another"] * len(shards))
        heartbeat(producer)
        assert [each.state for each in read_status(run).producers] == ["open"]


@pytest.mark.parametrize("moment", ["withdraw", "finished", "open"])
def test_a_producer_that_begins_again_while_a_heartbeat_says_that_it_has_finished_is_open(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with producing(fake, "r") as producer:
        carry_out, met = producer._carry_out, []

        def carry_out_slowly(request: Attempt) -> Any:
            """As another thread meets this request: before it is sent, or "open" once it is."""
            is_met = isinstance(request, ScriptCall) and moment in (request.script.name, *request.arguments)
            if not is_met or met:
                return carry_out(request)
            met.append(True)
            if moment != "open":
                producer.begin_group(1)
                return carry_out(request)
            reply = carry_out(request)
            heartbeat(producer)
            return reply

        producer.finish()
        producer._logic.admission.leave_unclaimed(BeginCall(), "g")
        monkeypatch.setattr(producer, "_carry_out", carry_out_slowly)
        if moment == "open":
            producer.begin_group(1)
        else:
            heartbeat(producer)
        assert met
        (listed,) = read_status(join(fake, "r")).producers
        assert listed.state == "open"


def test_a_heartbeat_that_takes_long_does_not_put_off_the_next_one(
    fake: Connection, monkeypatch: pytest.MonkeyPatch, forward: Forward
) -> None:
    """As when the server of another shard hangs, and is asked twice."""
    with producing(fake, "r") as producer:
        with monkeypatch.context() as patch:
            patch.setattr(
                producer_module, "server_ids", lambda _, shards: forward(20) or [None] * len(shards)
            )
            heartbeat(producer)
        assert producer._logic.until_heartbeat() == 0
        heartbeat(producer)
        assert producer._logic.until_heartbeat() > 0


@pytest.mark.timeout(30)
def test_a_signal_handler_may_use_a_producer_at_any_moment(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[bool] = []
    check_open = Membership.check_open

    def check_and_be_signalled(membership: Membership, leaves: bool = False) -> None:
        check_open(membership, leaves)
        if not finished and threading.current_thread() is threading.main_thread():
            finished.append(True)
            producer.finish()

    with producing(fake, "r") as producer:
        monkeypatch.setattr(Membership, "check_open", check_and_be_signalled)
        assert producer.score("g", 0, 1.0) == "unknown"
    assert finished


def test_settings_of_another_type_are_an_error_that_says_what_to_write(fake: Connection) -> None:
    values: Any = {"shards": 2}
    wanted = r"^settings is a dict, needs streamadv\.RunSettings\(NAME=VALUE, \.\.\.\)$"
    with pytest.raises(SettingError, match=wanted):
        Producer(fake, "r", settings=values)
    with pytest.raises(SettingError, match=wanted):
        open_run(fake, "r", values)


@pytest.mark.parametrize("value", ["1.5", "inf", b"\xff"])
@pytest.mark.parametrize("name", ["drop_after", "version", "weights", "max_staleness"])
def test_a_session_that_somebody_has_written_into_stops_no_producer(
    fake: Connection, name: str, value: str | bytes
) -> None:
    queue = TrainerQueue(fake, "r").open()
    fake.scripts.hset(join(fake, "r").keys.home.session, name, value)
    with producing(fake, "r") as producer:
        ticket = producer.begin_group(1).tickets[0]
        assert not producer._logic.membership.is_in_vain(ticket)
        assert producer.model_version() in (0, None)
    queue.close()
