"""Sizes as people write them, and as they read them; numbers of things with their noun."""

from __future__ import annotations

import re
from typing import Any, Final

from .errors import SettingError
from .messages import brief

SIZE: Final = re.compile(r"([0-9]{1,18})([kmgt]?)(i?b)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


def parse_size(text: str) -> int:
    """Bytes of `4194304`, `512mb`, `4GB`, `4GiB` or `4g`: units are powers of 1024. Raises SettingError."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingError(f"is {brief(text)}, needs a number of bytes, or a size like 512mb or 4gb")
    return int(match[1]) << 10 * _POWERS[match[2].lower()]


def size_or_other(value: Any) -> Any:
    """The bytes of a size given as text; other values are returned as they are. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except SettingError as error:
        raise ValueError(str(error)) from None


def size_text(count: int) -> str:
    """A number of bytes for people: `17 bytes`, `4.0 MiB`."""
    value, power = float(count), 0
    while abs(value) >= 1024 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{count} bytes" if power == 0 else f"{value:.1f} {_UNITS[power]}"


def counted(count: int, noun: str, nouns: str | None = None) -> str:
    """A number with its noun: `1 group`, `2 groups`. nouns: the plural (default: with an s)."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def seconds_text(seconds: float) -> str:
    """A length of time for people: `0.4 s`, `12 s`, `5 min`, `3 h`, `2 d`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"
