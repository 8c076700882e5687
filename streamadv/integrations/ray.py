"""Groupers, scorers and advantage workers as actors of a Ray cluster.

    workers = start("redis://10.0.0.1:6379", run="exp1", workers=[{"num_gpus": 0.25}] * 4)
    ...
    workers.stop()

Each actor keeps one worker process, the same as `streamadv worker`. Ray starts an actor again, on another node if need
be, when it or its node dies; the actor starts its worker again when that ends. Nothing of the run is in any of them:
what a dead one had in hand is taken over by another.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from ..errors import ProcessEndedError, SettingError
from ..extras import require
from ..messages import brief, log_fields
from ..processes.machine import LOOK_S
from ..processes.worker import Kept, worker_command
from ..run import open_run
from ..run.manifest import RunSettings
from ..settings import redis_url, run_name
from ..store.connection import Connection
from ..store.embedded import LOOPBACK, free_port
from ..store.urls import environment_with, hide_password

require(__name__, "ray")

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

__all__ = ["ActorHealth", "ActorOptions", "Actors", "ScorerActors", "connect", "start"]

logger = logging.getLogger(__name__)

#: Namespace of the actors' names. Users of a cluster who have runs of the same name need different ones.
NAMESPACE: Final = "streamadv"
#: Seconds that `start` waits for the workers, and after which it says what it waits for.
WAIT_S: Final = 300.0
REPORT_S: Final = 30.0
#: Seconds that `stop` gives a worker to finish what is in hand; then its actor is killed.
STOP_S: Final = 30.0
#: Seconds that an actor has to answer, and its worker to say whether it is ready.
ANSWER_S: Final = 10.0
READY_S: Final = 2.0
POLL_S: Final = 0.2
#: Options of Ray that `start` sets itself, with how to set them.
OWN_OPTIONS: Final = {
    "name": "names follow from the run",
    "namespace": "give namespace= to start",
    "lifetime": "give detached= to start",
    "get_if_exists": "actors that are there are used",
    "max_concurrency": "an actor answers one call at a time",
}
DEFAULT_OPTIONS: Final = {"num_cpus": 1, "max_restarts": -1}
#: Namespace and name -> the first handle of an actor that this process has started: Ray ends the actor without it.
_first_handles: dict[tuple[str, str], Any] = {}

#: Options of one actor, as `ray.remote` takes them: num_cpus (default 1), num_gpus, resources, runtime_env,
#: scheduling_strategy, max_restarts (default -1: without limit) and others.
ActorOptions = Mapping[str, Any]
State = Literal["starting", "ready", "restarting", "failed", "stopped", "unreachable"]


@dataclass(frozen=True, slots=True)
class ScorerActors:
    """A scorer of the run, as actors.

    function: 'MODULE:FUNCTION', which the actors import. actors: how many, or the options of each. name: which of the
    run's scorers it is, by default the function's. columns, batch_size, timeout_s, tries, whole_groups: of
    `streamadv.Scorer`.
    """

    function: str
    actors: int | Sequence[ActorOptions] = 1
    name: str | None = None
    columns: Sequence[str] | None = None
    batch_size: int | None = None
    timeout_s: float | None = None
    tries: int | None = None
    whole_groups: bool = False

    @property
    def scorer(self) -> str:
        """Which of the run's scorers it is."""
        return self.name or self.function.rpartition(":")[2].rpartition(".")[2]

    @property
    def words(self) -> list[str]:
        """What follows `streamadv worker` on the command line."""
        given = {
            "columns": None if self.columns is None else ",".join(self.columns),
            "batch-size": self.batch_size,
            "timeout-s": self.timeout_s,
            "tries": self.tries,
        }
        options = [
            word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))
        ]
        flags = ["--whole-groups"] if self.whole_groups else []
        return ["scorer", self.function, "--name", self.scorer, *options, *flags]


@dataclass(frozen=True, slots=True)
class ActorHealth:
    """What an actor says of its worker.

    state: of the worker: "starting" (detail says what it waits for), "ready", "restarting" (it has ended and is started
    again soon), "failed" (it refuses to start, or keeps ending: detail has its last line), "stopped"; or "unreachable"
    when the actor does not answer, because Ray starts it again or has no room for it. command: of the worker. node,
    pid: where the actor runs. starts: how often this actor has started its worker. metrics: URL of the worker's
    /metrics.
    """

    name: str
    state: State
    detail: str = ""
    command: str = ""
    node: str = ""
    pid: int = 0
    starts: int = 0
    metrics: str = ""


