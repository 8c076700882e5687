"""Pushing: the only place of dedupe, no payload without a reference, what a push without a reward needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import GroupEndedError, TrajectoryError
from streamadv.producer import producer as producer_module
from streamadv.producer.requests import MAX_SLICE_BYTES
from streamadv.run import Run
from streamadv.run.packets import fetch_columns
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.scripts import run_transaction
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.packet import payloads_of
from streamadv.trajectory.schema import MAX_REWARDS
from tests.shares import examples
from tests.support import (
    OneClient,
    delivered_batch,
    ended,
    group_all,
    join,
    ledger,
    logged,
    make_overdue,
    payload_keys,
    problems,
    producing,
    push_one,
    trajectory,
)

MB = 1 << 20


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
        with pytest.raises(TrajectoryError, match="rollout_index is 4, group g has no such slot"):
            push_one(producer, trajectory("g", 4))
    assert problems(run) == []


def test_what_is_overtaken_by_the_completion_of_its_group_is_surplus(fake: Connection) -> None:
    with producing(fake, "r", {"redundancy": 1}) as producer:
        run = join(fake, "r")
        assert producer.push([trajectory("g", index) for index in range(3)]).codes == ["pushed"] * 3
        assert group_all(run) == ["complete"]
    assert ledger(run)["dropped"] == {"surplus": 1}
    assert len(payload_keys(run)) == 1  # its bytes go with its packet
    assert problems(run) == []


def test_what_comes_after_expiry_is_late(fake: Connection) -> None:
    with producing(fake, "r", {"keep_bytes": 0}) as producer:
        run = join(fake, "r")
        push_one(producer, trajectory("g", 0))
        group_all(run)
        make_overdue(run, "g")
        group_all(run)
        assert push_one(producer, trajectory("g", 1)) == "late"
        assert push_one(producer, trajectory("g", 1)) == "duplicate"
        assert push_one(producer, trajectory("g", 0)) == "duplicate"
        with pytest.raises(GroupEndedError, match="g has ended: a run has each group_id once"):
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


def test_an_index_that_no_such_group_has_opens_none(fake: Connection) -> None:
    with producing(fake, "r", {"redundancy": 1}) as producer:
        run = join(fake, "r")
        with pytest.raises(TrajectoryError, match=r"rollout_index is 5, group g has 3 slots \(0 to 2\)"):
            push_one(producer, trajectory("g", 5))
        counted_from_1 = [
            [trajectory(f"g{number}", index, 4) for index in range(2, 6)] for number in range(2)
        ]
        with pytest.raises(TrajectoryError, match=r"rollout_index is 5, group g0 has 5 slots \(0 to 4\)"):
            producer.push_many(counted_from_1)
        assert read_status(run).groups.open == 0
        assert ledger(run)["pushed"] == 0
        assert payload_keys(run) == []
        producer.begin_group(2, group_id="wide", redundancy=3)
        assert push_one(producer, trajectory("wide", 4)) == "pushed"
    assert problems(run) == []


def test_records_of_a_whole_group_name_their_slots(fake: Connection) -> None:
    record = {"input_ids": np.arange(3, dtype=np.int32), "response_mask": np.ones(3, np.uint8), "reward": 1.0}
    with producing(fake, "r") as producer:
        group = producer.begin_group(2, group_id="g")
        for records in (
            [record],
            [{**record, "input_ids": [1, 2, 3]}],
            [{**record, "rollout_index": 0}, record],
        ):
            with pytest.raises(TrajectoryError, match="rollout_index is missing, needs one of 0 to 1"):
                group.push(records)
        assert group.push([{**record, "rollout_index": index} for index in range(2)]).codes == ["pushed"] * 2
        assert next(iter(producer.begin_group(2))).push(**record) == "pushed"
        assert producer.begin_group(1).push([record]).codes == ["pushed"]


def test_what_needs_no_full_validation_is_refused_as_by_it(fake: Connection) -> None:
    record = {"rollout_index": 0, "response_mask": np.ones(3, np.uint8), "reward": 1.0}
    with producing(fake, "r") as producer:
        group = producer.begin_group(2)
        for ids in (np.array([1, -1, 2], np.int32), [1, -1, 2]):
            with pytest.raises(TrajectoryError, match="input_ids: is -1 at token 1, needs an id from 0 on"):
                group.push([{**record, "input_ids": ids}])


@pytest.mark.parametrize("in_rows", [False, True])
def test_what_the_chain_computes_is_not_pushed(fake: Connection, in_rows: bool) -> None:
    row = {"input_ids": [1, 2], "response_mask": [0, 1], "returns": [0.0, 1.0]}
    with producing(fake, "r") as producer:
        rollout = next(iter(producer.begin_group(1)))
        with pytest.raises(
            TrajectoryError, match="returns is what the chain computes, nobody pushes it: leave"
        ):
            rollout.push(reward=1.0, **({"rows": [row]} if in_rows else row))


def test_one_push_is_for_one_group(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        for other in (trajectory("h", 1), trajectory("g", 1, 3)):
            with pytest.raises(TrajectoryError, match="one group at a time"):
                producer.push([trajectory("g", 0), other])
        assert producer.push([]).codes == []
    assert ledger(join(fake, "r"))["pushed"] == 0


def test_a_push_without_reward_that_nobody_brings_is_an_error(fake: Connection) -> None:
    columns = {"input_ids": [1], "response_mask": [1]}
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        first, second, third = producer.begin_group(3, group_id="g")
        for forgotten in (columns, {**columns, "rewards": {"format": 1.0}}):
            with pytest.raises(
                TrajectoryError, match=r"reward: .* g/0 .*no scorers.*give reward.*reward_later"
            ):
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


def test_a_trajectory_above_the_limit_is_an_error_naming_it(fake: Connection) -> None:
    with producing(fake, "r", {"max_trajectory_bytes": 1024}) as producer:
        with pytest.raises(TrajectoryError, match="max_trajectory_bytes is 1024"):
            producer.push([trajectory("g", 0, tokens=400)])
        assert push_one(producer, trajectory("g", 0, tokens=20)) == "pushed"


def test_extra_columns_are_fixed_by_their_first_push(fake: Connection) -> None:
    with producing(fake, "r") as one, producing(fake, "r") as other:
        one.push([trajectory("g", 0, x=np.zeros((5, 2), np.int16))])
        for wrong in (np.zeros((5, 2), np.int8), np.zeros((5, 3), np.int16), np.zeros((4, 2), np.int16)):
            with pytest.raises(TrajectoryError, match=r"^group g, rollout 1: extra column x has dtype int"):
                other.push([trajectory("g", 1, x=wrong)])
        mixed = [trajectory("h", 0, y=np.zeros(5, np.int8)), trajectory("h", 1, y=np.zeros(5, np.int16))]
        with pytest.raises(
            TrajectoryError, match=r"^group h, rollout 1: extra column y has dtype int16, one"
        ):
            other.push(mixed)
    assert problems(join(fake, "r")) == []


def test_as_many_entries_as_tokens_by_chance_leave_a_column_what_it_is(fake: Connection) -> None:
    lengths = (5, 3, 4)
    with producing(fake, "r") as producer:
        for index, tokens in enumerate(lengths):
            producer.push([trajectory("g", index, 3, tokens=tokens, box=[1, 2, 3])])
        at_once = [
            trajectory("h", index, 3, tokens=tokens, new=[1, 2, 3]) for index, tokens in enumerate((3, 5, 4))
        ]
        producer.push(at_once)
        run = join(fake, "r")
    assert [run.manifest.columns[name] for name in ("box", "new")] == ['["<i8", [], false]'] * 2
    assert group_all(run) == ["complete"] * 2
    assert problems(run) == []


def test_a_list_has_the_numbers_that_the_run_has(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([trajectory("g", 0, 4, box=[0.5, 2.0], few=np.ones(2, np.float32), n=[1, 2])])
        producer.push([trajectory("g", 1, 4, box=[1, 2], few=[1, 2], n=[1.0, 2.0])])
        for wrong in ({"box": [2**53 + 1, 2]}, {"few": [0.1, 0.2]}, {"n": [0.5, 1.0]}):
            with pytest.raises(TrajectoryError, match=r"push that, or use another name$"):
                producer.push([trajectory("g", 2, 4, **wrong)])
        run = join(fake, "r")
    assert [run.manifest.columns[name] for name in ("box", "few", "n")] == [
        f'["{dtype}", [], false]' for dtype in ("<f8", "<f4", "<i8")
    ]
    assert problems(run) == []


def test_a_column_per_token_in_the_run_says_how_to_push_another(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([trajectory("g", 0, tokens=3, box=[1, 2, 3])])
        with pytest.raises(TrajectoryError) as caught:
            producer.push([trajectory("g", 1, tokens=4, box=[1, 2, 3])])
        assert str(caught.value) == (
            "group g, rollout 1: extra column box has dtype int64, one number an entry, not per token, run r has dtype "
            "int64, one number per token since its first push: give one entry per token, or use another name, from its "
            'first push on as {"data": ..., "per_token": False}'
        )
        stated = {"data": [1, 2, 3], "per_token": False}
        assert push_one(producer, trajectory("g", 1, tokens=3, other=stated)) == "pushed"
        with pytest.raises(TrajectoryError, match=r'push other={"data": \.\.\., "per_token": False}$'):
            producer.push([trajectory("h", 0, tokens=3, other={"data": [1, 2, 3], "per_token": True})])


def test_a_large_group_is_pushed_in_slices(fake: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def count(connection: Connection, payloads: Any, *call: Any) -> Any:
        sent.append(sum(len(value) for _, fields in payloads for value in fields.values()))
        return run_transaction(connection, payloads, *call)

    monkeypatch.setattr(producer_module, "run_transaction", count)
    with producing(fake, "r", {"max_trajectory_bytes": MB}) as producer:
        big = [trajectory("g", index, 6, tokens=100_000) for index in range(6)]
        assert producer.push(big).codes == ["pushed"] * 6
        many = [trajectory("h", index, 300) for index in range(300)]
        assert producer.push(many).count("pushed") == 300
    assert len(sent) >= 4
    assert max(sent) <= MAX_SLICE_BYTES
    assert group_all(join(fake, "r")) == ["complete", "complete"]
    assert problems(join(fake, "r")) == []


@settings(max_examples=examples(25), deadline=None)
@given(dedupe=st.integers(1, 4), total=st.integers(1, 12))
def test_the_last_groups_are_remembered(dedupe: int, total: int) -> None:
    fake = OneClient()
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


@pytest.mark.parametrize("record", [5, "text", None, ["a"]])
def test_what_is_no_record_is_refused_by_its_position(fake: Connection, record: Any) -> None:
    with producing(fake, "r") as producer:
        group = producer.begin_group(2)
        with pytest.raises(TrajectoryError, match="record 0: is "):
            group.push([record])
        with pytest.raises(TrajectoryError, match="record 0 is "):
            producer.push([record])


@pytest.mark.parametrize("metadata", [["a"], "text", 5])
def test_metadata_of_a_push_is_an_object(fake: Connection, metadata: Any) -> None:
    with producing(fake, "r") as producer:
        rollout = next(iter(producer.begin_group(1)))
        with pytest.raises(TrajectoryError, match=r"metadata: .*dictionary"):
            rollout.push(input_ids=[1], response_mask=[1], reward=1.0, metadata=metadata)


def test_scripts_refuse_what_they_do_not_know(fake: Connection) -> None:
    """A push of a record that is not admitted leaves neither payload nor counter."""
    run = join(fake, "r")
    keys = run.keys.home
    run.home.call("lay_out", [1])
    fake.scripts.hset(keys.payload("n"), "header", "x")
    max_trajectory_bytes, max_bytes, shards = 50, 10, 1
    limits = ["p", f"{max_trajectory_bytes} {max_bytes} {shards} - - - 1"]
    group = ["g", "train 1 1 1000 "]
    packet = [1, 0, keys.payload("n"), 10, "0 usable 1.0 train\n", ""]
    (reply,) = run.home.call(
        "push",
        [*limits, "0", 1, *group, 0, 1, *packet],
        scorer=keys.void,
        group_hashes=[keys.group("g")],
        payloads=[keys.payload("n")],
    )
    assert reply[:2] == [b"busy", b"group_bytes"]
    assert not fake.scripts.exists(keys.payload("n"))
    assert problems(run) == []


def test_records_without_payloads_go_where_the_server_is_asked_for_its_id(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a former primary that one client still reaches takes them, and nobody sends them again."""
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        push_one(producer, trajectory("g", 0, 4))
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "scripts", property(lambda self: pytest.fail("asks another client")))
            push_one(producer, ended("g", 1, 4, "failed"))
            push_one(producer, trajectory("g", 2, 4, reward=None))
        assert ledger(run)["pushed"] == 3
    assert problems(run) == []


