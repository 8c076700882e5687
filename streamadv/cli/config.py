"""`streamadv config`: effective settings and the order of the advantage chain; `config acl`: access rules."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any, Final

from ..errors import SettingError
from ..settings import shown_settings
from ..store.acl import ROLES, acl_line, password_hash
from ..store.urls import PREFIX, secret_from
from . import add_redis_options, flags_of, settings_from
from .compute import add_chain_options, chain_from

USER_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="prints the effective settings and the advantage chain",
        description="Prints every setting with where it comes from (passwords hidden) and the steps of an advantage "
        "chain in order. 'config acl' prints the lines of an ACL file instead: a user for each role of the run. It "
        "takes their passwords from STREAMADV_PRODUCER_PASSWORD, STREAMADV_PIPELINE_PASSWORD and "
        "STREAMADV_OBSERVER_PASSWORD, or from the files that these names with _FILE say, and prints hashes.",
    )
    parser.add_argument("what", nargs="?", choices=("acl",), help="acl: the run's access rules")
    parser.add_argument(
        "--user-prefix",
        default="streamadv",
        metavar="NAME",
        help="acl: users are called NAME-producer, NAME-pipeline, NAME-observer (default: streamadv); runs that "
        "share a server need a name each",
    )
    add_chain_options(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_redis_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.what == "acl":
        print_acl(settings_from(arguments).run, arguments.user_prefix)
        return
    from ..algorithms.chain import build_chain  # imports torch

    settings = shown_settings(flags_of(arguments))
    chain = build_chain(chain_from(arguments.preset, arguments.config))
    if arguments.json:
        shown = {"settings": {name: s._asdict() for name, s in settings.items()}, "chain": chain.describe()}
        print(json.dumps(shown, indent=2, default=str))
        return
    width = max(map(len, settings))
    for name, s in settings.items():
        print(f"{name:{width}} = {'not set' if s.value is None else s.value}  ({s.source})")
    print("\nadvantage chain:")
    print("\n".join(f"  {step}" for step in chain.describe()))


def print_acl(run: str, user_prefix: str) -> None:
    if not USER_PREFIX.fullmatch(user_prefix):
        raise SettingError(f"--user-prefix {user_prefix!r}: use letters, digits, '.', '_' and '-'")
    lines = []
    for role in ROLES:
        name = f"{role.name.upper()}_PASSWORD"
        password = secret_from(name, os.environ)
        if password is None:
            raise SettingError(
                f"{PREFIX}{name} is not set: give the {role.name}'s password by it, or in a file by {PREFIX}{name}_FILE"
            )
        lines.append(acl_line(role, run, f"{user_prefix}-{role.name}", password_hash(password)))
    print("\n".join(lines))
