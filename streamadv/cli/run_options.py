"""The settings of a run as options of `streamadv runs create` and `runs change`; no other command takes them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..run.manifest import DEFAULTS, RunSettings
from ..units import size_text
from .parser import count, count_or_none, names, shares, size

_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "shards": {"type": int, "metavar": "N"},
    "group_deadline_s": {"type": float, "metavar": "S"},
    "redundancy": {"type": int, "metavar": "N"},
    "partial_min_usable": {"type": int, "metavar": "K"},
    "zero_variance_filter": {"action": argparse.BooleanOptionalAction},
    "difficulty_low": {"type": float, "metavar": "R"},
    "difficulty_high": {"type": float, "metavar": "R"},
    "filter_by": {"metavar": "NAME"},
    "scorers": {"type": names, "metavar": "A,B"},
    "max_trajectory_bytes": {"type": size, "metavar": "SIZE"},
    "max_bytes": {"type": size, "metavar": "SIZE"},
    "dedupe_groups": {"type": int, "metavar": "N"},
    "dead_bytes": {"type": size, "metavar": "SIZE"},
    "keep_bytes": {"type": size, "metavar": "SIZE"},
    "keep": {"type": shares, "metavar": "KIND=SHARE,..."},
    "archive": {"action": argparse.BooleanOptionalAction},
    "tokenizer": {"metavar": "PATH"},
}


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """An option for each setting."""
    group = parser.add_argument_group("settings of the run")
    for name, options in _SETTINGS.items():
        default = {"shards": 1, **DEFAULTS}[name]
        shown = size_text(default) if name.endswith("_bytes") and default else str(default).removesuffix(".0")
        text = RunSettings.model_fields[name].description
        more = f" (default {shown})" if default is not None and default != () else ""
        group.add_argument(_flag(name), help=f"{text}{more}", **options)
    pacing = parser.add_argument_group("pacing until a trainer says its own")
    pacing.add_argument("--batch-groups", type=count, metavar="N", help="groups of a batch")
    pacing.add_argument(
        "--max-staleness", type=count_or_none, metavar="N", help="(N + 1) x batch_groups groups may be begun"
    )


def run_settings_from(arguments: argparse.Namespace) -> RunSettings:
    """The run's settings among the parsed arguments."""
    return RunSettings(**{name: getattr(arguments, name) for name in RunSettings.model_fields})


def settings_among(words: Sequence[str]) -> list[str]:
    """The options of settings among the words of a command, with their values."""
    switches = [name for name, options in _SETTINGS.items() if "action" in options]
    alone = {f"--{no}{name.replace('_', '-')}" for name in switches for no in ("", "no-")}
    flags = {_flag(name) for name in RunSettings.model_fields} - alone
    found: list[str] = []
    for place, word in enumerate(words):
        if word in flags:
            found += words[place : place + 2]
        elif word in alone or word.partition("=")[0] in flags:
            found.append(word)
    return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
