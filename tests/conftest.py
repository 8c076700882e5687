"""Fixtures all tests share: one real server per session, emptied for each test, and an in-process fake."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import redis
import redis.asyncio.cluster
from hypothesis import HealthCheck, settings

from streamadv import clock, doors
from streamadv.batch import leader
from streamadv.errors import ServerError
from streamadv.grouping import housekeeping
from streamadv.producer import Producer
from streamadv.run import Run, consumer, open_run
from streamadv.store import waiting
from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer, find_server_binary
from tests.clusters import Cluster
from tests.shares import examples

#: Markers of all tests in a folder.
MARKERS: Final = {
    "chaos": ("server", "processes", "slow"),
    "soak": ("server", "processes", "slow", "release"),
    "benchmarks": ("release",),
    "servers": ("server",),
}
#: Fixtures that take seconds to start: one process runs all tests of each.
STARTED_ONCE: Final = {"cluster", "secured", "sentinels", "children"}
SERVERS: Final = ("redis-server", "valkey-server")
#: Threads that end with the test.
ENDED: Final = ("streamadv-heartbeat", "streamadv-read-ahead")


def pytest_configure() -> None:
    # Examples may take their time, and drawing them: the machine may be busy.
    slow = [HealthCheck.too_slow, *settings.default.suppress_health_check]
    settings.register_profile(
        "tests", settings.default, max_examples=examples(100), deadline=None, suppress_health_check=slow
    )
    settings.load_profile("tests")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before torch is imported; worker processes inherit it
    for name in ("chaos.harness", "flows", "support"):  # what tests share asserts too
        pytest.register_assert_rewrite(f"tests.{name}")
    sys.addaudithook(_note_start)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell has started with &
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded stays: the garbage collector would walk torch and thousands of tests, half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Set the markers that follow from fixtures and folders."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        fixtures = set(getattr(item, "fixturenames", ()))
        for fixture in STARTED_ONCE & fixtures:
            item.add_marker(pytest.mark.xdist_group(fixture))
        uses_server = {"server", "cluster", "forgetful"} & fixtures
        for marker in (*MARKERS.get(folder, ()), *(["server"] if uses_server else [])):
            item.add_marker(marker)


_started: list[str] = []


def _note_start(event: str, arguments: tuple[Any, ...]) -> None:
    """Note which marker a test needs that starts a program: `server` or `processes`."""
    if event != "subprocess.Popen":
        return
    words = arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[1]]
    if any(Path(str(word)).name.startswith(SERVERS) for word in words):
        _started.append("server")
    elif words[0] == sys.executable:
        _started.append("processes")


@pytest.fixture(autouse=True)
def _marked_by_what_it_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test without the marker of what it starts fails: `make quick` goes by the markers."""
    _started.clear()
    yield
    missing = set(_started) - {marker.name for marker in request.node.iter_markers()}
    assert not missing, f"mark the test with {', '.join(f'@pytest.mark.{name}' for name in sorted(missing))}"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see the defaults, whatever the shell has set; only where to find things is kept."""
    kept = ("STREAMADV_SERVER_BINARY", "STREAMADV_DATA", "STREAMADV_GOLDEN")
    for name in [n for n in os.environ if n.startswith(("STREAMADV_", "OTEL_")) and n not in kept]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _waits_are_for_tests() -> Iterator[None]:
    """As all tests need them; one that needs others sets them for itself."""
    from tests.support import CompilesOnce, scripting_mixin  # whose asserts are rewritten first

    with pytest.MonkeyPatch.context() as patch:
        # a consumer with nothing to read looks at its stop event ten times a second, not once
        patch.setattr(consumer, "BLOCK_MS", 100)
        # however slow the machine is, a round of housekeeping is whole: tests count on what one round ends
        patch.setattr(housekeeping, "HOUSEKEEPING_SLICE_S", 3600.0)
        # after a restart of the server tests make the heartbeats themselves, or know that no producer is alive
        patch.setattr(leader, "SETTLE_S", 0.0)
        # half of the time of a script on the in-process server
        patch.setattr(scripting_mixin.LUA_MODULE, "LuaRuntime", CompilesOnce)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_of_a_test() -> Iterator[None]:
    """One fixture for all of it: there are thousands of tests, and each fixture takes its time in all of them."""
    waiting._live.clear()  # waits that an earlier test left
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    # heartbeats of trainers that nobody closed, and what was being read ahead, would run into later tests' patches
    left = [thread for thread in threading.enumerate() if thread.name in ENDED]
    for thread in left:
        for given in getattr(thread, "_args", ()):
            if isinstance(given, threading.Event):  # with which `TrainerQueue.close` ends it
                given.set()
    for thread in left:
        thread.join(30)
    # commands that run in this process set logging up, and would write later tests' warnings to stderr
    root.handlers[:] = handlers
    if root.level != level:
        root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook = hook
    # `up`, run in this process, takes SIGINT and SIGTERM and keeps them
    for number, handler in signals.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """A real server in memory, for the whole session. Do not change its configuration: start your own."""
    try:
        find_server_binary()
    except ServerError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    with EmbeddedServer() as running:
        yield running


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    """URL of the real server, empty."""
    if not server.running:
        server.start()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@pytest.fixture(scope="session")
def cluster(server: EmbeddedServer) -> Iterator[Cluster]:
    """Three primaries with a replica each, for the whole session. A test leaves it whole, in whatever roles."""
    if not hasattr(redis.asyncio.cluster, "TransactionStrategy"):
        pytest.skip("redis-py 7 or newer is needed for a cluster")
    with Cluster() as running:
        yield running


@pytest.fixture
def run() -> str:
    """A run name nobody else uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def producer(redis_url: str, run: str) -> Iterator[Producer]:
    """A producer of the run on the real server."""
    with Producer(redis_url, run) as opened:
        yield opened


@pytest.fixture
def joined(redis_url: str, run: str, producer: Producer) -> Run:
    """The run that `producer` has made."""
    return open_run(Connection(redis_url), run)


@pytest.fixture
def forgetful() -> Iterator[EmbeddedServer]:
    """A real server of the test's own, that keeps nothing across a restart."""
    with EmbeddedServer() as running:
        yield running


@pytest.fixture
def fake() -> Connection:
    """An empty in-process server: no INFO, and reads with COUNT and BLOCK return at once."""
    from tests.support import OneClient  # whose asserts are rewritten first

    return OneClient()


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets time stand still in this process, and on the fake server, but for `forward`."""
    now, wall = clock.now(), time.time()
    monkeypatch.setattr(clock, "now", lambda: now)
    for module, name in ((time, "time"), (doors, "wall")):
        monkeypatch.setattr(module, name, lambda: wall)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of this process forward, and the fake server's."""
    passed, now, wall = [0.0], clock.now, time.time
    monkeypatch.setattr(clock, "now", lambda: now() + passed[0])
    for module, name in ((time, "time"), (doors, "wall")):
        monkeypatch.setattr(module, name, lambda: wall() + passed[0])

    def go_on(seconds: float) -> None:
        passed[0] += seconds

    return go_on
