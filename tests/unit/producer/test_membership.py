"""A producer as a member of its run: settings that come later, and whether more will come."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from streamadv.errors import SettingError
from streamadv.producer import Producer
from streamadv.producer.membership import Membership
from streamadv.run import open_run
from streamadv.status import read_status
from streamadv.store.connection import Connection
from tests.support import heartbeat, join, problems, producing, trajectory, unscored


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


@pytest.mark.timeout(30)
def test_a_signal_handler_may_use_a_producer_at_any_moment(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[bool] = []
    check_open = Membership.check_open

    def check_and_be_signalled(membership: Membership) -> None:
        check_open(membership)
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
