"""The HTTP endpoints of a process: `/metrics`, `/livez`, `/readyz`.

The number of connections and the seconds of each are bounded, so clients that do not read cannot pile up. Clients
that send nothing, or wait for metrics, do not keep others from `/livez`.
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
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..doors import renewed_at_fork
from ..errors import SettingError
from ..messages import log_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Connections at once; for another one the oldest without a request is closed.
MAX_CONNECTIONS: Final = 16
#: Requests at once for what takes time, `/metrics` and `/readyz`; further ones are refused.
MAX_REQUESTS: Final = 8
#: Seconds for a whole request, from the connection to the last byte.
REQUEST_S: Final = 10.0
#: Seconds that `/readyz` waits for an answer.
READY_S: Final = 2.0
#: Pause after a connection that could not be accepted: without a free descriptor it still waits to be.
ACCEPT_PAUSE_S: Final = 0.5

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


class Asked(Generic[T]):
    """A question that is asked in a thread of its own. One that is under way is not asked a second time.

    question: returns the answer or raises. within_s: seconds to wait for it.
    """

    def __init__(self, question: Callable[[], T], within_s: float) -> None:
        self._question = question
        self._within_s = within_s
        self._lock = threading.Lock()
        self._under_way: Future[T] | None = None

    def answer(self) -> T:
        """The answer to a question asked now, or still under way. Raises TimeoutError, and what the question raises."""
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = Future()
                threading.Thread(target=self._ask, args=(self._under_way,), name="asked", daemon=True).start()
            asked = self._under_way
        try:
            return asked.result(self._within_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._within_s:g} s") from None

    def _ask(self, future: Future[T]) -> None:
        try:
            future.set_result(self._question())
        except BaseException as error:
            future.set_exception(error)


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
    request_queue_size = 128  # bursts of connections fill a shorter one, and a probe would wait for seconds
    registry: Collector
    labels: dict[str, str]
    readiness: Asked[str | None]

    def __init__(self, *arguments: Any) -> None:
        self._lock = renewed_at_fork(threading.Lock())
        self._began: dict[Any, float] = {}  # connection -> when it was accepted
        self._asking: set[Any] = set()  # connections whose request takes time
        super().__init__(*arguments)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept it, if there are too many in the place of the oldest that has sent nothing."""
        with self._lock:
            if len(self._began) >= MAX_CONNECTIONS:
                idle = (each for each in self._began if each not in self._asking and not _has_sent(each))
                oldest = next(idle, None)
                if oldest is None:
                    return False
                self._close(oldest)
            self._began[request] = time.monotonic()
        return True

    def may_ask(self, request: Any) -> bool:
        """Whether its request for what takes time can be answered now."""
        with self._lock:
            if len(self._asking) >= MAX_REQUESTS:
                return False
            self._asking.add(request)
        return True

    def _close(self, request: Any) -> None:
        """End a connection; its thread finds it closed."""
        self._began.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._began.pop(request, None)
            self._asking.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: end the connections whose time is over."""
        until = time.monotonic() - REQUEST_S
        with self._lock:
            for request in [request for request, began in self._began.items() if began < until]:
                self._close(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR  # the client has gone
        logger.log(level, "metrics: a request failed: %s", error, extra=log_fields("metrics_request_failed"))


def _has_sent(request: socket.socket) -> bool:
    """Whether something is there that the connection's thread has not read yet."""
    with suppress(OSError):
        return request.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    return False


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            url = urlsplit("")
        match url.path:
            case "/livez":
                self._reply(200, "alive\n")
            case "/metrics" | "/readyz" if not self.server.may_ask(self.request):
                self._reply(503, f"{MAX_REQUESTS} requests are being answered: ask again\n")
            case "/metrics":
                names = parse_qs(url.query).get("name[]")
                encode, kind = choose_encoder(self.headers.get("Accept") or "")
                view: Any = _View(self.server.registry, self.server.labels, set(names) if names else None)
                self._reply(200, encode(view), kind)
            case "/readyz":
                try:
                    problem = self.server.readiness.answer()
                except Exception as error:  # whatever it is, the process cannot work
                    problem = str(error)
                self._reply(503 if problem else 200, f"{problem or 'ready'}\n")
            case _:
                self._reply(404, "there are /metrics, /livez and /readyz\n")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

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