def test_a_push_whose_reply_was_lost_is_sent_again_under_new_keys(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the old keys the second attempt, whose records are duplicates, would delete the payloads of the first."""
    sent: list[set[str]] = []

    def lose_first_reply(connection: Connection, payloads: Any, *call: Any) -> Any:
        reply = run_transaction(connection, payloads, *call)
        sent.append({key for key, _ in payloads})
        if len(sent) == 1:
            raise redis.exceptions.ConnectionError("lost")
        return reply

    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.begin_group(2, group_id="g")
        monkeypatch.setattr(producer_module, "run_transaction", lose_first_reply)
        assert producer.push([trajectory("g", index) for index in range(2)]).codes == ["duplicate"] * 2
        assert len(sent[0]) == len(sent[1]) == 1
        assert not sent[0] & sent[1]
        assert {key.decode() for key in payload_keys(run)} == sent[0]
        assert group_all(run) == ["complete"]
    assert problems(run) == []


def test_of_a_packet_with_duplicates_the_new_members_are_kept_alone(fake: Connection) -> None:
    """The packet as a whole would keep bytes that belong to nobody."""
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        first = [trajectory("g", index, 6, metadata={"first": index}) for index in (1, 4)]
        assert producer.push(first).codes == ["pushed"] * 2
        second = [trajectory("g", index, 6, metadata={"second": index}) for index in (5, 4, 0, 1, 3, 2)]
        result = producer.push(second)
        assert result.codes == ["pushed", "duplicate", "pushed", "duplicate", "pushed", "pushed"]
        assert result.indices == [5, 0, 3, 2]
        assert group_all(run) == ["complete"]
    assert read_status(run).duplicates == 2
    group = logged(run)["g"]
    assert [int(index) for index in group.members.table["index"]] == list(range(6))
    payloads = [
        payloads_of(fetched.packet, fetched.columns, fetched.header)
        for fetched in fetch_columns(run, group.packets, None, header=True)
    ]
    found = [payloads[packet][at] for packet, at in zip(group.packet_of, group.position_of, strict=True)]
    expected = [{"second": 0}, {"first": 1}, {"second": 2}, {"second": 3}, {"first": 4}, {"second": 5}]
    assert [payload.header.metadata for payload in found] == expected
    for index, payload in enumerate(found):
        assert list(payload.columns["input_ids"]) == list(trajectory("g", index).rows[0].input_ids)
    assert sum(size for _, size in group.payloads) == stored_bytes(run)
    assert problems(run) == []


def stored_bytes(run: Run) -> int:
    scripts: Any = run.connection.scripts
    return sum(len(value) for key in payload_keys(run) for value in scripts.hvals(key))


def test_of_two_records_for_one_slot_the_first_counts(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        items = [
            trajectory("g", 1),
            ended("g", 0, 2, "failed"),
            trajectory("g", 0),
            trajectory("g", 1, reward=9.0),
        ]
        result = producer.push(items)
        assert (result.codes, result.indices) == (["pushed", "pushed", "duplicate", "duplicate"], [1, 0])
    assert ledger(run)["pushed"] == 2
    assert problems(run) == []


def test_of_two_records_for_one_slot_the_first_counts_also_beside_a_duplicate(fake: Connection) -> None:
    """Its packet is refused, and it comes again alone."""
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", 0, 4)])
        first = [trajectory("g", index, 4) for index in (0, 1, 2)]
        second = [trajectory("g", index, 4, reward=9.0) for index in (1, 2, 3)]
        result = producer.push([*first, *second])
        assert result.codes == ["duplicate", "pushed", "pushed", "duplicate", "duplicate", "pushed"]
        assert group_all(run) == ["complete"]
    rewards = logged(run)["g"].members.table["reward"].tolist()
    assert [reward == 9.0 for reward in rewards] == [False, False, False, True]
    assert read_status(run).duplicates == 3
    assert problems(run) == []


def test_a_payload_that_ended_before_its_script_is_sent_again(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a server that was stopped for longer than a payload lives without being registered."""
    sent: list[list[str]] = []

    def forget_first(connection: Connection, payloads: Any, *call: Any) -> Any:
        sent.append([key for key, _ in payloads])
        return run_transaction(connection, payloads[1:] if len(sent) == 1 else payloads, *call)

    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.begin_group(3, group_id="g")
        monkeypatch.setattr(producer_module, "run_transaction", forget_first)
        items = [trajectory("g", 0, 3), trajectory("g", 1, 3, values=np.zeros(5)), ended("g", 2, 3, "failed")]
        assert producer.push(items).codes == ["pushed"] * 3
        assert [len(keys) for keys in sent] == [2, 1]
        assert set(payload_keys(run)) == {key.encode() for key in (sent[0][1], sent[1][0])}
    assert problems(run) == []


@pytest.mark.parametrize("tokens", [5, 40_000])
def test_arrays_and_lists_are_stored_alike(fake: Connection, tokens: int) -> None:
    """Arrays of the right types take a shorter way."""
    with producing(fake, "r", {"max_trajectory_bytes": MB}) as producer:
        run = join(fake, "r")
        for name in ("arrays", "lists"):
            records = []
            for index in range(4):
                record: dict[str, Any] = {**trajectory("g", index, tokens=tokens).rows[0].columns}
                if name == "lists":
                    record = {column: array.tolist() for column, array in record.items()}
                records.append({**record, "reward": 0.5 * index, "metadata": {"n": index}})
            group = producer.begin_group(4, group_id=name, data_source="math", metadata={"prompt": 1})
            together = [{**record, "rollout_index": index} for index, record in enumerate(records[:3])]
            assert group.push(together).codes == ["pushed"] * 3
            assert list(group)[3].push(**records[3]) == "pushed"
        group_all(run)
    found = [
        [
            (packet.size, packet.columns, packet.members.table.tobytes(), fake.scripts.hgetall(packet.key))
            for packet in logged(run)[name].packets
        ]
        for name in ("arrays", "lists")
    ]
    assert found[0] == found[1]
    assert len(found[0]) >= 2
    assert problems(run) == []


def test_optional_arguments_of_push_take_none(fake: Connection) -> None:
    columns: dict[str, Any] = {"input_ids": [1, 2], "response_mask": [0, 1]}
    with producing(fake, "r", {"scorers": ("s",)}) as producer:
        one, other = producer.begin_group(2, metadata={"prompt": "p-7"})
        fields = dict.fromkeys(("rewards", "metadata", "steps", "rows", "rollout_log_probs", "seen_images"))
        assert one.push(**columns, **fields, reward=0.5) == "pushed"
        group = producer.begin_group(1)
        assert group.push([{**columns, **fields, "reward": 0.5}]).codes == ["pushed"]
        assert other.push(**columns, reward=None, model_version=None) == "pushed"  # unscorable, of no version
        run = join(fake, "r")
        assert fake.scripts.xlen(run.keys.home.scoring("s")) == 0
    assert ledger(run)["queued"] == 3


def test_positive_log_probs_are_refused_at_push(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        [rollout] = producer.begin_group(1)
        columns = {"input_ids": np.array([1, 2], np.int32), "response_mask": np.array([0, 1], np.uint8)}
        with pytest.raises(
            TrajectoryError, match=r"rollout_log_probs: is 0\.\d+ at token 1, needs at most 0"
        ):
            rollout.push(**columns, reward=1.0, rollout_log_probs=np.array([0.0, 0.7], np.float32))


def test_each_trajectory_may_have_its_own_named_rewards(fake: Connection) -> None:
    """As many as all of a packet can have: such as one for each test of a program."""
    named = [
        {f"test-{index}-{number}": float(number) for number in range(MAX_REWARDS)} for index in range(64)
    ]
    with producing(fake, "r") as producer:
        producer.push([trajectory("g", index, 64, rewards=rewards) for index, rewards in enumerate(named)])
    run = join(fake, "r")
    assert group_all(run) == ["complete"]
    with TrainerQueue(fake, "r", batch_groups=1, prefetch=0) as queue:
        assert [item.rewards for item in delivered_batch(queue, run).trajectories()] == named
    assert problems(run) == []


def test_how_many_rollouts_may_be_open_is_logged_once(
    fake: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_bytes": 4_000_000, "max_trajectory_bytes": 100_000}
    with caplog.at_level("INFO"), producing(fake, "r", settings) as producer:
        for _ in range(3):
            producer.begin_group(2)
    said = [message for message in caplog.messages if "open rollouts" in message]
    assert said == [
        "run r: max_bytes 4000000 holds 40 open rollouts, as each reserves 100000 bytes: max_trajectory_bytes, "
        "until eight are known"
    ]
