"""Keys: what they carry, and that nothing else is accepted."""

from __future__ import annotations

import base64
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamadv import doors
from streamadv.errors import SettingError
from streamadv.gateway import BadKeyError, Keys
from streamadv.gateway.keys import MAX_KEY
from streamadv.producer.tickets import Ticket, new_group_id

OLD, NEW = "the secret of last year", "the secret of this year"
TICKET = Ticket(new_group_id(), 3, 8, 10, 5, 41, metadata={"answer": "forty-two"}, deadline_s=600)


@given(
    group_id=st.one_of(st.just(new_group_id()), st.text("abcé/:-", min_size=1, max_size=200)),
    counts=st.tuples(st.integers(0, 8191), st.integers(1, 4096), st.integers(1, 8192), st.integers(0, 2**53)),
    version=st.one_of(st.none(), st.integers(0, 2**53)),
    role=st.sampled_from(["train", "eval"]),
    deadline_s=st.sampled_from([None, 600.0]),
    round_name=st.sampled_from([None, "step-100"]),
    purpose=st.sampled_from(["turn", "end"]),
)
def test_a_key_carries_its_ticket(group_id, counts, version, role, deadline_s, round_name, purpose) -> None:  # type: ignore[no-untyped-def]
    ticket = Ticket(group_id, *counts, version, role=role, deadline_s=deadline_s, round=round_name)
    key = Keys([NEW]).sign(purpose, "team/run", ticket)
    claim = Keys([NEW]).open(key, "team/run")
    assert (claim.ticket, claim.purpose, claim.run) == (ticket, purpose, "team/run")
    assert len(key) <= MAX_KEY


def test_a_key_is_short_and_says_nothing_of_the_task() -> None:
    key = Keys([NEW]).sign("turn", "run", TICKET)
    assert len(key) < 160
    inside = base64.urlsafe_b64decode(key.removeprefix("sa1-") + "==")
    assert b"forty-two" not in inside
    assert b"00-abc" not in inside
    assert Keys([NEW]).open(key, "run").ticket == Ticket(TICKET.group_id, 3, 8, 10, 5, 41, deadline_s=600)


def test_two_secrets_are_valid_while_one_replaces_the_other() -> None:
    old, both, new = Keys([OLD]), Keys([NEW, OLD]), Keys([NEW])
    assert both.open(old.sign("turn", "run", TICKET), "run").purpose == "turn"
    assert new.open(both.sign("turn", "run", TICKET), "run").purpose == "turn"
    with pytest.raises(BadKeyError):
        new.open(old.sign("turn", "run", TICKET), "run")


def test_a_key_is_of_its_run_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys([NEW])
    key = keys.sign("turn", "run", TICKET, ttl_s=60)
    with pytest.raises(BadKeyError):
        keys.open(key, "another")
    now = time.time()
    monkeypatch.setattr(doors, "wall", lambda: now + 61)
    with pytest.raises(BadKeyError):
        keys.open(key, "run")


def test_no_change_of_a_key_is_a_key() -> None:
    keys, draw = Keys([NEW]), random.Random(1)
    key = keys.sign("turn", "run", TICKET)
    data = bytearray(
        base64.urlsafe_b64decode(key.removeprefix("sa1-") + "=" * (-len(key.removeprefix("sa1-")) % 4))
    )
    for at in range(len(data)):
        changed = data.copy()
        changed[at] ^= 1 << draw.randrange(8)
        with pytest.raises(BadKeyError):
            keys.open("sa1-" + base64.urlsafe_b64encode(changed).rstrip(b"=").decode(), "run")
    for text in (
        "",
        "sa1-",
        "sk-123",
        key[:-1],
        key + "A",
        key * 20,
        key + "é",
        "sa1-" + "\n" * 50,
        key.replace("sa1", "sa2"),
    ):
        with pytest.raises(BadKeyError):
            keys.open(text, "run")


def test_secrets_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{'n' * 32}\n{'o' * 32}\n")
    keys = Keys.from_environment({"STREAMADV_GATEWAY_SECRET_FILE": str(file)})
    assert keys.open(Keys(["o" * 32]).sign("operator", "run", None), "run").ticket is None
    with pytest.raises(SettingError, match="STREAMADV_GATEWAY_SECRET_FILE"):
        Keys.from_environment({})
    for wrong in ([], ["short"], ["a" * 32] * 3):
        with pytest.raises(SettingError, match="at least 16"):
            Keys(wrong)
