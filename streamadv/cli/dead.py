"""`streamadv dead list`, `show`, `requeue`, `purge`: groups that could not be computed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..errors import NotPermittedError, SettingError, StreamadvError
from ..logs import announce
from ..messages import printable
from ..prompts.stored import carry_ends, check_requeue
from ..run import Run
from ..run.dead_letters import MALFORMED, list_dead, purge, requeue, show_dead
from ..units import counted, seconds_text, size_text
from . import add_one_shot_options, joined
from .files import progress


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("dead", help="lists, shows, requeues or purges dead letters")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, action, text in (
        ("list", list_all, "all dead groups, with reason and age"),
        ("show", show, "one dead group with its trajectories in words"),
        ("requeue", requeue_some, "puts dead groups back into the groups log"),
        ("purge", purge_some, "deletes dead groups; the ledger goes on counting them as dead"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        if name == "show":
            sub.add_argument("group", metavar="GROUP")
        elif name != "list":
            sub.add_argument("groups", metavar="GROUP", nargs="*")
            sub.add_argument("--all", action="store_true", help="every dead group")
        else:
            sub.add_argument("--json", action="store_true", help="one JSON object for each group")
        add_one_shot_options(sub)
        sub.set_defaults(run=action)


def list_all(arguments: argparse.Namespace) -> int:
    """Print a line for each dead group."""
    with joined(arguments, reading=True) as run:
        dead_groups = list(list_dead(run))
        if not dead_groups and not arguments.json:
            print("no dead letters")
        for dead in dead_groups:
            if arguments.json:
                print(json.dumps(dataclasses.asdict(dead)))
                continue
            gone = ", payloads deleted" if dead.emptied and dead.reason != MALFORMED else ""
            print(
                printable(
                    f"{dead.group_id}  {dead.reason}  {counted(dead.trajectories, 'trajectory', 'trajectories')}  "
                    f"{size_text(dead.bytes)}  {seconds_text(dead.age_s)} ago{gone}: {dead.detail}"
                )
            )
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print one dead group as JSON."""
    with joined(arguments, reading=True) as run:
        print(json.dumps(dataclasses.asdict(show_dead(run, arguments.group)), indent=2))
    return 0


def requeue_some(arguments: argparse.Namespace) -> int:
    """Requeue the named groups."""
    with joined(arguments) as run:
        groups, total, left = _named(run, arguments, requeueable=True), 0, 0
        with progress("requeued", len(groups)) as advance:
            for group_id in groups:
                try:
                    check_requeue(run, group_id)
                    requeued = requeue(run, group_id)
                except StreamadvError as error:
                    if not arguments.all or isinstance(error, NotPermittedError):
                        raise
                    left += 1
                    print(printable(str(error)))
                    continue
                carry_ends(run)
                total += requeued
                advance(1)
                print(printable(f"{group_id}: {counted(requeued, 'trajectory', 'trajectories')} requeued"))
        print(
            f"requeued {counted(len(groups) - left, 'group')}, {counted(total, 'trajectory', 'trajectories')}"
        )
    return 0


def purge_some(arguments: argparse.Namespace) -> int:
    """Purge the named groups."""
    with joined(arguments) as run:
        groups, left = _named(run, arguments), 0
        with progress("purged", len(groups)) as advance:
            for group_id in groups:
                try:
                    purge(run, group_id)
                except StreamadvError as error:  # somebody else has taken it
                    if not arguments.all or isinstance(error, NotPermittedError):
                        raise
                    left += 1
                    print(printable(str(error)))
                    continue
                advance(1)
                print(printable(f"{group_id}: purged"))
        print(f"purged {counted(len(groups) - left, 'group')}")
    return 0


def _named(run: Run, arguments: argparse.Namespace, requeueable: bool = False) -> list[str]:
    if arguments.all:
        dead = [group for group in list_dead(run) if not (requeueable and group.reason == MALFORMED)]
        if requeueable and (lost := sum(group.emptied for group in dead)):
            announce(f"not requeued, payloads deleted (dead_bytes): {counted(lost, 'group')}", "not_requeued")
            dead = [group for group in dead if not group.emptied]
        return list(dict.fromkeys(group.group_id for group in dead))
    if not arguments.groups:
        raise SettingError("no group is named: give their ids, or --all")
    groups: list[str] = arguments.groups
    return groups
