"""Passwords and certificates: where they come from, and the URL that carries them to a connection.

They come from the environment or from files, never from the command line, which everybody on the machine can read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

from ..errors import SettingError
from . import tls
from .urls import SCHEMES

PREFIX: Final = "STREAMADV_"


def secret_from(name: str, environment: Mapping[str, str]) -> str | None:
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


def complete_url(url: str, password: str | None, files: Mapping[str, Path | None]) -> str:
    """`url` with the password and the TLS `files` (by the options' names of `tls.FILES`) that it does not have.

    The URL's own values win, so a complete URL stays as it is; so does one with a scheme that nobody knows, for
    `urls.parse_url` to refuse. Raises SettingError for TLS files with a URL without TLS.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in SCHEMES:
        return url
    end = min((rest.find(mark) for mark in "/?#" if mark in rest), default=len(rest))
    user, _, host = rest[:end].rpartition("@")
    query = rest.partition("?")[2]
    if (
        password is not None
        and ":" not in user
        and not re.search(r"(^|&)password=", query)
        and "@" not in rest[end:]
    ):
        rest = f"{user}:{quote(password, safe='')}@{host}{rest[end:]}"
    missing = {
        name: str(path) for name, path in files.items() if path is not None and f"{name}=" not in query
    }
    if missing and not scheme.startswith("rediss"):
        setting = tls.FILES[next(iter(missing))]
        raise SettingError(f"{setting} is set, but the URL starts with {scheme}://: write rediss:// for TLS")
    if missing:
        rest += f"{'&' if '?' in rest else '?'}{urlencode(missing)}"
    return f"{scheme}{separator}{rest}"


def environment_with(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process that uses this complete `url`, without settings that complete one."""
    hidden = {f"{PREFIX}REDIS_PASSWORD", f"{PREFIX}REDIS_PASSWORD_FILE", *tls.FILES.values()}
    visible = {name: value for name, value in environment.items() if name.upper() not in hidden}
    return visible | {f"{PREFIX}REDIS_URL": url}
