"""The HTTP endpoints of a process: `/metrics`, `/livez`, `/readyz`.

Requests are bounded: so many at once, and so many seconds for each, so that clients that do not read cannot pile up.
"""

from __future__ import annotations

import errno
import gzip
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..errors import SettingError
from ..messages import log_fields
from .deadline import Asked

logger = logging.getLogger(__name__)

#: Requests at once; further connections are closed.
MAX_REQUESTS: Final = 16
#: Seconds for a whole request, from the connection to the last byte.
REQUEST_S: Final = 10.0
#: Seconds that `/readyz` waits for an answer.
READY_S: Final = 2.0

PLAIN: Final = "text/plain; charset=utf-8"

#: Says why the process cannot do its work now; None: it can.
NotReady = Callable[[], str | None]


def serve_metrics(registry: Collector, port: int, run: str | None, host: str, not_ready: NotReady) -> int:
    """Serve the endpoints from a daemon thread; returns the port. See `metrics.serve`."""
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise SettingError(
                f"metrics_host {host!r}: {error.strerror}, give an address of this machine"
            ) from None
        raise SettingError(
            f"metrics_port {port}: {error.strerror}, give another one or 0 for a free one"
        ) from error
    server.registry, server.labels = registry, {"run": run} if run else {}
    server.readiness = Asked(not_ready, READY_S)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    bound: int = server.server_address[1]
    logger.info("metrics on port %d, path /metrics", bound, extra=log_fields("metrics_served"))
    return bound


class _View(Collector):
    """A registry with further labels on every sample, without the `_created` series nobody plots.

    names: only samples of these names; None: all.
    """

    def __init__(self, registry: Collector, labels: dict[str, str], names: set[str] | None) -> None:
        self._registry, self._labels, self._names = registry, labels, names

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            labelled = Metric(family.name, family.documentation, family.type)
            labelled.samples = [
                sample._replace(labels=self._labels | sample.labels)
                for sample in family.samples
                if not sample.name.endswith("_created")
                and (self._names is None or sample.name in self._names)
            ]
            if labelled.samples or self._names is None:
                yield labelled


class _Server(socketserver.ThreadingTCPServer):
    """Not http.server's: that one asks the DNS for its own name when it starts."""

    allow_reuse_address = True
    daemon_threads = True
    registry: Collector
    labels: dict[str, str]
    readiness: Asked[str | None]

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._began: dict[Any, float] = {}  # connection -> when it was accepted
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept it unless there are too many."""
        with self._lock:
            if len(self._began) >= MAX_REQUESTS:
                return False
            self._began[request] = time.monotonic()
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._began.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: end the connections whose time is over; their threads find them closed."""
        until = time.monotonic() - REQUEST_S
        with self._lock:
            overdue = [request for request, began in self._began.items() if began < until]
        for request in overdue:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR  # the client has gone
        logger.log(level, "metrics: a request failed: %s", error, extra=log_fields("metrics_request_failed"))


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            url = urlsplit("")
        match url.path:
            case "/metrics":
                self._metrics(url.query)
            case "/livez":
                self._reply(200, "alive\n")
            case "/readyz":
                self._readiness()
            case _:
                self._reply(404, "there are /metrics, /livez and /readyz\n")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _metrics(self, query: str) -> None:
        names = parse_qs(query).get("name[]")
        encode, kind = choose_encoder(self.headers.get("Accept") or "")
        registry: Any = _View(self.server.registry, self.server.labels, set(names) if names else None)
        self._reply(200, encode(registry), kind)

    def _readiness(self) -> None:
        try:
            problem = self.server.readiness.answer()
        except Exception as error:  # whatever it is, the process cannot work
            problem = str(error)
        self._reply(503 if problem else 200, f"{problem or 'ready'}\n")

    def _reply(self, status: int, body: str | bytes, kind: str = PLAIN) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if "gzip" in (self.headers.get("Accept-Encoding") or "") and len(data) > 1024:
            data = gzip.compress(data, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
