"""URLs, hidden passwords, backoff and the in-process client: what needs no server."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
import redis.asyncio.cluster
import redis.exceptions
from hypothesis import given
from hypothesis import strategies as st

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.grouping.scorer import Scorer
from streamadv.metrics.instruments import RETRY_REASONS
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.keys import check_run_name
from streamadv.store.retry import RETRYABLE, NotNowError, reason_of
from streamadv.store.urls import hide_password, parse_url


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("http://localhost", "redis://"),
        ("localhost:6379", "redis://"),
        ("redis://localhost/abc", "database"),
        ("redis://localhost:99999", "Port"),
        ("redis://localhost?no_such_option=1", "no_such_option"),
        ("redis://localhost?socket_timeout=3", "socket_timeout"),
        ("redis://localhost?decode_responses=1", "decode_responses"),
        ("unix://", "socket"),
        ("redis+cluster://localhost/3", "database 0"),
        ("redis+sentinel://localhost:26379", "name the master"),
        ("redis+sentinel://a,,b/mymaster", "empty"),
        ("redis+sentinel://a,b/mymaster/x", "database"),
        ("redis+sentinel://a/mymaster?sentinel_port=1", "sentinel_port"),
        ("redis+sentinel://a/mymaster?no_such_option=1", "no_such_option"),
        ("redis://user:p@ss/word@localhost", "%40"),
    ],
)
@pytest.mark.parametrize("kind", [Connection, AsyncConnection])
def test_a_bad_url_is_a_one_line_error_before_any_network(
    kind: type[Connection] | type[AsyncConnection], url: str, part: str
) -> None:
    with pytest.raises(SettingError) as caught:
        kind(url)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://user:secret@localhost:6380/2",
        "rediss://localhost?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=1",
        "redis+cluster://localhost:7000",
        "rediss+cluster://localhost:7000/0",
        "redis+sentinel://user:secret@a:26379,b,[::1]:26380/mymaster/2?sentinel_password=other",
        "rediss+sentinel://a/mymaster?ssl_cert_reqs=none",
    ],
)
def test_every_scheme_is_accepted_without_a_server(url: str) -> None:
    if "+cluster" in url and not hasattr(redis.asyncio.cluster, "TransactionStrategy"):
        pytest.skip("redis-py 7 or newer")
    assert Connection(url).url == url
    assert AsyncConnection(url).url == url


def test_a_url_names_sentinels_their_login_and_the_master() -> None:
    target = parse_url(
        "rediss+sentinel://me:pw@a:1,b,[::1]:2/mymaster/3?sentinel_password=x%40y&max_connections=7"
    )
    assert target.sentinels == (("a", 1), ("b", 26379), ("::1", 2))
    assert target.master == "mymaster"
    assert target.url_options == {"username": "me", "password": "pw", "db": 3, "max_connections": 7}
    assert target.sentinel_options["password"] == "x@y"
    assert "username" not in target.sentinel_options
    assert target.sentinel_options["ssl"] is True


@given(st.text(max_size=30))
def test_no_message_shows_a_password(text: str) -> None:
    for password in (f"pw-{text}", quote(f"pw-{text}", safe="")):
        url = f"redis://user:{password}@localhost:6379/0"
        try:
            shown = repr(Connection(url))
        except SettingError as error:
            shown = str(error)
        assert "pw-" not in shown
        assert "pw-" not in hide_password(f"unix:///run/redis.sock?password={quote(password, safe='')}&db=1")


@pytest.mark.parametrize("connection", [None, b"redis://h", 6379])
def test_what_is_no_url_is_an_error_of_one_line(connection: Any) -> None:
    for make in (sa.Producer, sa.TrainerQueue, lambda given: Scorer(given, "run", "name")):
        with pytest.raises(SettingError, match=f"connection is {type(connection).__name__}, needs a URL"):
            make(connection)


def test_a_run_without_a_name_is_an_error_of_one_line() -> None:
    with pytest.raises(SettingError, match="run is None: use letters"):
        check_run_name(None)  # type: ignore[arg-type]


def test_what_is_not_a_password_stays_readable() -> None:
    assert hide_password("redis://me:secret@host:6379/2") == "redis://me:***@host:6379/2"
    assert hide_password("redis://host:6379/2") == "redis://host:6379/2"
    assert hide_password("redis+sentinel://a/m?sentinel_password=x&db=1") == (
        "redis+sentinel://a/m?sentinel_password=***&db=1"
    )
    assert hide_password("unix:///a.sock?password=x&db=1") == "unix:///a.sock?password=***&db=1"


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.ConnectionError("refused"),
        redis.exceptions.TimeoutError("no reply"),
        redis.exceptions.BusyLoadingError("LOADING"),
        redis.exceptions.ReadOnlyError("READONLY"),
        redis.exceptions.ClusterDownError("CLUSTERDOWN"),
        redis.exceptions.MasterDownError("MASTERDOWN"),
        redis.exceptions.TryAgainError("TRYAGAIN"),
        redis.exceptions.MovedError("1 127.0.0.1:7000"),
        redis.exceptions.RedisClusterException("no node answers"),
        NotNowError("NOREPLICAS Not enough good replicas to write."),
        NotNowError("BUSY Valkey is busy running a script."),
    ],
)
def test_what_passes_by_itself_is_retryable(error: Exception) -> None:
    assert isinstance(error, RETRYABLE)
    assert reason_of(error) in RETRY_REASONS


def test_a_failure_is_counted_under_its_reason() -> None:
    assert reason_of(redis.exceptions.MovedError("1 127.0.0.1:7000")) == "moved"
    assert reason_of(redis.exceptions.AskError("1 127.0.0.1:7000")) == "ask"
    assert reason_of(redis.exceptions.MasterDownError("x")) == "masterdown"
    assert reason_of(redis.exceptions.BusyLoadingError("x")) == "loading"
    assert reason_of(redis.exceptions.ConnectionError("x")) == "connection"
    assert reason_of(NotNowError("Command # 1 of pipeline caused error: MISCONF snapshots fail")) == "misconf"


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.ResponseError("ERR wrong number of arguments"),
        redis.exceptions.OutOfMemoryError("OOM"),
        redis.exceptions.DataError("bad type"),
        SettingError("x"),
        OSError("disk"),
    ],
)
def test_what_does_not_pass_by_itself_is_not(error: Exception) -> None:
    assert not isinstance(error, RETRYABLE)


def test_a_given_client_plays_every_role(fake: Connection) -> None:
    fake.push.set("key", b"\xff")
    assert fake.scripts.get("key") == b"\xff"
    assert fake.blocking(100).get("key") == b"\xff"
    fake.wait_until_ready(1)
    fake.close()
    assert fake.scripts.get("key") == b"\xff"  # its owner closes it
