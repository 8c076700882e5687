"""What a URL leaves open is filled in, what stands in it is kept, and nothing of it reaches children twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.connection
from hypothesis import given
from hypothesis import strategies as st

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.settings import load_settings, shown_settings
from streamadv.store import tls
from streamadv.store.connection import Connection
from streamadv.store.urls import complete_url, environment_with, hide_password, secret_from

CA = {"ssl_ca_certs": Path("/etc/my ca.pem")}


@pytest.mark.parametrize(
    ("url", "complete"),
    [
        ("redis://host:1/0", "redis://:p%40s@host:1/0"),
        ("redis://me@host", "redis://me:p%40s@host"),
        ("redis://me:own@host", "redis://me:own@host"),
        ("redis://host?password=own", "redis://host?password=own"),
        ("redis+cluster://me@host:7000", "redis+cluster://me:p%40s@host:7000"),
        ("unix:///run/redis.sock?db=1", "unix://:p%40s@/run/redis.sock?db=1"),
    ],
)
def test_a_password_is_put_where_none_is(url: str, complete: str) -> None:
    assert complete_url(url, "p@s", {}) == complete
    assert complete_url(complete, "another", {}) == complete
    assert complete_url(url, None, {}) == url


@given(
    password=st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable()),
    user=st.sampled_from(["", "me"]),
)
def test_any_password_arrives_as_it_is_and_is_not_shown(password: str, user: str) -> None:
    url = complete_url(f"redis://{user}{'@' if user else ''}host:1/2", password, {})
    options = redis.connection.parse_url(url)
    assert (options["password"], options["host"], options["port"], options["db"]) == (password, "host", 1, 2)
    assert options.get("username") == (user or None)
    shown = f"redis://{user}:***@host:1/2"
    assert hide_password(url) == shown
    assert repr(Connection(url)) == f"Connection({shown!r})"


@pytest.mark.parametrize(
    "url",
    [
        " redis://u:hush@h",
        "REDIS://u:hush@h",
        "u:hush@h",
        "redis:/u:hush@h",
        "redis//u:hush@h",
        "redis:u:hush@h",
        "//u:hu/hush@h",
        "http://u:hush@h",
        "http://h?password=a@hush",
    ],
)
def test_no_password_is_shown_of_a_url_without_a_known_scheme(url: str) -> None:
    assert "hush" not in hide_password(url)
    with pytest.raises(SettingError, match="start it with one of redis://") as raised:
        Connection(url)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me@example.com:hush@h:1/0", "redis://me@example.com:***@h:1/0"),
        ("redis://team/me:hush@h", "redis://team/me:***@h"),
        ("redis://h:1/0?password=a@hush", "redis://h:***"),
        ("redis://h/0?password=a@hush&db=1", "redis://h/0?password=***&db=1"),
        ("redis://u@h:1/0?db=1&ssl_password=a@hush", "redis://u@h:***"),
        ("redis://u:hu?password=sh@hush", "redis://u:***"),
        ("redis+sentinel://u:hush@a:1,b/m?sentinel_password=x@hush&db=1", "redis+sentinel://u:***&db=1"),
    ],
)
def test_no_piece_of_a_password_is_shown_where_special_characters_are_not_quoted(
    url: str, shown: str
) -> None:
    assert hide_password(url) == shown
    with pytest.raises(SettingError, match=r"write special characters .* as %xx") as raised:
        Connection(url)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("url", ["localhost:7392", "redis:/h", "http://h", ""])
def test_a_url_without_a_known_scheme_gets_no_password(url: str) -> None:
    assert complete_url(url, "hush", CA) == url


def test_tls_files_become_options_of_the_url() -> None:
    url = complete_url("rediss://host?db=1", None, CA)
    assert url == "rediss://host?db=1&ssl_ca_certs=%2Fetc%2Fmy+ca.pem"
    assert redis.connection.parse_url(url)["ssl_ca_certs"] == "/etc/my ca.pem"
    assert complete_url(url, None, {"ssl_ca_certs": Path("/other")}) == url
    assert complete_url("rediss://host", None, {"ssl_ca_certs": None}) == "rediss://host"


@pytest.mark.parametrize("url", ["redis://host", "unix:///run/s", "redis+cluster://host"])
def test_tls_files_without_tls_are_an_error(url: str) -> None:
    with pytest.raises(SettingError, match=r"STREAMADV_TLS_CA_FILE is set.*rediss://"):
        complete_url(url, None, CA)


def test_settings_and_redis_url_are_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="STREAMADV_REDIS_URL"):
        sa.redis_url()
    file = tmp_path / "password"
    file.write_text("hush\n")
    monkeypatch.setenv("STREAMADV_REDIS_PASSWORD_FILE", str(file))
    monkeypatch.setenv("STREAMADV_REDIS_URL", "redis://me@host")
    assert sa.redis_url() == load_settings().redis_url == "redis://me:hush@host"
    assert sa.redis_url("redis://other") == "redis://:hush@other"
    shown = shown_settings()
    assert shown["redis_url"].value == "redis://me:***@host"
    assert "hush" not in repr(shown) + repr(load_settings())


def test_a_password_by_variable_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_REDIS_PASSWORD", "hush")
    monkeypatch.setenv("STREAMADV_REDIS_URL", "redis://host")
    shown = shown_settings()
    assert shown["redis_password"] == ("***", "STREAMADV_REDIS_PASSWORD")
    assert "hush" not in repr(shown) + repr(load_settings())
    monkeypatch.setenv("STREAMADV_REDIS_PASSWORD_FILE", "f")
    with pytest.raises(SettingError, match="both set") as caught:
        load_settings()
    assert "hush" not in str(caught.value)


def test_a_child_uses_the_url_it_is_given() -> None:
    outside = {
        **dict.fromkeys(["STREAMADV_REDIS_PASSWORD", "STREAMADV_REDIS_PASSWORD_FILE"], "x"),
        **dict.fromkeys(tls.FILES.values(), "f"),
        "PATH": "/bin",
    }
    assert environment_with("redis://h", outside) == {"PATH": "/bin", "STREAMADV_REDIS_URL": "redis://h"}


def test_a_secret_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p w\n")
    assert secret_from("X", {}) is None
    assert secret_from("X", {"STREAMADV_X": "direct"}) == "direct"
    assert secret_from("X", {"STREAMADV_X_FILE": str(file), "STREAMADV_X": ""}) == "p w"


def test_what_is_wrong_with_a_secret_is_said_without_it(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    for environment, part in (
        ({"STREAMADV_X": "hush", "STREAMADV_X_FILE": "f"}, "both set"),
        ({"STREAMADV_X_FILE": str(tmp_path / "none")}, "No such file"),
        ({"STREAMADV_X_FILE": str(tmp_path)}, "directory"),
        ({"STREAMADV_X_FILE": str(empty)}, "is empty"),
        ({"STREAMADV_X_FILE": str(binary)}, "UTF-8"),
    ):
        with pytest.raises(SettingError, match=part) as caught:
            secret_from("X", environment)
        assert "STREAMADV_X_FILE" in str(caught.value)
        assert "hush" not in str(caught.value)
