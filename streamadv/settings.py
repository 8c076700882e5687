"""Settings of a process: a flag, else its STREAMADV_ environment variable, else the default.

What the processes of a run must agree on is not here but in the run's manifest (`manifest.py`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .connection import hide_password
from .errors import SettingError
from .keys import check_run_name
from .schema import first_problem

PREFIX: Final = "STREAMADV_"
NOT_SETTINGS: Final = ("DATA", "GOLDEN")  # folders of the tests' files
#: Given by variable or file only (see `secret_from`), never by a flag: command lines are visible to everybody.
SECRETS: Final = ("PRODUCER_PASSWORD", "PIPELINE_PASSWORD", "OBSERVER_PASSWORD")

RunName = Annotated[str, AfterValidator(check_run_name)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(str.lower)]


class Settings(BaseSettings):
    """Effective settings. Made by `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    redis_url: str | None = Field(None, repr=False, description="server of the run, see --redis")
    run: RunName = Field("default", description="name of the run")
    server_binary: str | None = Field(None, description="redis-server or valkey-server to embed")
    metrics_port: int = Field(0, ge=0, le=65535, description="of /metrics; 0 takes a free port")
    log_level: LogLevel = Field("info", description="to stderr")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where advantages are computed")
    torch_threads: int = Field(1, ge=1, description="per process; fixed, as the thread count changes sums")


class ShownSetting(NamedTuple):
    """A setting as `streamadv config` prints it."""

    value: Any
    source: str  # "default", "flag", or the environment variable's name


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from `flags` (None values count as not given) and the environment; SettingError if one is wrong."""
    given = _given(flags)
    try:
        return Settings(**given)
    except ValidationError as error:
        where = str(error.errors()[0]["loc"][0])
        name = f"--{where.replace('_', '-')}" if where in given else f"{PREFIX}{where.upper()}"
        raise SettingError(f"{name}: {first_problem(error).removeprefix(f'{where}: ')}") from None


def shown_settings(
    flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, ShownSetting]:
    """Every setting with its source, passwords hidden."""
    given = _given(flags)
    values = load_settings(flags).model_dump()
    if values["redis_url"] is not None:
        values["redis_url"] = hide_password(values["redis_url"])
    upper = {name.upper() for name, value in environment.items() if value}

    def source(name: str) -> str:
        variable = f"{PREFIX}{name.upper()}"
        return "flag" if name in given else variable if variable in upper else "default"

    return {name: ShownSetting(value, source(name)) for name, value in values.items()}


def secret_from(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """A secret given as variable STREAMADV_<name>, or in the file that STREAMADV_<name>_FILE names; None if neither.

    Whitespace at the end of a file (editors put a newline there) is no part of it. Raises SettingError when
    both are given, or the file cannot be read or is empty.
    """
    variable, in_file = f"{PREFIX}{name}", f"{PREFIX}{name}_FILE"
    value, path = environment.get(variable), environment.get(in_file)
    if value and path:
        raise SettingError(f"{variable} and {in_file} are both set: keep one")
    if not path:
        return value or None
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip()
    except OSError as error:
        raise SettingError(f"{in_file}={path!r}: {error.strerror}, name a file that can be read") from None
    except UnicodeDecodeError:
        raise SettingError(f"{in_file}={path!r}: is no text in UTF-8") from None
    if not text:
        raise SettingError(f"{in_file}={path!r}: is empty, put the password there")
    return text


def likely_typos(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One message for each STREAMADV_ variable that is unknown but close to a known one."""
    known = [name.upper() for name in Settings.model_fields] + [*NOT_SETTINGS, *SECRETS]
    known += [f"{name}_FILE" for name in SECRETS]
    messages = []
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        if close:
            messages.append(f"{variable} is not a setting and is ignored; did you mean {PREFIX}{close[0]}?")
    return messages


def _given(flags: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (flags or {}).items() if value is not None}
