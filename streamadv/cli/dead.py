"""`streamadv dead list`, `show`, `requeue`, `purge`: groups that could not be computed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import NotPermittedError, SettingError, StreamadvError
from ..logs import announce
from ..messages import counted, printable, seconds_text, size_text
from ..prompts.stored import carry_ends, check_requeue
from ..run import Run
from ..run.dead_letters import MALFORMED, list_dead, purge, requeue, show_dead
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
        add_one_shot_options(sub, "one JSON object for each group" if name == "list" else None)
        sub.set_defaults(run=action)


def list_all(arguments: argparse.Namespace) -> None:
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


def show(arguments: argparse.Namespace) -> None:
    with joined(arguments, reading=True) as run:
        print(json.dumps(dataclasses.asdict(show_dead(run, arguments.group)), indent=2))


def requeue_some(arguments: argparse.Namespace) -> None:
    with joined(arguments) as run:

        def requeued(group_id: str) -> int:
            check_requeue(run, group_id)
            return requeue(run, group_id)

        groups = total = 0
        for group_id, count in _done(run, arguments, requeued, "requeued"):
            carry_ends(run)
            groups, total = groups + 1, total + count
            print(printable(f"{group_id}: {counted(count, 'trajectory', 'trajectories')} requeued"))
        print(f"requeued {counted(groups, 'group')}, {counted(total, 'trajectory', 'trajectories')}")


def purge_some(arguments: argparse.Namespace) -> None:
    with joined(arguments) as run:
        groups = 0
        for group_id, _ in _done(run, arguments, lambda group_id: purge(run, group_id), "purged"):
            groups += 1
            print(printable(f"{group_id}: purged"))
        print(f"purged {counted(groups, 'group')}")


def _done(
    run: Run, arguments: argparse.Namespace, act: Callable[[str], Any], what: str
) -> Iterator[tuple[str, Any]]:
    """The named groups, each with what `act` has returned. With --all one that refuses is said and left out."""
    groups: list[str] = arguments.groups
    if arguments.all:
        dead = list(list_dead(run))
        if what == "requeued":
            dead = [group for group in dead if group.reason != MALFORMED]
            if lost := sum(group.emptied for group in dead):
                announce(
                    f"not requeued, payloads deleted (dead_bytes): {counted(lost, 'group')}", "not_requeued"
                )
                dead = [group for group in dead if not group.emptied]
        groups = list(dict.fromkeys(group.group_id for group in dead))
    elif not groups:
        raise SettingError("no group is named: give their ids, or --all")
    with progress(what, len(groups)) as advance:
        for group_id in groups:
            try:
                found = act(group_id)
            except StreamadvError as error:  # such as: somebody else has taken it
                if not arguments.all or isinstance(error, NotPermittedError):
                    raise
                print(printable(str(error)))
                continue
            advance(1)
            yield group_id, found
