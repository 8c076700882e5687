"""Messages for people and for machines: problems on one line, values cut to size, sizes and lengths of time as people
write and read them, numbers of things with their noun, fields of log records.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from . import clock
from .errors import SettingError, StreamadvError

Whole = TypeVar("Whole", int, int | None)

MAX_MESSAGE_CHARS: Final = 400

SIZE: Final = re.compile(r"([0-9]{1,18})([kmgt]?)(i?b)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")

_PACKAGE: Final = f"{Path(__file__).parent}{os.sep}"
#: Folders of other code that the user has not written: Python, and what is installed beside it.
_INSTALLED: Final = (
    "<",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)

#: pydantic puts the branch of a union into the path of an error, though it is no field.
_BRANCHES: Final = ("constrained-", "tuple[", "function-")

#: The wording of pydantic's error types, filled with the value and the error's context.
_NEEDS: Final = {
    "missing": "is missing, needs a value",
    "extra_forbidden": "is {value}, needs to be left out: there is no such field",
    "finite_number": "is {value}, needs a finite number",
    "greater_than_equal": "is {value}, needs at least {ge}",
    "greater_than": "is {value}, needs more than {gt}",
    "less_than_equal": "is {value}, needs at most {le}",
    "less_than": "is {value}, needs less than {lt}",
    "string_pattern_mismatch": "is {value}, needs to match {pattern}",
}


def first_problem(error: ValueError) -> str:
    """The first problem of a validation error on one line: `field.path: what is wrong`."""
    if not isinstance(error, ValidationError):
        return one_line(str(error))
    problem = error.errors(include_url=False, include_input=True)[0]
    message = problem["msg"].removeprefix("Value error, ")
    path = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(_BRANCHES))
    value = problem.get("input")
    if problem["type"] in _NEEDS:
        message = _NEEDS[problem["type"]].format(value=brief(value), **problem.get("ctx", {}))
    elif problem["type"] != "value_error" and isinstance(value, str | int | float | None):
        message = f"{message} (got {brief(value)})"
    return one_line(f"{path}: {message}" if path else message)


def one_line(text: str) -> str:
    """`text` fit for an error message: control characters escaped, cut to a bounded length."""
    return printable(text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "...")


def printable(text: str) -> str:
    """`text` fit for a line on a terminal: what would move the cursor, colour or break the line is escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def brief(value: Any) -> str:
    """A value for an error message; Python refuses to print very long integers at all."""
    if isinstance(value, str | bytes):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def whole_number(
    name: str,
    value: Whole,
    least: int | None = 0,
    most: int | None = None,
    *,
    or_none: bool = False,
    error: type[StreamadvError] = SettingError,
) -> Whole:
    """The argument `name` as an int of Python. Raises `error` for what is no whole number in least .. most.

    Integers of numpy are some, a bool is none. or_none: None is taken too. least, most: None = no bound.
    """
    if value is None and or_none:
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
        if (least is None or least <= value) and (most is None or value <= most):
            return value
    needs = "" if least is None else f", {least} or more" if most is None else f" from {least} to {most}"
    raise error(f"{name} is {brief(value)}, needs a whole number{needs}{', or None' * or_none}")


def check_number(
    name: str,
    value: Any,
    what: str = "a number",
    *,
    zero: bool = False,
    most: float = math.inf,
    or_none: bool = False,
) -> None:
    """Raise SettingError unless `value` is a number above 0 (`zero`: or 0), at most `most` (`or_none`: or None)."""
    if value is None and or_none:
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (0 < value <= most or (zero and value == 0)):
        needs = f"{what}, 0 or more" if zero else f"{what} above 0"
        limit = "" if most == math.inf else f", at most {most:g}"
        raise SettingError(f"{name} is {brief(value)}, needs {needs}{limit}{', or None' * or_none}")


def place_of(error: BaseException) -> str:
    """` (FILE:LINE)`: the line of the user's code that has raised, or that called what has; `` if none is known."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)] or frames
    frames = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)] or frames
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean NAME?` for an error message about an unknown name; `` if no known one is near."""
    by_lower = {each.lower(): each for each in known}
    begun = [each for each in by_lower if len(name) > 2 and each.startswith(name.lower())]  # such as coef
    close = difflib.get_close_matches(name.lower(), by_lower, n=1) or begun
    return f": did you mean {by_lower[close[0]]}?" if close else ""


def unknown_field(data: Mapping[Any, Any], known: Iterable[str]) -> str | None:
    """What to say of the first name in `data` that is no known field; None if there is none."""
    names = list(known)
    for name in data:
        if name not in names:
            nearest = did_you_mean(str(name), names) or ": leave it out"
            return f"{brief(name)} is no field{nearest}"
    return None


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


def summed_up(group_id: str, count: int) -> str:
    """The subject of a sentence about `count` groups, with its verb; group_id: of the only one."""
    return f"group {group_id} is" if count == 1 else f"{count} groups are"


class SummedUp:
    """Log records of what happens often: for each reason the first one and how many, at most every `every_s` seconds.

    event: of the records. `note` and `log` are for one thread.
    """

    def __init__(self, logger: logging.Logger, event: str, every_s: float) -> None:
        self._logger, self._event, self._every_s = logger, event, every_s
        #: By reason: text and fields of the first one, and how many there are.
        self._noted: dict[str, tuple[Callable[[int], str], dict[str, Any], int]] = {}
        self._logged_at: dict[str, float] = {}

    def note(self, reason: str, text: Callable[[int], str], count: int = 1, **fields: Any) -> None:
        """So many more. text: a sentence about a number of them; it and `fields` (of `log_fields`) name the first."""
        first_text, first_fields, before = self._noted.get(reason, (text, fields, 0))
        self._noted[reason] = first_text, first_fields, before + count

    def log(self, now: bool = False) -> None:
        """A warning for each reason whose last one is `every_s` ago, or for all of them `now`."""
        for reason, (text, fields, count) in list(self._noted.items()):
            if now or clock.now() - self._logged_at.get(reason, -math.inf) >= self._every_s:
                del self._noted[reason]
                self._logged_at[reason] = clock.now()
                extra = log_fields(self._event, reason=reason, count=count, **fields)
                self._logger.warning("%s", text(count), extra=extra)


def log_fields(
    event: str,
    *,
    run: str | None = None,
    role: str | None = None,
    batch: int | None = None,
    group: str | None = None,
    reason: str | None = None,
    count: int | None = None,
) -> dict[str, object]:
    """The `extra=` of a log call: fields by which machines find its records, whatever their text says.

    `event` says what happened, in snake_case, and never changes; `role` is the stage or the process that logs, `batch`
    the number k, `group` a group id, `reason` one of a small fixed set, `count` how often it happened where a record
    sums up. What does not apply is left out of the record.
    """
    context = {"run": run, "role": role, "batch": batch, "group": group, "reason": reason, "count": count}
    return {"event": event, **{name: value for name, value in context.items() if value is not None}}