class Actors:
    """The actors of one run. Made by `start` and `connect`; as a context manager, stopped on leaving."""

    def __init__(self, run: str, handles: Mapping[str, Any], namespace: str) -> None:
        self.run = run
        self._handles = dict(handles)
        self._namespace = namespace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def names(self) -> list[str]:
        """Names of the actors in the namespace, by which `ray.get_actor` finds them too."""
        return list(self._handles)

    def health(self, timeout_s: float = ANSWER_S) -> list[ActorHealth]:
        """Ask every actor at once. One that does not answer within `timeout_s` is "unreachable"."""
        calls = {name: handle.health.remote() for name, handle in self._handles.items()}
        end = time.monotonic() + timeout_s
        return [_answer_of(name, call, max(0.0, end - time.monotonic())) for name, call in calls.items()]

    def wait_until_ready(self, timeout_s: float = WAIT_S) -> None:
        """Wait until every worker has joined the run. Says every 30 s what it waits for.

        Raises ProcessEndedError for a worker that cannot be kept running, or after `timeout_s`.
        """
        began = reported = time.monotonic()
        while True:
            waited_for = [each for each in self.health() if each.state != "ready"]
            if not waited_for:
                return
            for each in waited_for:
                if each.state in ("failed", "stopped"):
                    raise ProcessEndedError(f"actor {each.name}: {each.detail or each.state}")
            now = time.monotonic()
            text = "; ".join(f"{each.name} is {each.state}: {each.detail}" for each in waited_for)
            if now - began >= timeout_s:
                raise ProcessEndedError(f"not ready within {timeout_s:g} s: {text}")
            if now - reported >= REPORT_S:
                reported = now
                fields = log_fields("waiting", run=self.run, role="ray")
                logger.warning("waiting for actors for %.0f s: %s", now - began, text, extra=fields)
            time.sleep(POLL_S)

    def reduce(self, **stages: int) -> None:
        """End the workers of a stage above so many, in order: `workers.reduce(advantage=1)`.

        stages: `grouper`, `advantage` or a scorer's name. Raises SettingError for one that has no actors.
        """
        surplus: dict[str, Any] = {}
        for stage, count in stages.items():
            prefix = f"{self.run}:{stage}-"
            own = {name: handle for name, handle in self._handles.items() if name.startswith(prefix)}
            if not own or not isinstance(count, int) or count < 0:
                known = sorted({_stage_of(self.run, name) for name in self._handles})
                raise SettingError(
                    f"reduce: {stage} is {brief(count)}, needs a whole number for one of the stages with actors: "
                    f"{', '.join(known) or 'there are none'}"
                )
            surplus |= {name: each for name, each in own.items() if int(name.removeprefix(prefix)) >= count}
        Actors(self.run, surplus, self._namespace).stop()
        for name in surplus:
            del self._handles[name]

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End all workers in order, then the actors: what was in hand is finished, or given back at once.

        An actor whose worker has not ended within `timeout_s` is killed; others take over after the lease.
        """
        calls = {handle.stop.remote(): name for name, handle in self._handles.items()}
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        for call in late:
            fields = log_fields("killed", run=self.run, role="ray")
            logger.warning(
                "actor %s has not ended within %g s and is killed", calls[call], timeout_s, extra=fields
            )
        for name, handle in self._handles.items():
            ray.kill(handle, no_restart=True)
            _first_handles.pop((self._namespace, name), None)
        end = time.monotonic() + ANSWER_S
        while set(self._handles) & set(_names(self._namespace)) and time.monotonic() < end:
            time.sleep(POLL_S)  # so that another `start` does not find them


def start(
    url: str | None = None,
    run: str | None = None,
    *,
    groupers: int | Sequence[ActorOptions] = 1,
    workers: int | Sequence[ActorOptions] = 1,
    scorers: Sequence[ScorerActors] = (),
    modules: Sequence[str] = (),
    settings: RunSettings | None = None,
    namespace: str = NAMESPACE,
    detached: bool = False,
    wait_s: float = WAIT_S,
) -> Actors:
    """Start actors for a run on the Ray cluster of this driver, and wait until their workers have joined the run.

    Actors that are there already, by their names, are used and not started: called again with more, it starts those
    that are missing. With fewer it ends none, and says so: `reduce` does.

    Args:
        url: of the server, as every node reaches it; by default STREAMADV_REDIS_URL of this process, see
            `streamadv.redis_url`. TLS files it names have to be on every node.
        run: name of the run; None = STREAMADV_RUN, else `default`. This process creates it, if nobody has.
        groupers: how many, or the Ray options of each one: `[{"num_cpus": 0.5}] * 2`.
        workers: of the advantage stage, the same.
        scorers: the run's scorers, in the order in which they are asked.
        modules: imported by the advantage workers, for your estimators.
        settings: what the run is created with.
        namespace: of Ray, for the actors' names.
        detached: whether the actors outlive this driver, until `connect(run).stop()`; otherwise they end with it.
        wait_s: seconds until all have to be ready.

    Raises:
        SettingError: for a wrong option, or actors that are there with another command.
        ServerUnreachableError: when this process does not reach the server.
        ProcessEndedError: when a worker refuses to start, or is not ready in time; actors that this call has started
            are stopped.
    """
    url, run = redis_url(url), run_name(run)
    settings = settings or RunSettings()
    if scorers and settings.scorers is None:
        settings = settings.model_copy(update={"scorers": tuple(each.scorer for each in scorers)})
    with Connection(url) as connection:
        connection.wait_until_ready(wait_s)
        open_run(connection, run, settings)
    imports = [word for module in modules for word in ("--import", module)]
    wanted = [
        *_named(run, "grouper", ["grouper"], groupers),
        *_named(run, "advantage", ["advantage", *imports], workers),
    ]
    for scorer in scorers:
        wanted += _named(run, scorer.scorer, scorer.words, scorer.actors)
    if not ray.is_initialized():
        ray.init()
    there = set(_names(namespace))
    actor = ray.remote(WorkerActor)
    own = {"namespace": namespace, "get_if_exists": True, "lifetime": "detached" if detached else None}
    handles = {
        name: actor.options(**DEFAULT_OPTIONS | dict(options) | own | {"name": name}).remote(
            name, words, url, run
        )
        for name, words, options in wanted
    }
    started = {name: handle for name, handle in handles.items() if name not in there}
    stages = {_stage_of(run, name) for name in handles}
    own_before = (name for name in there - handles.keys() if name.startswith(f"{run}:"))
    more = sorted(name for name in own_before if _stage_of(run, name) in stages)
    if more:
        fields = log_fields("more_actors", run=run, role="ray")
        text = "%s were started before and go on: Actors.reduce ends workers of a stage above so many"
        logger.warning(text, ", ".join(more), extra=fields)
    handles |= {name: ray.get_actor(name, namespace) for name in more}
    _first_handles.update({(namespace, name): handle for name, handle in started.items()})
    actors = Actors(run, handles, namespace)
    try:
        actors.wait_until_ready(wait_s)
        commands = {name: _command(words, url, run) for name, words, _ in wanted}
        for each in actors.health():
            if each.command and each.command != commands.get(each.name, each.command):
                raise SettingError(
                    f"actor {each.name} is there with `{each.command}`, not `{commands[each.name]}`: "
                    f"stop it first, by connect({run!r}).stop()"
                )
    except BaseException:
        Actors(run, started, namespace).stop(ANSWER_S)
        raise
    fields = log_fields("started", run=run, role="ray")
    logger.info("ready: %s on %s", ", ".join(handles), hide_password(url), extra=fields)
    return actors


def _stage_of(run: str, name: str) -> str:
    return name.removeprefix(f"{run}:").rpartition("-")[0]


def connect(run: str | None = None, *, namespace: str = NAMESPACE) -> Actors:
    """The actors of a run that another driver has started, with `detached=True` or still at work.

    Raises SettingError when there are none.
    """
    run = run_name(run)
    if not ray.is_initialized():
        ray.init()
    names = sorted(name for name in _names(namespace) if name.startswith(f"{run}:"))
    if not names:
        raise SettingError(
            f"run {run} has no actors in Ray's namespace {namespace}: start some, or give its namespace"
        )
    return Actors(run, {name: ray.get_actor(name, namespace) for name in names}, namespace)


class WorkerActor:
    """Keeps one worker process. A thread starts it, and looks after it until `stop`."""

    def __init__(self, name: str, words: Sequence[str], url: str, run: str) -> None:
        own = str(Path(ray.__file__).parent)  # Ray has put folders of its own into the search path
        port = os.environ.get("STREAMADV_METRICS_PORT", "0")
        self._port = free_port() if port == "0" else int(port)
        self._host = os.environ.get("STREAMADV_METRICS_HOST", LOOPBACK)
        environment = {
            **environment_with(url, os.environ),
            "STREAMADV_RUN": run,
            "STREAMADV_METRICS_PORT": str(self._port),
            "PYTHONPATH": os.pathsep.join(each for each in sys.path if each and not each.startswith(own)),
        }
        node = ray.util.get_node_ip_address()
        self._health = ActorHealth(
            name,
            "starting",
            command=_command(words, url, run),
            node=node,
            pid=os.getpid(),
            metrics=f"http://{node}:{self._port}/metrics",
        )
        self._last_line = ""
        self._stop = threading.Event()
        self._worker = Kept(name, worker_command(words), environment, self._show)
        self._keeper = threading.Thread(target=self._keep, name="streamadv-keeper", daemon=True)
        self._keeper.start()

    def __repr__(self) -> str:
        return self._health.name  # Ray shows it in front of each line

    def health(self) -> ActorHealth:
        """How the worker is."""
        health = replace(self._health, starts=self._worker.starts)
        if health.state != "starting":
            return health
        if self._worker.waits:
            return replace(health, state="restarting", detail=self._last_line)
        host = LOOPBACK if self._host in ("0.0.0.0", "::") else self._host
        try:
            with urllib.request.urlopen(f"http://{host}:{self._port}/readyz", timeout=READY_S):
                return replace(health, state="ready")
        except urllib.error.HTTPError as error:
            return replace(health, detail=error.read(1000).decode(errors="replace").strip())
        except OSError:
            return replace(health, detail="its process is starting")

    def stop(self) -> None:
        """End the worker in order; returns when it has ended."""
        self._stop.set()
        self._keeper.join()

    def _keep(self) -> None:
        try:
            self._worker.start()
            while not self._stop.wait(LOOK_S):
                if news := self._worker.look_after():
                    _say(news)
        except (ProcessEndedError, OSError) as error:
            detail = f"{error}: {self._last_line}" if self._last_line else str(error)
            self._health = replace(self._health, state="failed", detail=detail)
            _say(detail)
            return
        self._worker.send(signal.SIGTERM)
        self._worker.wait()
        self._health = replace(self._health, state="stopped")

    def _show(self, line: str, _is_stderr: bool) -> None:
        self._last_line = line
        _say(line)


def _say(line: str) -> None:
    """One line to the actor's log, which Ray shows in the driver."""
    os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def _command(words: Sequence[str], url: str, run: str) -> str:
    """The worker's command line, for people."""
    return f"streamadv worker {' '.join(words)} --redis {hide_password(url)} --run {run}"


