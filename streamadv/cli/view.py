"""`streamadv view`: a page in the browser that shows a run while it runs."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ..extras import TO_VIEW
from ..processes.machine import Signals, say
from . import add_redis_options, settings_from

LONGEST_PORT: Final = 65535


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "view",
        help="a page that shows a run while it runs: what flows, what waits, what the policy says",
        description="Serves a page with the flow of the run, its groups, rollouts, tokens and batches, and prints its "
        "address. It only looks: it takes, names and ends nothing, and an observer's rights suffice. The server or the "
        "run may come later. Ctrl-C ends it.",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="of the page (default: 127.0.0.1, this machine; others need STREAMADV_VIEW_PASSWORD)",
    )
    parser.add_argument(
        "--port", type=_port, metavar="P", help="of the page (default: 8450, or a free one; 0: a free one)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, or its folder, for text instead of token ids (default: the run's setting)",
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    add_redis_options(parser)
    parser.set_defaults(run=view, packages=TO_VIEW)


def view(arguments: argparse.Namespace) -> None:
    from ..view.serve import serving
    from ..view.texts import open_tokenizer

    settings = settings_from(arguments)
    open_tokenizer(arguments.tokenizer, None)  # a wrong one is an error now, not on the first page
    with serving(
        settings.url, settings.run, host=arguments.host, port=arguments.port, tokenizer=arguments.tokenizer
    ) as address:
        print(address, flush=True)
        if arguments.open:
            _open(address)
        threading.Event().wait()


@contextmanager
def open_page(url: str, run: str, signals: Signals) -> Iterator[str]:
    """Serve the page of a run and open it; yields its address. At a terminal it stays after the run, until a signal."""
    from ..view.serve import serving

    with serving(url, run) as address:
        _open(address)
        yield address
        if sys.stdin.isatty() and signals.number is None:
            say(f"the run has ended, its page stays at {address}: Ctrl-C ends it", signals.who)
            signals.wait()


def _open(address: str) -> None:
    """Open the address where there is a screen: without one Python would start a browser of the terminal."""
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)


def _port(text: str) -> int:
    if text.isdecimal() and int(text) <= LONGEST_PORT:
        return int(text)
    raise argparse.ArgumentTypeError(f"is {text!r}, needs a number from 0 to {LONGEST_PORT}")
