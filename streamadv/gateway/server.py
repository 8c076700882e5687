"""The gateway process: a producer of the run with an HTTP front."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import web

from .. import doors, metrics
from ..errors import SettingError
from ..messages import log_fields
from ..processes.memory import collect_rarely
from ..producer.producer import Producer
from ..settings import Settings
from ..store.urls import host_and_port, is_loopback
from .engines import Engines
from .http import Front
from .keys import Keys
from .loading import Loading
from .options import Options

logger = logging.getLogger(__name__)

#: Seconds that answers under way have, once the process was told to end.
DRAIN_S: Final = 60.0
ROLE: Final = "gateway"


class Place(NamedTuple):
    """Where a gateway listens."""

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = False

    def tls(self) -> ssl.SSLContext | None:
        """Raises SettingError for an address that others reach without TLS, or a certificate that cannot be read."""
        if self.tls_cert is None:
            if not self.behind_proxy and not is_loopback(self.host):
                raise SettingError(
                    f"--host {self.host} opens the gateway to the network, keys would travel in the clear: give "
                    f"--tls-cert and --tls-key, or say --behind-proxy if something in front of it speaks TLS"
                )
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise SettingError(
                f"--tls-cert {self.tls_cert}: {error}: give a certificate and its key, PEM"
            ) from None
        return context


async def serve(
    settings: Settings, options: Options, keys: Keys, place: Place, ready: Callable[[str], None]
) -> None:
    """Until SIGTERM or SIGINT. ready: called with the gateway's URL."""
    tls, stop, loop = place.tls(), asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics.begin_stage(ROLE, "gateway")
    # As `streamadv status` shows it.
    name = f"gateway-{os.uname().nodename}-{os.getpid()}-{doors.random_bytes(4).hex()}"
    async with Producer(settings.url, settings.run, name=name) as producer:
        look = Loading(producer).look if options.load_weights else None
        engines = Engines(options.engines, options.answer_s, look)
        front = Front(producer, options, keys, engines)
        await front.open()
        sweeping = asyncio.create_task(front.sessions.sweep())
        runner = front.runner(shutdown_s=1.0)
        try:
            await runner.setup()
            # An answer brings an object for each token, none is part of a cycle: looking through them costs a third.
            collect_rarely(50_000, 20, 50)
            try:
                await web.TCPSite(runner, place.host, place.port, ssl_context=tls).start()
            except OSError as error:
                raise SettingError(
                    f"--host {place.host} --port {place.port}: {error.strerror}, give another one"
                ) from None
            host, port = runner.addresses[0][:2]
            metrics.serve(settings.metrics_port, settings.run, settings.metrics_host)
            ready(f"{'http' if tls is None else 'https'}://{host_and_port(host, port)}")
            await stop.wait()
            await _drain(front)
        finally:
            sweeping.cancel()
            await runner.cleanup()
            await engines.close()


async def _drain(front: Front) -> None:
    """No new turns; answers under way end. What agents have seen is at the run's server, for the next gateway."""
    front.is_stopping = True
    logger.info(
        "gateway stops: %d turns under way", front.under_way, extra=log_fields("gateway_stops", role=ROLE)
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await front.idle.wait()
