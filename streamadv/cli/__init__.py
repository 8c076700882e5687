"""The command line: `streamadv COMMAND`. Each command is a module here with `add_parser(subparsers)`.

`add_parser` sets two defaults: `run`, a function that takes the parsed arguments and returns the exit status if that
may be another than 0, and `packages`, the packages of extras that the command needs. A command reads its arguments,
calls one function of another room and prints; it keeps nothing. They share `parser.py` and `files.py`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .. import __version__, tracing
from ..errors import StreamadvError
from ..extras import require
from ..logs import announce, set_up_logging
from ..messages import log_fields
from ..plugins import import_module
from ..processes.project import FILE, read_project
from ..run import Run, find_run
from ..settings import Settings, likely_typos, load_settings
from ..store.connection import Connection
from ..store.retry import RETRYABLE, SERVER_ERRORS, server_reason
from .parser import SEPARATOR, CommandParser, seconds, split_commands

COMMANDS: Final = (
    "demo", "server", "up", "worker", "gateway", "exporter", "replay", "consume", "compute", "evals", "prompts",
    "status", "show", "view", "archive", "rewind", "dead", "runs", "schema", "config", "bench",
)  # fmt: skip
#: Commands that move trajectories, and record traces if the environment asks for it.
TRACED: Final = ("worker", "replay", "consume")
#: Seconds that commands which do one thing wait for a server that does not answer.
WAIT_S: Final = 10.0
FAILED: Final = 1
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands: list[list[str]] = []
    if words[:1] == ["up"]:
        words, commands = split_commands(words)
    if words[:2] == ["gateway", "run"] and SEPARATOR in words:
        at = words.index(SEPARATOR)
        words, commands = words[:at], [words[at + 1 :]]
    try:
        if words[:1] == ["up"] and Path(FILE).exists():
            options, in_file = read_project(Path(FILE))
            words, commands = ["up", *options, *words[1:]], commands or in_file  # those given last win
        arguments = make_parser(words).parse_args(words, argparse.Namespace(commands=commands))
        settings = settings_from(arguments)
        run = settings.run if "run_name" in arguments else None
        role = str(vars(arguments).get("stage", words[0]))  # of a worker its stage
        set_up_logging(settings.log_level, settings.log_format, run=run, role=role)
        for message in likely_typos():
            logger.warning(message, extra=log_fields("setting_unknown"))
        command = " ".join(["streamadv", words[0], *vars(arguments).get("stage", "").split()])
        require(command, *vars(arguments).get("packages", ()))
        for module in vars(arguments).get("modules") or ():
            import_module(module)
        if words[0] in TRACED:
            tracing.set_up(f"streamadv-{role}")
        status: int = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `streamadv ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes once more
        return PIPE_CLOSED
    except RETRYABLE as error:
        return _fail(server_reason(error).line(None))
    except (StreamadvError, *SERVER_ERRORS) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        tracing.flush()


def _fail(message: str) -> int:
    announce(" ".join(message.split()), "command_failed", who="streamadv: error", level=logging.ERROR)
    return FAILED


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that `words` names, or of all of them for help.

    Only what is needed is imported: `streamadv status` does not wait for what `streamadv compute` needs.
    """
    parser = CommandParser(
        prog="streamadv",
        description="The durable middle of asynchronous, off-policy RL training of LLM agents, on Redis Streams.",
    )
    parser.add_argument("--version", action="version", version=f"streamadv {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = words[0] if words and words[0] in COMMANDS else None
    for command in COMMANDS if named is None else (named,):
        importlib.import_module(f".{command}", __name__).add_parser(subparsers)
    return parser


def add_redis_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that talks to a server; read them with `settings_from`."""
    parser.add_argument(
        "--redis",
        dest="redis_url",
        metavar="URL",
        help="redis://, rediss://, unix://, redis+cluster://, redis+sentinel:// or their rediss+ (STREAMADV_REDIS_URL)",
    )
    parser.add_argument(
        "--run", dest="run_name", metavar="NAME", help="name of the run (STREAMADV_RUN; default: default)"
    )
    add_log_options(parser)


def add_one_shot_options(parser: argparse.ArgumentParser, json: str | None = None) -> None:
    """Options of commands that do one thing with a server and end; they connect by `connect` or `joined`.

    json: what --json prints, if there is that option.
    """
    if json is not None:
        parser.add_argument("--json", action="store_true", help=json)
    add_redis_options(parser)
    parser.add_argument(
        "--wait",
        type=seconds,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"give up when the server does not answer for so long (default {WAIT_S:g})",
    )


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Options of processes of a run, which serve metrics."""
    add_redis_options(parser)
    parser.add_argument(
        "--metrics-port", type=int, metavar="P", help="of /metrics (default: a free one, logged)"
    )
    parser.add_argument(
        "--metrics-host",
        metavar="ADDRESS",
        help="address that /metrics is served at (default: 127.0.0.1; 0.0.0.0: all, for a Prometheus elsewhere)",
    )


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Of commands that compute; `main` imports what is given before it runs the command."""
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        help="import a module first, which registers estimators; may be given several times",
    )


def add_log_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="of the messages on stderr (STREAMADV_LOG_LEVEL; default: info)",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        help="of these messages; json has an object on each line (STREAMADV_LOG_FORMAT; default: text)",
    )


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Settings of this process. A parsed argument named like a setting wins over its variable; --run is `run_name`."""
    return load_settings(flags_of(arguments))


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among the parsed arguments; None where the flag was not given."""
    parsed: dict[str, Any] = vars(arguments)
    flags = {name: parsed.get(name) for name in Settings.model_fields if name != "run"}
    return flags | {"run": parsed.get("run_name")}


def connect(arguments: argparse.Namespace, *, reading: bool = False) -> Connection:
    """A connection of a command, which gives up after --wait; without that option the server is asked until it answers.

    reading: a server that only refuses writes will do. Raises SettingError if no server was given,
    ServerUnreachableError.
    """
    wait: float | None = vars(arguments).get("wait")
    connection = Connection(settings_from(arguments).url, reply_timeout=wait)
    connection.wait_until_ready(wait, reading=reading)
    return connection


@contextmanager
def joined(arguments: argparse.Namespace, *, reading: bool = False) -> Iterator[Run]:
    """The run that --run or STREAMADV_RUN names, over `connect`. Raises SettingError if it does not exist."""
    with connect(arguments, reading=reading) as connection:
        yield find_run(connection, settings_from(arguments).run)
