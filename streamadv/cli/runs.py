"""`streamadv runs create`, `change`, `show`, `list` and `delete`: the runs of a server."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from redis.exceptions import NoPermissionError, ResponseError

from ..errors import SettingError, StreamadvError
from ..messages import counted, printable, seconds_text, size_text
from ..run import Run, find_run, open_run
from ..run.manifest import DEFAULTS, RunSettings
from ..run.run import delete_run
from ..status import Status, read_status
from ..store.keys import RUNS
from ..store.replies import as_int, as_text, as_texts
from . import add_one_shot_options, connect, joined, settings_from
from .files import in_columns
from .parser import count, count_or_none, names, shares, size
from .status import stage_of


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("runs", help="creates, shows, lists or deletes the runs of a server")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="names and ledgers of all runs")
    add_one_shot_options(listing, "one JSON object for each run")
    listing.set_defaults(run=list_runs)
    create = actions.add_parser(
        "create",
        help="writes the settings of the run given by --run, before its processes start",
        description="Writes the settings of the run given by --run, and shows them; its processes take them from "
        "there. A run that has another value refuses it.",
    )
    change = actions.add_parser(
        "change",
        help="other values for settings of the run given by --run, while nobody uses it",
        description="Writes other values of settings that the run given by --run has, and shows all. Stop its "
        "processes first: who knows the old values would stop. shards, redundancy, filter_by and scorers stay as they "
        "are.",
    )
    show = actions.add_parser("show", help="the settings of the run given by --run")
    for parser, action in ((create, create_one), (change, change_one), (show, show_one)):
        add_one_shot_options(parser, "one JSON object")
        parser.set_defaults(run=action)
    for parser in (create, change):
        add_run_options(parser)
    delete = actions.add_parser("delete", help="deletes all that is stored of the run given by --run")
    add_one_shot_options(delete)
    delete.add_argument(
        "--force", action="store_true", help="even if somebody is alive, or its manifest cannot be read"
    )
    delete.set_defaults(run=delete_one)


COLUMNS: Final = ("RUN", "CREATED (UTC)", "ACTIVE", "VERSION", "PUSHED", "TRAINED", "QUEUED", "IN FLIGHT")


def list_runs(arguments: argparse.Namespace) -> None:
    """Print every run; what cannot be read is listed with the reason."""
    with connect(arguments, reading=True) as connection:
        runs: Any = connection.scripts.hgetall(RUNS)
        rows: list[tuple[str, ...]] = [COLUMNS]
        for raw, value in sorted(runs.items()):
            name, status, problem = as_text(raw), None, None
            try:
                status = read_status(find_run(connection, name))
            except NoPermissionError:  # a user who may look at one run only
                problem = "not readable for this user"
            except (StreamadvError, ResponseError) as error:
                problem = f"not readable: {error}"
            created, figures = _created(value), [problem or ""]
            line: dict[str, Any] = {"run": name, "created": created, "ledger": None, "problem": problem}
            line |= {"version": None, "quiet_s": None}
            if status is not None:
                ledger, version, quiet_s = status.ledger, status.trainer.version, status.quiet_s
                line |= {"ledger": asdict(ledger), "version": version, "quiet_s": quiet_s}
                active = "never" if quiet_s is None else f"{seconds_text(quiet_s)} ago"
                numbers = (ledger.pushed, ledger.trained, ledger.queued, ledger.in_flight)
                figures = [active, "none" if version is None else str(version), *map(str, numbers)]
            if arguments.json:
                print(json.dumps(line))
            else:
                rows.append((name, created or "unknown", *figures))
    if not arguments.json:
        print(in_columns(rows) if runs else "no runs")


def _created(value: bytes) -> str | None:
    """The time of creation (ms), or None if that is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(int(value) / 1000))
    except (ValueError, OverflowError, OSError):
        return None


def create_one(arguments: argparse.Namespace) -> None:
    with connect(arguments) as connection:
        run = open_run(connection, settings_from(arguments).run, run_settings_from(arguments))
        _show(run, arguments)


def change_one(arguments: argparse.Namespace) -> None:
    with joined(arguments) as run:
        if alive := list(_alive(read_status(run))):
            raise SettingError(
                f"run {run.name} is in use by {', '.join(alive)}: stop them (one that was killed counts for 30 s)"
            )
        run.change(run_settings_from(arguments))
        _show(run, arguments)


def show_one(arguments: argparse.Namespace) -> None:
    with joined(arguments, reading=True) as run:
        _show(run, arguments)


def _show(run: Run, arguments: argparse.Namespace) -> None:
    manifest = run.manifest
    values = {"shards": len(manifest.keys.salts), **{name: getattr(manifest, name) for name in DEFAULTS}}
    given = {"shards", *manifest.fields}
    stored = as_texts(run.connection.scripts.hgetall(run.home.keys.trainer))
    # Once a trainer has taken it.
    own = ("batch_groups", "max_staleness", "drop_after") if "epoch" in stored else ()
    pacing = {name: as_int(stored.get(name, "")) for name in own}
    if arguments.json:
        shown = {"run": run.name, "settings": values, "given": sorted(given & values.keys())}
        print(json.dumps({**shown, "trainer": pacing}))
        return
    print(f"run {run.name}")
    for name, value in values.items():
        text = "none" if value is None or value == () else json.dumps(value)
        more = f" ({size_text(value)})" if name.endswith("_bytes") and value else ""
        print(f"  {name} {text}{more}" + ("" if name in given else " (default)"))
    if pacing:
        print("the trainer's own, in force since it has the run")
        for name, number in pacing.items():
            print(f"  {name} {'none' if number is None else number}")
    for line in manifest.ignored:
        print(printable(f"  IGNORED {line}"))


def delete_one(arguments: argparse.Namespace) -> None:
    if arguments.run_name is None:
        raise SettingError("--run is not given: name the run to delete")
    with connect(arguments) as connection:
        name = settings_from(arguments).run
        try:
            run = find_run(connection, name)
        except SettingError:  # another release's, or somebody wrote over its manifest
            count = delete_run(connection, name) if arguments.force else 0
            if not count:
                raise
            print(f"deleted run {name}, whose manifest cannot be read: {counted(count, 'key')}")
            return
        alive = list(_alive(read_status(run)))
        if alive and not arguments.force:
            raise SettingError(f"run {run.name} is in use by {', '.join(alive)}: stop them, or use --force")
        print(f"deleted run {run.name}: {counted(delete_run(connection, name), 'key')}")
        if alive:
            print(f"still alive, and free to make the run anew: {', '.join(alive)}: stop them")


def _alive(status: Status) -> Iterator[str]:
    """Who would go on with the run."""
    yield from (f"producer {producer.name}" for producer in status.producers if producer.is_alive)
    for name, stream in status.streams.items():
        yield from (f"{stage_of(name)} {worker.name}" for worker in stream.workers if worker.alive)
    if status.trainer.in_charge:
        yield status.trainer.in_charge


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