def _named(
    run: str, stage: str, words: Sequence[str], actors: int | Sequence[ActorOptions]
) -> Iterator[tuple[str, list[str], ActorOptions]]:
    """Name, words and options of each actor of a stage. Raises SettingError for an option that is not the user's."""
    each = [{}] * actors if isinstance(actors, int) else actors
    for index, options in enumerate(each):
        for option in OWN_OPTIONS.keys() & options:
            raise SettingError(
                f"{stage} actors: the option {option} is not yours to set: {OWN_OPTIONS[option]}"
            )
        yield f"{run}:{stage}-{index}", list(words), options


def _names(namespace: str) -> list[str]:
    """All actors of the namespace that are alive or start again."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in found if each["namespace"] == namespace]


def _answer_of(name: str, call: Any, timeout_s: float) -> ActorHealth:
    try:
        health: ActorHealth = ray.get(call, timeout=timeout_s)
        return health
    except GetTimeoutError:
        return ActorHealth(
            name, "unreachable", "it does not answer: `ray status` says whether the cluster has room"
        )
    except ActorUnavailableError:
        return ActorHealth(name, "unreachable", "Ray starts it again")
    except RayActorError as error:
        lines = str(error).strip().splitlines()  # the last one has the cause
        return ActorHealth(name, "stopped", f"the actor has ended: {lines[-1].strip()}")
