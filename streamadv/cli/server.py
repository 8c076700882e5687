"""`streamadv server`: the embedded server in the foreground."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from typing import Any, Final

from ..store.embedded import APPENDFSYNC, LOOPBACK, EmbeddedServer
from . import add_log_options, settings_from
from .parser import size

LOOK_SECONDS: Final = 0.5


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "server",
        help="runs a Redis or Valkey server on this machine",
        description="Runs a Redis or Valkey server on 127.0.0.1 until Ctrl-C or SIGTERM. The first line of stdout "
        "is its URL. Without --data-dir it keeps everything in memory only. Its password, if it is to have one, "
        "comes from STREAMADV_REDIS_PASSWORD or the file named by STREAMADV_REDIS_PASSWORD_FILE.",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="keep the data there (append-only file)")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="TCP port (default: a free one)")
    parser.add_argument(
        "--bind",
        default=LOOPBACK,
        metavar="ADDRESS",
        help=f"address to listen at (default {LOOPBACK}; any other one needs a password)",
    )
    parser.add_argument("--unix-socket", action="store_true", help="a private unix socket instead of a port")
    parser.add_argument(
        "--appendfsync",
        choices=APPENDFSYNC,
        default=APPENDFSYNC[0],
        help=f"when data reaches the disk (default {APPENDFSYNC[0]}; always: nothing acknowledged is ever lost)",
    )
    parser.add_argument(
        "--maxmemory", type=size, metavar="SIZE", help='such as "4gb"; refuses writes above it, never evicts'
    )
    add_log_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the server until a signal; 1 if it ends by itself."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    settings = settings_from(arguments)
    with EmbeddedServer(
        arguments.data_dir,
        arguments.port,
        unix_socket=arguments.unix_socket,
        appendfsync=arguments.appendfsync,
        maxmemory=arguments.maxmemory,
        binary=settings.server_binary,
        bind=arguments.bind,
        password=settings.password,
    ) as server:
        print(server.open_url, flush=True)
        while not stop.wait(LOOK_SECONDS):
            server.check()
