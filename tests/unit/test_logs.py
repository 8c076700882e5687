"""The log as JSON: one object per line, whatever is logged."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

from streamadv import cli
from streamadv.logs import JsonFormatter, announce, set_up_logging
from streamadv.messages import log_fields


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_record_has_its_fields_and_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json", run="r", role="grouper")
    fields = log_fields("group_dropped", role="trainer", batch=3, group="g\ud800", reason="stale", count=2)
    logging.getLogger("streamadv.test").warning("first\n%s", "second", extra=fields)
    logging.getLogger("streamadv.test").info("plain")
    logging.getLogger("streamadv.test").debug("not shown")
    full, plain = printed(capsys)
    assert {name: full[name] for name in (*fields, "run", "level", "logger", "message")} == {
        **fields,
        "run": "r",
        "level": "warning",
        "logger": "streamadv.test",
        "message": "first\nsecond",
    }
    assert datetime.fromisoformat(full["time"]).utcoffset() == timedelta(0)
    assert full["process"].endswith(f"-{plain['process'].rpartition('-')[2]}")
    assert (plain["run"], plain["role"]) == ("r", "grouper")
    assert not {"event", "batch", "group", "reason", "count", "exception"} & plain.keys()


def test_packages_that_talk_are_heard_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("debug")
    for name in ("torch._subclasses.fake_tensor", "numba", "torchtune"):
        for level in (logging.INFO, logging.WARNING):
            logging.getLogger().handle(logging.LogRecord(name, level, "", 0, "said", None, None))
    lines = [line.split()[2:4] for line in capsys.readouterr().err.splitlines()]
    names = ["torch._subclasses.fake_tensor:", "numba:", "torchtune:"]
    assert lines == [["WARNING", names[0]], ["WARNING", names[1]], ["INFO", names[2]], ["WARNING", names[2]]]


def test_a_crash_is_one_record(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    try:
        raise ValueError("broken")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    (record,) = printed(capsys)
    assert (record["event"], record["level"]) == ("crashed", "critical")
    assert "Traceback" in record["exception"]
    assert "broken" in record["message"]


def test_what_a_command_tells_is_a_record_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMADV_REDISURL", "redis://host")
    assert cli.main(["status", "--run", "r", "--log-format", "json"]) == 1
    typo, failed = printed(capsys)
    assert (typo["event"], typo["run"], typo["role"]) == ("setting_unknown", "r", "status")
    assert (failed["event"], failed["level"]) == ("command_failed", "error")
    assert "no server is given" in failed["message"]


def test_an_announcement_stays_text_where_the_log_does(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("error")
    announce("all\ngone", "ended", who="up")
    assert capsys.readouterr().err == "up: all\\ngone\n"


def test_the_formatter_serves_handlers_of_a_user(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(run="r", role="trainer"))
    handler.handle(logging.LogRecord("mine", logging.INFO, "", 0, "%d steps", (3,), None))
    (record,) = printed(capsys)
    assert (record["message"], record["role"]) == ("3 steps", "trainer")
