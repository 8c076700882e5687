"""Settings: precedence, one-line errors, hidden passwords, likely typing errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamadv.errors import SettingError
from streamadv.producer import Producer
from streamadv.settings import SECRETS, Settings, likely_typos, load_settings, run_name, shown_settings
from streamadv.trainer.queue import TrainerQueue


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().run == "default"
    monkeypatch.setenv("STREAMADV_RUN", "from-environment")
    assert load_settings().run == "from-environment"
    assert load_settings({"run": None}).run == "from-environment"
    assert load_settings({"run": "from-flag"}).run == "from-flag"


@pytest.mark.parametrize("make", [Producer, TrainerQueue])
@pytest.mark.parametrize(
    ("variable", "given", "expected"),
    [
        (None, None, "default"),
        ("", None, "default"),
        ("from-environment", None, "from-environment"),
        ("from-environment", "given", "given"),
    ],
)
def test_a_program_has_the_run_that_the_command_line_would_have(
    make: Callable[..., object],
    variable: str | None,
    given: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("STREAMADV_RUN", variable)
    assert f"run={expected!r}" in repr(make("redis://localhost:1", run=given))
    assert load_settings({"run": given}).run == run_name(given) == expected


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_METRICS_PORT", "")
    monkeypatch.setenv("STREAMADV_REDIS_URL", "")
    assert load_settings() == Settings()
    assert shown_settings()["redis_url"].source == "default"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("STREAMADV_METRICS_PORT", "http"),
        ("STREAMADV_METRICS_PORT", "70000"),
        ("STREAMADV_TORCH_THREADS", "0"),
        ("STREAMADV_DEVICE", "tpu"),
        ("STREAMADV_LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_value_is_one_line_with_name_and_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError) as caught:
        load_settings()
    message = str(caught.value)
    assert variable in message
    assert value in message
    assert "\n" not in message


def test_a_wrong_flag_is_named_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"^--metrics-port: is -1, needs at least 0$"):
        load_settings({"metrics_port": -1})


def test_a_wrong_run_name_is_an_error() -> None:
    with pytest.raises(SettingError, match="two words"):
        load_settings({"run": "two words"})


def test_log_levels_are_taken_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_LOG_LEVEL", "DEBUG")
    assert load_settings().log_level == "debug"


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_REDIS_URL", "redis://me:secret@host/1")
    settings = load_settings()
    assert settings.redis_url == "redis://me:secret@host/1"
    assert "secret" not in repr(settings)
    shown = shown_settings()
    assert "secret" not in repr(shown)
    assert shown["redis_url"] == ("redis://me:***@host/1", "STREAMADV_REDIS_URL")


def test_every_setting_is_shown_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_DEVICE", "cpu")
    shown = shown_settings({"metrics_port": 9000, "run": None})
    assert set(shown) == set(Settings.model_fields)
    assert shown["metrics_port"] == (9000, "flag")
    assert shown["device"] == ("cpu", "STREAMADV_DEVICE")
    assert shown["run"] == ("default", "default")


def test_an_unknown_variable_close_to_a_setting_is_reported() -> None:
    (message,) = likely_typos({"STREAMADV_REDISURL": "x", "PATH": "/bin"})
    assert "STREAMADV_REDISURL" in message
    assert "STREAMADV_REDIS_URL" in message


def test_known_and_unrelated_variables_are_not_reported() -> None:
    known = {f"STREAMADV_{name.upper()}": "x" for name in Settings.model_fields}
    assert (
        likely_typos(known | {"STREAMADV_DATA": "/data", "STREAMADV_GOLDEN": "/golden", "REDIS_URL": "x"})
        == []
    )
    assert likely_typos({"STREAMADV_HELM_NAMESPACE_OVERRIDE": "x"}) == []


def test_secrets_are_known_variables() -> None:
    assert likely_typos({f"STREAMADV_{name}{end}": "x" for name in SECRETS for end in ("", "_FILE")}) == []
