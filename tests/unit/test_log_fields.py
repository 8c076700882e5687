"""Log records carry fields for machines: what happened, and which run, role, batch and group it concerns."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from streamadv.errors import NoBatchError
from streamadv.grouping import housekeeping
from streamadv.messages import log_fields
from streamadv.store.connection import Connection
from streamadv.store.reasons import Reason
from streamadv.store.waiting import Blocked
from streamadv.trainer.queue import TrainerQueue

from ..support import (
    delivered_batch,
    group_all,
    join,
    make_overdue,
    next_batch,
    producing,
    push_groups,
    trajectory,
)

PACKAGE = Path(str(resources.files("streamadv")))
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a module's `logger`, with the place where it stands."""
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "logger" in text else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "logger":
                assert node.func.attr in LEVELS, node.func.attr
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_log_call_passes_fields() -> None:
    calls = list(log_calls())
    assert calls
    assert [place for place, call in calls if "extra" not in {keyword.arg for keyword in call.keywords}] == []


def test_fields_that_do_not_apply_are_left_out() -> None:
    assert log_fields("trained", run="r", batch=0) == {"event": "trained", "run": "r", "batch": 0}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    names = ("event", "run", "role", "batch", "group", "reason", "count")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def test_an_expired_group_is_found_by_its_fields(fake: Connection, caplog: pytest.LogCaptureFixture) -> None:
    with producing(fake, "r") as producer:
        producer.push([trajectory("late", 0)])
        run = join(fake, "r")
        group_all(run)
        make_overdue(run, "late")
        housekeeping.Housekeeping(run).round()
    expected = {"event": "groups_expired", "run": "r", "role": "grouper", "group": "late", "count": 1}
    assert expected in map(fields_of, caplog.records)


def test_who_waits_is_found_by_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    Blocked("judge", "waiting for the server", "exp1", first_s=0.0).because(Reason("server_away", "refused"))
    (record,) = caplog.records
    expected = {"event": "waiting", "run": "exp1", "role": "judge", "reason": "server_away"}
    assert fields_of(record) == expected
    assert re.match("run exp1: judge: waiting for the server", record.getMessage())


def test_groups_dropped_for_one_reason_are_one_record_per_batch(
    fake: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = TrainerQueue(
            fake, "r", batch_groups=1, max_staleness=20, drop_after=0, prefetch=0, commit="each_batch"
        )
        for k in range(2):
            push_groups(producer, 1, prefix=f"fresh{k}-", model_version=k)
            batch = delivered_batch(queue, run)
            queue.trained(batch)
        push_groups(producer, 6, prefix="old", model_version=0)
        push_groups(producer, 1, prefix="young", model_version=2)
        assert next_batch(queue, run) is not None
    (record,) = [record for record in caplog.records if getattr(record, "event", None) == "groups_dropped"]
    assert fields_of(record) == {
        "event": "groups_dropped",
        "run": "r",
        "role": "trainer",
        "batch": 2,
        "group": "old0000",
        "reason": "stale",
        "count": 6,
    }
    assert record.getMessage() == "batch 2: 6 groups are not trained on: stale, older than drop_after allows"


def dropped_so_far(caplog: pytest.LogCaptureFixture) -> int:
    """Groups that the log has told of."""
    return sum(
        getattr(record, "count", 0)
        for record in caplog.records
        if getattr(record, "event", "") == "groups_dropped"
    )


def test_drops_without_a_batch_are_told_when_the_trainer_leaves(
    fake: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = TrainerQueue(
            fake, "r", batch_groups=1, max_staleness=20, drop_after=0, prefetch=0, commit="each_batch"
        )
        push_groups(producer, 1, prefix="fresh", model_version=0)
        batch = delivered_batch(queue, run)
        queue.trained(batch)
        counts = []
        for prefix in ("a", "b"):
            push_groups(producer, 2, prefix=prefix, model_version=0)
            with pytest.raises(NoBatchError):
                next_batch(queue, run)
            counts.append(dropped_so_far(caplog))
        assert counts == [2, 2], "the second line would come too soon"
        queue.close()
    assert dropped_so_far(caplog) == 4
