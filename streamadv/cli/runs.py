"""`streamadv runs list` and `runs delete`: the runs of a server."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from redis.exceptions import NoPermissionError

from ..errors import SettingError
from ..inventory import delete_run
from ..keys import RUNS
from ..presence import PRODUCER_TIMEOUT_S
from ..run import find_run
from ..status import read_status
from . import add_redis_options, add_wait_option, connect_once, settings_from


def add_parser(subparsers: Any) -> None:
    """Add the `runs` command to the command line."""
    parser = subparsers.add_parser("runs", help="lists or deletes the runs of a server")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="names and ledgers of all runs")
    add_redis_options(listing)
    add_wait_option(listing)
    listing.add_argument("--json", action="store_true", help="one JSON object for each run")
    listing.set_defaults(run=list_runs)
    delete = actions.add_parser("delete", help="deletes all that is stored of the run given by --run")
    add_redis_options(delete)
    add_wait_option(delete)
    delete.add_argument("--force", action="store_true", help="even if producers or workers are alive")
    delete.set_defaults(run=delete_one)


def list_runs(arguments: argparse.Namespace) -> int:
    """Print every run."""
    with connect_once(arguments, reading=True) as connection:
        runs: Any = connection.scripts.hgetall(RUNS)
        for name, created_ms in sorted((name.decode(), int(value)) for name, value in runs.items()):
            created = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(created_ms / 1000))
            try:
                ledger = read_status(find_run(connection, name))["ledger"]
            except NoPermissionError:  # a user who may look at one run only
                ledger = None
            if ledger is None and not arguments.json:
                print(f"{name}  created {created} UTC  not readable for this user")
            elif arguments.json:
                print(json.dumps({"run": name, "created": created, "ledger": ledger}))
            else:
                print(
                    f"{name}  created {created} UTC  pushed {ledger['pushed']}  trained {ledger['trained']}  "
                    f"queued {ledger['queued']}  in_flight {ledger['in_flight']}"
                )
    return 0


def delete_one(arguments: argparse.Namespace) -> int:
    """Delete one run, which must be named."""
    if arguments.run_name is None:
        raise SettingError("--run is not given: name the run to delete")
    with connect_once(arguments) as connection:
        run = find_run(connection, settings_from(arguments).run)
        alive = [
            producer["name"]
            for producer in read_status(run)["producers"]
            if producer["state"] == "open" and producer["silent_s"] < PRODUCER_TIMEOUT_S
        ]
        if alive and not arguments.force:
            raise SettingError(
                f"run {run.name} has live producers ({', '.join(alive)}): stop them, or use --force"
            )
        print(f"deleted run {run.name}: {delete_run(run)} keys")
    return 0
