"""The server of the page: in a thread, at an address that others reach only with a password."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from aiohttp import web

from ..errors import SettingError
from ..store.urls import host_and_port, is_loopback, secret_from
from .app import Screens, make_app

HOST: Final = "127.0.0.1"
#: The port unless one is given; a free one where it is taken.
PORT: Final = 8450
#: Seconds that open requests have at the end.
END_S: Final = 0.5


@contextmanager
def serving(
    url: str, run: str, *, host: str = HOST, port: int | None = None, tokenizer: str | None = None
) -> Iterator[str]:
    """Serve the page of a run; yields its address. The run, and its server, may come later.

    Raises SettingError for a wrong URL, a host of others without STREAMADV_VIEW_PASSWORD, or a port that is taken.
    """
    password = secret_from("VIEW_PASSWORD", os.environ)
    if password is None and not is_loopback(host):
        raise SettingError(
            f"--host {host} shows rollouts to others: set STREAMADV_VIEW_PASSWORD or STREAMADV_VIEW_PASSWORD_FILE, or "
            f"leave --host out and use `ssh -L {port or PORT}:127.0.0.1:{port or PORT}`"
        )
    screens = Screens(url, run, tokenizer)
    listening = _listen(host, port)
    bound = listening.getsockname()[1]
    hosts = None if password else frozenset({"127.0.0.1", "localhost", "::1", host})
    ready, ends = threading.Event(), list[Callable[[], object]]()

    async def serve() -> None:
        over = asyncio.Event()
        ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, over.set))
        runner = web.AppRunner(make_app(screens, password, hosts), access_log=None, shutdown_timeout=END_S)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        ready.set()
        await over.wait()
        await runner.cleanup()
        await asyncio.to_thread(screens.close)

    def body() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()  # whoever waits for a server that cannot begin

    thread = threading.Thread(target=body, name="view", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"http://{host_and_port(host, bound)}/"
    finally:
        for end in ends:
            with suppress(RuntimeError):  # the loop is closed: it has ended by itself
                end()
        thread.join()


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((host, wanted), family=family)
        except OSError as error:
            if wanted and port is None:
                continue  # taken: a free one
            raise SettingError(
                f"--host {host} --port {wanted}: {error.strerror or error}, give another one"
            ) from None
    raise AssertionError("a free port")
