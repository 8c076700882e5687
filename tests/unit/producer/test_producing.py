"""Admission and the push script: the only place of dedupe, and no payload without a reference."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import Busy, GroupEndedError, SettingError, TrajectoryError
from streamadv.producer import Producer
from streamadv.producer.checks import check_records
from streamadv.producer.encode import MAX_SLICE_BYTES
from streamadv.producer.requests import GroupCall
from streamadv.producer.tickets import Ticket, new_group_id
from streamadv.run import Run
from streamadv.run.budget import byte_budget
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.scripts import ScriptCall
from tests.support import (
    ended,
    group_all,
    heartbeat,
    join,
    ledger,
    make_overdue,
    problems,
    producing,
    push_one,
    trajectory,
    unscored,
)

MB = 1 << 20


def payload_keys(run: Run) -> list[bytes]:
    return [key for key in run.connection.scripts.keys("*") if b":payload:" in key]


def test_a_trajectory_is_pushed_once(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        assert push_one(producer, trajectory("g", 0)) == "pushed"
        assert push_one(producer, trajectory("g", 0, reward=9.0)) == "duplicate"
        assert producer.push([trajectory("g", 0), trajectory("g", 1)]).codes == ["duplicate", "pushed"]
        assert len(payload_keys(run)) == 2
        assert group_all(run) == ["complete"]
        assert push_one(producer, trajectory("g", 1)) == "duplicate"
    assert ledger(run) == {"pushed": 2, "trained": 0, "dropped": {}, "dead": {}, "queued": 2, "in_flight": 0}
    assert problems(run) == []


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (trajectory("g", 2, 2), "surplus"),
        (ended("g", 2, 2, "failed"), "failed"),
        (trajectory("g", 2, 2, reward=None), "unscorable"),
    ],
)
def test_what_comes_after_completion_is_counted_and_not_kept(
    fake: Connection, item: Any, reason: str
) -> None:
    with producing(fake, "r", {"redundancy": 2}) as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", index) for index in range(2)])
        group_all(run)
        kept = payload_keys(run)
        assert push_one(producer, item) == "surplus"
        assert push_one(producer, item) == "duplicate"
        assert payload_keys(run) == kept
        assert ledger(run)["dropped"] == {reason: 1}
        with pytest.raises(TrajectoryError, match="no such slot"):
            push_one(producer, trajectory("g", 4))
    assert problems(run) == []


def test_what_is_overtaken_by_the_completion_of_its_group_is_surplus(fake: Connection) -> None:
    with producing(fake, "r", {"redundancy": 1}) as producer:
        run = join(fake, "r")
        assert producer.push([trajectory("g", index) for index in range(3)]).codes == ["pushed"] * 3
        assert group_all(run) == ["complete"]
    assert ledger(run)["dropped"] == {"surplus": 1}
    assert len(payload_keys(run)) == 2
    assert problems(run) == []


def test_what_comes_after_expiry_is_late(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        push_one(producer, trajectory("g", 0))
        group_all(run)
        make_overdue(run, "g")
        group_all(run)
        assert push_one(producer, trajectory("g", 1)) == "late"
        assert push_one(producer, trajectory("g", 1)) == "duplicate"
        assert push_one(producer, trajectory("g", 0)) == "duplicate"
        with pytest.raises(GroupEndedError, match="g has ended"):
            producer.begin_group(2, group_id="g")
    assert ledger(run)["dropped"] == {"expired": 1, "late": 1}
    assert payload_keys(run) == []
    assert problems(run) == []


@pytest.mark.parametrize("item", [trajectory("g", 5, 2), trajectory("g", 0, 3)], ids=["range", "size"])
def test_what_does_not_fit_its_group_is_refused_without_a_trace(fake: Connection, item: Any) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        push_one(producer, trajectory("g", 0))
        with pytest.raises(TrajectoryError, match=r"no such slot|group_size is 3, group g is open"):
            push_one(producer, item)
        with pytest.raises(TrajectoryError, match="group_size is 3"):
            producer.begin_group(3, group_id="g")
    assert ledger(run)["pushed"] == 1
    assert len(payload_keys(run)) == 1
    assert problems(run) == []


def test_one_push_is_for_one_group(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for other in (trajectory("h", 1), trajectory("g", 1, 3)):
            with pytest.raises(TrajectoryError, match="one group at a time"):
                producer.push([trajectory("g", 0), other])
        assert producer.push([]).codes == []
    assert ledger(join(fake, "r"))["pushed"] == 0


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
    with pytest.raises(ValueError, match="needs 'failed' or 'aborted'"):
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
        steps = producer._logic.pushes.cancel(group.tickets[0], 2, [0, 1, 3])
        call = cast(GroupCall, next(steps)).make()
        assert isinstance(call, ScriptCall)
        replies = [fake.scripts.eval(*call.by_text) for _ in range(3)]
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
        for wrong in ({"indices": [4]}, {"indices": [-1]}, {"indices": ["0"]}, {"indices": [True]}):
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


@pytest.mark.parametrize("group_id", ["x" * 200, "käse", "a/b:c{d}", "0"])
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"group_id": "g"}', '{"group_id": 1}'])
def test_what_is_no_ticket_is_said_to_be_none(text: str) -> None:
    with pytest.raises(TrajectoryError, match="ticket: "):
        Ticket.from_json(text)


def test_a_push_without_reward_that_nobody_brings_is_an_error(fake: Connection) -> None:
    columns = {"input_ids": [1], "response_mask": [1]}
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        first, second, third = producer.begin_group(3, group_id="g")
        for forgotten in (columns, {**columns, "rewards": {"format": 1.0}}):
            with pytest.raises(TrajectoryError, match=r"reward: .* g/0 .*no scorers.*reward_later"):
                first.push(**forgotten)
        with pytest.raises(TrajectoryError, match=r"reward: .* h/1 "):
            producer.push([trajectory("h", 0), trajectory("h", 1, reward=...)])
        assert ledger(run)["pushed"] == 0
        assert first.push(**columns, reward=None) == "pushed"
        assert second.push(**columns, reward=0.0) == "pushed"
        assert third.push(**columns, reward_later=True) == "pushed"
        group_all(run)
        assert producer.score("g", 2, 1.0) == "scored"
        with pytest.raises(TrajectoryError, match="reward_later"):
            third.push(**columns, reward=1.0, reward_later=True)
        assert producer.push([ended("i", 0, 1, "failed")]).codes == ["pushed"]


def test_scorers_named_by_a_later_process_bring_the_reward(fake: Connection) -> None:
    with producing(fake, "r") as early, producing(fake, "r", {"scorers": ("s",)}):
        assert early.push([trajectory("g", 0, reward=...)]).codes == ["pushed"]
        assert fake.scripts.xlen(join(fake, "r").keys.home.scoring("s")) == 1


def test_a_ticket_can_be_pushed_from_anywhere(fake: Connection) -> None:
    with producing(fake, "r") as one, producing(fake, "r") as other:
        group = one.begin_group(1, group_id="g", data_source="math", metadata={"prompt": 7})
        ticket = Ticket.from_json(group.tickets[0].to_json())
        assert ticket == group.tickets[0]
        rollout = other.rollout(ticket)
        assert rollout.push(input_ids=[1], response_mask=[1], reward=1.0, metadata={"x": 1}) == "pushed"
    run = join(fake, "r")
    header = fake.scripts.hget(payload_keys(run)[0].decode(), "header")
    assert header is not None
    assert b'"metadata":{"prompt":7,"x":1}' in header
    assert b'"data_source":"math"' in header


def test_a_trajectory_above_the_limit_is_an_error_naming_it(fake: Connection) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": 1024}) as producer:
        with pytest.raises(TrajectoryError, match="max_trajectory_bytes is 1024"):
            producer.push([trajectory("g", 0, tokens=400)])
        assert push_one(producer, trajectory("g", 0, tokens=20)) == "pushed"


def test_extra_columns_are_fixed_by_their_first_push(fake: Connection) -> None:
    with producing(fake, "r") as one, producing(fake, "r") as other:
        one.push([trajectory("g", 0, x=np.zeros((5, 2), np.int16))])
        for wrong in (np.zeros((5, 2), np.int8), np.zeros((5, 3), np.int16), np.zeros((4, 2), np.int16)):
            with pytest.raises(TrajectoryError, match="extra column x is"):
                other.push([trajectory("g", 1, x=wrong)])
        mixed = [trajectory("h", 0, y=np.zeros(5, np.int8)), trajectory("h", 1, y=np.zeros(5, np.int16))]
        with pytest.raises(TrajectoryError, match="extra column y is"):
            other.push(mixed)
    assert problems(join(fake, "r")) == []


def test_a_large_group_is_pushed_in_slices(fake: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    carry_out = Producer._carry_out

    def count(self: Producer, request: Any) -> Any:
        if hasattr(request, "payloads"):
            sent.append(sum(len(value) for _, fields in request.payloads for value in fields.values()))
        return carry_out(self, request)

    monkeypatch.setattr(Producer, "_carry_out", count)
    with producing(fake, "r", {"max_trajectory_bytes": MB}) as producer:
        big = [trajectory("g", index, 6, tokens=100_000) for index in range(6)]
        assert producer.push(big).codes == ["pushed"] * 6
        many = [trajectory("h", index, 300) for index in range(300)]
        assert producer.push(many).count("pushed") == 300
    assert len(sent) >= 4
    assert max(sent) <= MAX_SLICE_BYTES
    assert group_all(join(fake, "r")) == ["complete", "complete"]
    assert problems(join(fake, "r")) == []


@settings(max_examples=25, deadline=None)
@given(dedupe=st.integers(1, 4), total=st.integers(1, 12))
def test_the_last_groups_are_remembered(dedupe: int, total: int) -> None:
    import fakeredis

    fake = Connection.from_client(fakeredis.FakeRedis(server=fakeredis.FakeServer()))
    with producing(fake, "r", {"dedupe_groups": dedupe}) as producer:
        run = join(fake, "r")
        for number in range(total):
            push_one(producer, trajectory(f"g{number}", 0, 1))
            group_all(run)
        remembered = fake.scripts.hlen(run.keys.home.ended) + fake.scripts.hlen(run.keys.home.ended_before)
        assert remembered <= 2 * dedupe
        for number in range(max(0, total - dedupe), total):
            assert push_one(producer, trajectory(f"g{number}", 0, 1)) == "duplicate"
    assert problems(run) == []


def test_scores_must_be_finite(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([unscored("g", 0)])
        for reward, rewards in ((float("nan"), None), (float("inf"), None), (1.0, {"style": float("nan")})):
            with pytest.raises(TrajectoryError, match="should be a finite number"):
                producer.score("g", 0, reward, rewards)
        assert producer.score("g", 0, None) == "scored"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("g", "first", 1.0), "rollout_index: is the text 'first'"),
        (("g", None, 1.0), "rollout_index: "),
        (("g", float("nan"), 1.0), "rollout_index: "),
        (("g", 0.5, 1.0), "rollout_index: "),
        (("g", -1, 1.0), "rollout_index: "),
        ((None, 0, 1.0), "group_id: "),
        (("g", 0, "1"), "reward: is the text '1'"),
        (("g", 0, [1.0]), "reward: "),
        (("g", 0, 10**400), "reward: "),
        (("g", 0, 1.0, ["style"]), "rewards: "),
        (("g", 0, 1.0, {"style": object()}), "rewards.style: "),
        (("g", 0, 1.0, {"style": None}), "rewards.style: "),
    ],
)
def test_a_score_is_checked_like_a_push(fake: Connection, arguments: tuple[Any, ...], message: str) -> None:
    with producing(fake, "r") as producer:
        producer.push([unscored("g", 0)])
        with pytest.raises(TrajectoryError, match=message):
            producer.score(*arguments)
        assert producer.score("g", 0, 1.0) == "scored"


def test_numbers_of_numpy_are_scores_and_slots(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([unscored("g", 0), unscored("g", 1)])
        assert producer.score("g", cast(int, np.int64(0)), cast(float, np.float32(0.5))) == "scored"
        rewards = {"style": cast(float, np.float32(1.0))}
        assert producer.score("g", cast(int, np.uint8(1)), cast(float, np.int64(2)), rewards) == "scored"
        run = join(fake, "r")
        assert group_all(run) == ["complete"]
    assert problems(run) == []


@pytest.mark.parametrize("group_id", [None, 7, ["g"], b"g"])
def test_a_deadline_is_extended_of_a_group_with_a_name(fake: Connection, group_id: Any) -> None:
    with producing(fake, "r") as producer, pytest.raises(TrajectoryError, match="group_id is"):
        producer.touch(group_id)


@pytest.mark.parametrize("record", [5, "text", None, ["a"]])
def test_what_is_no_record_is_refused_by_its_position(fake: Connection, record: Any) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(2)
        with pytest.raises(TrajectoryError, match="record 0: is "):
            group.push([record])
        with pytest.raises(TrajectoryError, match="record 0 is "):
            producer.push([record])


@pytest.mark.parametrize("metadata", [["a"], "text", 5, None])
def test_metadata_of_a_push_is_an_object(fake: Connection, metadata: Any) -> None:
    with producing(fake, "r") as producer:
        rollout = next(iter(producer.begin_group(1)))
        with pytest.raises(TrajectoryError, match=r"metadata: .*dictionary"):
            rollout.push(input_ids=[1], response_mask=[1], reward=1.0, metadata=metadata)


@pytest.mark.parametrize("ticket", ["text", None, {"group_id": "g"}])
def test_a_rollout_needs_a_ticket(fake: Connection, ticket: Any) -> None:
    with producing(fake, "r") as producer, pytest.raises(TrajectoryError, match="from_json"):
        producer.rollout(ticket)


def test_an_id_in_bytes_is_told_as_text(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(1, group_id=cast(str, b"g"))
        assert group.group_id == "g"
        assert Ticket.from_json(group.tickets[0].to_json()) == group.tickets[0]


def test_a_setting_given_by_a_later_process_is_heard_of(fake: Connection) -> None:
    with producing(fake, "r") as early, producing(fake, "r", {"scorers": ("s",), "redundancy": 1}):
        run = join(fake, "r")
        heartbeat(early)
        early.push([unscored("g", 0)])
        assert fake.scripts.xlen(run.keys.home.scoring("s")) == 1
        assert len(early.begin_group(2, group_id="h")) == 3
    assert problems(run) == []


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


def test_records_are_checked_against_their_ticket() -> None:
    ticket = Ticket("g", 1, 2, 3, 0, 7, "math", {"a": 1})
    (item,) = check_records([{"input_ids": [1], "response_mask": [1]}], ticket)
    assert (item.group_id, item.rollout_index, item.model_version) == ("g", 1, 7)
    assert (item.data_source, item.metadata) == ("math", {"a": 1})
    with pytest.raises(TrajectoryError, match="belongs to group h"):
        check_records([trajectory("h", 0)], ticket)
    with pytest.raises(TrajectoryError, match="has 3 slots"):
        check_records([trajectory("g", 3)], ticket)
    with pytest.raises(TrajectoryError, match="records 0 and 1 of group g both have rollout_index 1"):
        check_records([{"input_ids": [1], "response_mask": [1]}] * 2, ticket)


def test_the_byte_budget_follows_the_server() -> None:
    assert byte_budget(None, {"maxmemory": 1000}) == 700
    assert byte_budget(None, {"maxmemory": 0, "total_system_memory": 1000}) == 500
    assert byte_budget(None, {}) == 1 << 30
    assert byte_budget(600, {"maxmemory": 1000}) == 600
    assert byte_budget(600, {"maxmemory": 0}) == 600
    with pytest.raises(SettingError, match="max_bytes is 800, more than"):
        byte_budget(800, {"maxmemory": 1000})


def test_new_group_ids_are_ordered_and_unique() -> None:
    ids = [new_group_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(text[14] == "7" and text[19] in "89ab" for text in ids)
    assert [text[:8] for text in ids] == sorted(text[:8] for text in ids)


def test_scripts_refuse_what_they_do_not_know(fake: Connection) -> None:
    """A push of a record that is not admitted leaves neither payload nor counter."""
    run = join(fake, "r")
    keys = run.keys.home
    run.home.call("lay_out", [1])
    fake.scripts.hset(keys.payload("n"), "header", "x")
    max_trajectory_bytes, max_bytes, shards = 50, 10, 1
    admission = ["g", 1, 1, "", 1000, max_trajectory_bytes, max_bytes, shards, "", "", "", "p"]
    record = [0, "usable", "1.0", 10, keys.payload("n"), "train", "{}"]
    reply: Any = run.home.call(
        "push", [*admission, "0", *record], group="g", scorer=keys.void, payloads=[keys.payload("n")]
    )
    assert reply[:2] == [b"busy", b"group_bytes"]
    assert not fake.scripts.exists(keys.payload("n"))
    assert problems(run) == []


def test_a_push_whose_reply_was_lost_is_sent_again_under_new_keys(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the old keys the second attempt, whose records are duplicates, would delete the payloads of the first."""
    carry_out = Producer._carry_out
    sent: list[set[str]] = []

    def lose_first_reply(self: Producer, request: Any) -> Any:
        reply = carry_out(self, request)
        if hasattr(request, "payloads"):
            sent.append({key for key, _ in request.payloads})
            if len(sent) == 1:
                raise redis.exceptions.ConnectionError("lost")
        return reply

    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.begin_group(2, group_id="g")
        monkeypatch.setattr(Producer, "_carry_out", lose_first_reply)
        assert producer.push([trajectory("g", index) for index in range(2)]).codes == ["duplicate"] * 2
        assert len(sent[0]) == len(sent[1]) == 2
        assert not sent[0] & sent[1]
        assert {key.decode() for key in payload_keys(run)} == sent[0]
        assert group_all(run) == ["complete"]
    assert problems(run) == []


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
        assert fake.scripts.hget(keys.group("g"), "version") == b"3"
        assert producer.push([trajectory("g", 0), trajectory("g", 1)]).codes[1] == "pushed"
        assert group_all(run) == ["complete"]
    assert problems(run) == []
