"""`streamadv runs create`, `show`, `list` and `delete`: the runs of a server."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from ..errors import SettingError, StreamadvError
from ..messages import printable
from ..run import Run, find_run, open_run
from ..run.heartbeats import PRODUCER_TIMEOUT_S
from ..run.manifest import DEFAULTS
from ..status import read_status
from ..status.audit import delete_run
from ..status.model import to_json
from ..store.keys import RUNS
from . import add_redis_options, add_wait_option, connect_once, settings_from
from .worker import add_run_options, run_settings_from


def add_parser(subparsers: Any) -> None:
    """Add the `runs` command to the command line."""
    parser = subparsers.add_parser("runs", help="lists or deletes the runs of a server")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="names and ledgers of all runs")
    add_redis_options(listing)
    add_wait_option(listing)
    listing.add_argument("--json", action="store_true", help="one JSON object for each run")
    listing.set_defaults(run=list_runs)
    create = actions.add_parser(
        "create",
        help="writes the settings of the run given by --run, before its processes start",
        description="Writes the settings of the run given by --run, and shows them. A run that has another value "
        "refuses it; processes started later need not be given any.",
    )
    show = actions.add_parser("show", help="the settings of the run given by --run")
    for parser, action in ((create, create_one), (show, show_one)):
        add_redis_options(parser)
        add_wait_option(parser)
        parser.add_argument("--json", action="store_true", help="one JSON object")
        parser.set_defaults(run=action)
    add_run_options(create)
    pacing = create.add_argument_group("pacing until a trainer says its own")
    pacing.add_argument("--batch-groups", type=int, metavar="N", help="groups of a batch")
    pacing.add_argument(
        "--max-staleness", type=int, metavar="N", help="(N + 1) x batch_groups groups may be begun"
    )
    delete = actions.add_parser("delete", help="deletes all that is stored of the run given by --run")
    add_redis_options(delete)
    add_wait_option(delete)
    delete.add_argument("--force", action="store_true", help="even if producers or workers are alive")
    delete.set_defaults(run=delete_one)


def list_runs(arguments: argparse.Namespace) -> int:
    """Print every run; what cannot be read is listed with the reason."""
    with connect_once(arguments, reading=True) as connection:
        runs: Any = connection.scripts.hgetall(RUNS)
        for raw, value in sorted(runs.items()):
            name, ledger, problem = raw.decode(errors="backslashreplace"), None, None
            try:
                ledger = read_status(find_run(connection, name)).ledger
            except NoPermissionError:  # a user who may look at one run only
                problem = "not readable for this user"
            except (StreamadvError, ResponseError) as error:
                problem = f"not readable: {error}"
            created = _created(value)
            if arguments.json:
                print(
                    json.dumps(
                        {"run": name, "created": created, "ledger": to_json(ledger), "problem": problem}
                    )
                )
                continue
            told = f"created {created} UTC" if created else "created at no time that can be read"
            if ledger is not None:
                problem = (
                    f"pushed {ledger.pushed}  trained {ledger.trained}  "
                    f"queued {ledger.queued}  in_flight {ledger.in_flight}"
                )
            print(printable(f"{name}  {told}  {problem}"))
    return 0


def _created(value: bytes) -> str | None:
    """The time of creation (ms), or None if that is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(int(value) / 1000))
    except (ValueError, OverflowError, OSError):
        return None


def create_one(arguments: argparse.Namespace) -> int:
    """Write the settings of a run and print them."""
    with connect_once(arguments) as connection:
        _show(open_run(connection, _named(arguments), run_settings_from(arguments)), arguments)
    return 0


def show_one(arguments: argparse.Namespace) -> int:
    """Print the settings of a run."""
    with connect_once(arguments, reading=True) as connection:
        _show(find_run(connection, _named(arguments)), arguments)
    return 0


def _show(run: Run, arguments: argparse.Namespace) -> None:
    manifest = run.manifest
    values = {"shards": len(manifest.keys.salts), **{name: getattr(manifest, name) for name in DEFAULTS}}
    given = {"shards", *manifest.fields}
    if arguments.json:
        print(json.dumps({"run": run.name, "settings": values, "given": sorted(given & values.keys())}))
        return
    print(f"run {run.name}")
    for name, value in values.items():
        text = "none" if value is None or value == () else json.dumps(value)
        print(f"  {name} {text}" + ("" if name in given else " (default)"))
    for line in manifest.ignored:
        print(printable(f"  IGNORED {line}"))


def _named(arguments: argparse.Namespace) -> str:
    """The run of --run or STREAMADV_RUN."""
    name: str = settings_from(arguments).run
    return name


def delete_one(arguments: argparse.Namespace) -> int:
    """Delete one run, which must be named."""
    if arguments.run_name is None:
        raise SettingError("--run is not given: name the run to delete")
    with connect_once(arguments) as connection:
        run = find_run(connection, settings_from(arguments).run)
        alive = [
            producer.name
            for producer in read_status(run).producers
            if producer.state == "open" and producer.silent_s < PRODUCER_TIMEOUT_S
        ]
        if alive and not arguments.force:
            raise SettingError(
                f"run {run.name} has live producers ({', '.join(alive)}): stop them, or use --force"
            )
        print(f"deleted run {run.name}: {delete_run(run)} keys")
    return 0
