"""Tickets: pushed from anywhere, checked against what is pushed under them."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from streamadv.errors import TrajectoryError
from streamadv.producer.records import check_records
from streamadv.producer.tickets import Ticket, checked_ticket, new_group_id
from streamadv.store.connection import Connection
from tests.support import join, payload_keys, producing, trajectory


@pytest.mark.parametrize("text", ["", "{", "[]", '{"group_id": "g"}', '{"group_id": 1}'])
def test_what_is_no_ticket_is_said_to_be_none(text: str) -> None:
    with pytest.raises(TrajectoryError, match="ticket: "):
        Ticket.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"slots": 10**7}, {"slots": 0}, {"group_size": 0}, {"rollout_index": -1}, {"epoch": -1}),
        *({"deadline_s": -1.0}, {"deadline_s": 1e300}),
    ],
)
def test_a_ticket_that_no_group_has_is_refused(wrong: dict[str, float]) -> None:
    """A push to ten million slots would wait for room without end."""
    (field,) = wrong
    text = Ticket("g", 1, 2, 3, 0, 7).to_json()
    assert Ticket.from_json(text).slots == 3
    with pytest.raises(TrajectoryError, match=f"ticket: .*{field} is"):
        Ticket.from_json(json.dumps({**json.loads(text), **wrong}))
    with pytest.raises(TrajectoryError, match=f"ticket: .*{field} is"):
        checked_ticket(Ticket(**{**json.loads(text), **wrong}))


@pytest.mark.parametrize("wrong", [{"group_id": "a b"}, {"group_id": ""}, {"data_source": "x" * 201}])
def test_a_ticket_of_a_group_that_nobody_can_begin_is_refused(wrong: dict[str, str]) -> None:
    """The grouper would remove what ends its rollout, which the ledger has counted by then."""
    text = Ticket("g", 1, 2, 3, 0, 7).to_json()
    with pytest.raises(TrajectoryError, match=f"ticket: {next(iter(wrong))}"):
        Ticket.from_json(json.dumps({**json.loads(text), **wrong}))
    with pytest.raises(TrajectoryError, match=f"ticket: {next(iter(wrong))}"):
        checked_ticket(Ticket(**{**json.loads(text), **wrong}))


@pytest.mark.parametrize("deadline_s", [None, 600, np.float32(7.5), Fraction(1, 2)])
def test_a_ticket_says_the_deadline_of_its_group(fake: Connection, deadline_s: Any) -> None:
    with producing(fake, "r") as producer:
        ticket = producer.begin_group(2, deadline_s=deadline_s).tickets[1]
    for copied in (Ticket.from_json(ticket.to_json()), copy.deepcopy(ticket)):
        assert copied == ticket
        assert copied.deadline_s == deadline_s


def test_a_ticket_without_a_deadline_is_that_of_releases_before(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        ticket = producer.begin_group(1).tickets[0]
    assert "deadline_s" not in ticket.to_json()
    assert Ticket.from_json(ticket.to_json()).deadline_s is None


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


@pytest.mark.parametrize("ticket", ["text", None, {"group_id": "g"}])
def test_a_rollout_needs_a_ticket(fake: Connection, ticket: Any) -> None:
    with producing(fake, "r") as producer, pytest.raises(TrajectoryError, match="from_json"):
        producer.rollout(ticket)


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


def test_what_is_none_in_a_record_is_as_its_ticket_says() -> None:
    ticket = Ticket("g", 1, 2, 3, 0, 7, "math", {"a": 1}, "eval")
    unsaid = ("group_id", "group_size", "rollout_index", "data_source", "role", "metadata", "values")
    record = {"input_ids": [1], "response_mask": [1], "model_version": None, **dict.fromkeys(unsaid)}
    (item,) = check_records([record], ticket)
    assert (item.group_id, item.rollout_index, item.role, item.data_source) == ("g", 1, "eval", "math")
    assert item.metadata == {"a": 1}
    assert item.model_version is None


def test_new_group_ids_are_ordered_and_unique() -> None:
    ids = [new_group_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(text[14] == "7" and text[19] in "89ab" for text in ids)
    assert [text[:8] for text in ids] == sorted(text[:8] for text in ids)
