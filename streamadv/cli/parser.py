"""How the command line is parsed: argparse, with errors of the command that was meant and the nearest right word."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Final

from ..errors import SettingError
from ..messages import did_you_mean, parse_size
from ..settings import run_name

WRONG_USAGE: Final = 2
#: In front of each command of `streamadv up`.
SEPARATOR: Final = "--"


class CommandParser(argparse.ArgumentParser):
    """A parser of the command line, or of one of its commands.

    A wrong option is an error of the command it was given to, with that command's usage. A command that needs another
    word, and has none, prints its help. No option may be abbreviated: a longer name that comes later would change it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, except that words that are not known are an error here, not of the outermost parser."""
        words = list(sys.argv[1:] if args is None else args)
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if not words and has_commands:
            self.print_help(sys.stderr)
            self.exit(WRONG_USAGE)
        parsed, unknown = super().parse_known_args(words, namespace)
        options = [word for word in unknown if word.startswith("-") and len(word) > 1]
        if options:
            if "run_name" in parsed:
                from .runs import settings_among

                if settings_among(options) and (found := settings_among(words)):
                    command = shlex.join(["--run", run_name(parsed.run_name), *found])
                    remedy = f"`streamadv runs create {command}`, or `runs change` where it has another value"
                    option = found[0].partition("=")[0]
                    text = f"{self.prog}: error: {option} is a setting of the run: use {remedy}\n"
                    self.exit(WRONG_USAGE, text)
            option = options[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            self.error(f"unrecognized option {option}{did_you_mean(option, known)}")
        elif unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.get_default('instead') or ''}")
        return parsed, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        nearest = did_you_mean(str(value), choices)
        raise argparse.ArgumentError(
            action, f"invalid choice {str(value)!r}{nearest or ':'} choose from {', '.join(choices)}"
        )


def split_commands(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The words of `streamadv` itself, and the commands behind them: `up ... -- one ... -- another ...`."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts[0], parts[1:]


def seconds(text: str) -> float:
    """Type of an option: a length of time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value > 0:
        return value
    raise argparse.ArgumentTypeError(f"is {text!r}, needs a number of seconds above 0")


def size(text: str) -> int:
    """Type of an option: a number of bytes, as `4194304`, `512mb` or `4gb`."""
    try:
        return parse_size(text)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def names(text: str) -> list[str]:
    """Type of an option: names with commas between them; none at all for an empty text."""
    found = text.split(",") if text else []
    if "" in found:
        raise argparse.ArgumentTypeError(f"is {text!r}, needs a name before and after each comma")
    return found


def shares(text: str) -> dict[str, float]:
    """Type of an option: numbers by name, as `trained=0.1,dropped=1`."""
    try:
        return {name: float(share) for name, share in (pair.split("=") for pair in names(text))}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"is {text!r}, needs NAME=NUMBER, with commas between them"
        ) from None


def count(text: str) -> int:
    """Type of an option: a whole number of at least 1."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"is {text!r}, needs a whole number, 1 or more")


def count_or_none(text: str) -> int:
    """Type of an option: a whole number of at least 0."""
    return 0 if text.isdecimal() and not int(text) else count(text)
