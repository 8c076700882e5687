"""The command line: `streamadv COMMAND`. Each command is a module here with `add_parser(subparsers)`.

`add_parser` sets the default `run`, a function that takes the parsed arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import redis.exceptions

from .. import __version__
from ..connection import Connection
from ..errors import SettingError, StreamadvError
from ..settings import Settings, likely_typos, load_settings

COMMANDS: Final = (
    "demo",
    "server",
    "worker",
    "replay",
    "consume",
    "compute",
    "status",
    "dead",
    "runs",
    "schema",
    "config",
    "bench",
)
#: How long commands that only look wait for a server that does not answer.
LOOK_PATIENCE_S: Final = 30.0
FAILED: Final = 1
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = make_parser(words).parse_args(words)
        set_up_logging(settings_from(arguments).log_level)
        for message in likely_typos():
            logger.warning(message)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `streamadv ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes once more
        return PIPE_CLOSED
    except (StreamadvError, redis.exceptions.RedisError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(message: str) -> int:
    print("streamadv: error:", " ".join(message.split()), file=sys.stderr)
    return FAILED


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that `words` names, or of all of them for help.

    Only what is needed is imported: `streamadv status` does not wait for what `streamadv compute` needs.
    """
    parser = argparse.ArgumentParser(
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


def add_metrics_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port", type=int, metavar="P", help="of /metrics (default: a free one, logged)"
    )
    parser.add_argument(
        "--metrics-host",
        metavar="ADDRESS",
        help="address that /metrics is served at (default: 127.0.0.1; 0.0.0.0: all, for a Prometheus elsewhere)",
    )


def add_log_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="of the messages on stderr (STREAMADV_LOG_LEVEL; default: info)",
    )


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Settings of this process. A parsed argument named like a setting wins over its variable; --run is `run_name`."""
    return load_settings(flags_of(arguments))


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among the parsed arguments; None where the flag was not given."""
    parsed: dict[str, Any] = vars(arguments)
    flags = {name: parsed.get(name) for name in Settings.model_fields if name != "run"}
    return flags | {"run": parsed.get("run_name")}


def connect(settings: Settings, patience_s: float | None = LOOK_PATIENCE_S) -> Connection:
    """A connection to the given server, which is asked until it answers, `patience_s` at most (None = for ever).

    Raises SettingError if none was given, ServerUnreachableError.
    """
    if settings.redis_url is None:
        raise SettingError(
            "no server is given: use --redis URL or STREAMADV_REDIS_URL (`streamadv server` starts one)"
        )
    connection = Connection(settings.redis_url)
    connection.wait_until_ready(patience_s)
    return connection


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def set_up_logging(level: str) -> None:
    """Log to stderr, one line per record."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
