"""Scorers: user functions that bring rewards after the push, before grouping.

A trajectory pushed without a reward visits the run's scorers in the order the manifest names them, then goes on
to the grouper. Each is a stage of its own: start any number of processes for it.

A function may fail on a trajectory, give what is no score, not return, or end its process. Then each trajectory of the
micro-batch is tried alone; tries are counted on the server before they are made, so that a death counts as well, and
after the last one the trajectory is unscorable.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from .. import metrics
from ..errors import HungError, SettingError, UndecodableGroupError
from ..messages import first_problem, log_fields
from ..run import open_run
from ..run.consumer import Consumer, Entry
from ..run.hangs import Stopped, call_within
from ..run.malformed import reject
from ..run.manifest import RunSettings
from ..run.payloads import fetch_payloads
from ..run.records import RECORD_FIELDS, record_problem
from ..store.connection import Connection
from ..store.replies import as_count
from ..store.retry import RETRYABLE, Outage, patiently
from ..trajectory.payload import Payload
from ..trajectory.reference import REFERENCE, Reference
from .scores import Score, ScoreError, ScoreFunction, rewards_of, scores_of
from .scoring import Passed, pass_on, unchanged, waits_for_score

__all__ = ["Score", "ScoreFunction", "Scorer"]

logger = logging.getLogger(__name__)

LEASE_S: Final = 15.0
TIMEOUT_S: Final = 120.0
TRIES: Final = 3
#: Before the next try at a trajectory alone: twice as long each time, half of it by chance.
FIRST_DELAY_S: Final = 1.0


class _Unscored(NamedTuple):
    """A trajectory that waits for a score of this scorer."""

    entry: Entry
    reference: Reference
    payload: Payload

    @property
    def name(self) -> str:
        return f"{self.reference.group_id}/{self.reference.rollout_index}"


class _Scored(NamedTuple):
    """A record as it goes on, to the scorer `target` or, None, to the grouper: unscorable ones without a detour."""

    entry: Entry
    fields: list[Any]
    target: str | None = None


class _Suspect(NamedTuple):
    """Failed alone, and is tried again when it is `due` (monotonic seconds)."""

    due: float
    entry: Entry


class Scorer:
    """Runs a score function over the trajectories that wait for it.

    `name` must be among the run's `scorers`. columns: which ones the function reads (None = all). timeout_s: for one
    call of the function. tries: at a trajectory alone, before it is unscorable. The reward of a trajectory is the sum
    of what its scorers give; a None from any of them makes it unscorable.
    """

    def __init__(
        self,
        connection: str | Connection,
        run: str,
        name: str,
        *,
        columns: Sequence[str] | None = None,
        lease_s: float = LEASE_S,
        batch_size: int = 32,
        timeout_s: float = TIMEOUT_S,
        tries: int = TRIES,
        settings: RunSettings | None = None,
    ) -> None:
        for setting, value in (("batch_size", batch_size), ("tries", tries)):
            if value < 1:
                raise SettingError(f"{setting} is {value}, needs 1 or more")
        if not 0 < timeout_s < threading.TIMEOUT_MAX:
            raise SettingError(f"timeout_s is {timeout_s:g}, needs seconds above 0")
        connection = Connection(connection) if isinstance(connection, str) else connection
        connection.wait_until_ready()
        self._run = patiently(lambda: open_run(connection, run, settings), f"scorer {name}")
        order = self._run.manifest.scorers
        if name not in order:
            raise SettingError(
                f"scorer {name!r} is not one of run {run} ({', '.join(order) or 'none'}): "
                f"create the run with RunSettings(scorers=[{name!r}])"
            )
        self._name = name
        self._next = next(iter(order[order.index(name) + 1 :]), None)
        self._columns = columns
        self._lease_s = lease_s
        self._batch_size = batch_size
        self._timeout_s = timeout_s
        self._tries = tries

    def run(self, score: ScoreFunction, stop: threading.Event) -> None:
        """Score until `stop` is set. `score` may be a coroutine function. What it fails on becomes unscorable.

        Raises SettingError for a function that cannot be called with references and payloads.
        """
        with suppress(ValueError):  # some functions of C have no signature
            try:
                inspect.signature(score).bind((), ())
            except TypeError as error:
                raise SettingError(
                    f"scorer {self._name}: {getattr(score, '__name__', score)} cannot be called with two arguments, "
                    f"needs references and payloads: {error}"
                ) from None
        consumer = Consumer(
            self._run, self._name, lambda keys: keys.scoring(self._name), lease_s=self._lease_s, stop=stop
        )
        suspects: list[_Suspect] = []
        outage = Outage(self._name, sleep=stop.wait)
        with consumer.leases_kept(), suppress(Stopped):
            while not stop.is_set():
                try:
                    now = time.monotonic()
                    due = [each for each in suspects if each.due <= now]
                    suspects = [each for each in suspects if each.due > now]
                    for each in due:
                        suspects += self.work(consumer, [each.entry], score, alone=True)
                    if len(suspects) >= self._batch_size:  # a function that fails on all is given them slowly
                        stop.wait(min(each.due for each in suspects) - now)
                    elif entries := consumer.read(self._batch_size):
                        suspects += self.work(consumer, entries, score, alone=entries[0].reclaimed)
                except RETRYABLE as error:
                    consumer.start_over()
                    suspects = []  # come again with all that is pending
                    outage.pause_after(error)
                else:
                    outage.over()
        consumer.give_back()

    def work(
        self, consumer: Consumer, entries: Sequence[Entry], score: ScoreFunction, *, alone: bool = False
    ) -> list[_Suspect]:
        """Score entries of one shard and hand them off. Those that are to be tried again, alone."""
        waiting = self._waiting(consumer, entries)
        if alone:
            waiting = self._by_tries(waiting)
        elif waiting:
            waiting = self._together(consumer, waiting, score)
        suspects: list[_Suspect] = []
        for each in waiting:
            if consumer.stop.is_set():
                break
            suspects += self._alone(consumer, each, score)
        return suspects

    def _waiting(self, consumer: Consumer, entries: Sequence[Entry]) -> list[_Unscored]:
        """The trajectories to be scored; what needs no score, or can have none, is handed off, junk removed."""
        shard = self._run.shard(entries[0].shard)
        known: list[tuple[Entry, Reference]] = []
        for entry in entries:
            problem = record_problem(self._run, entry.shard, entry.fields)
            if problem is None:
                try:
                    known.append((entry, REFERENCE.validate_json(entry.fields["reference"])))
                    continue
                except ValidationError as error:
                    problem = f"reference: {first_problem(error)}"
            reject(shard, shard.keys.scoring(self._name), entry.id, problem, entry.fields, stage=self._name)
            consumer.done([entry])
        waits = waits_for_score(self._run, [entry for entry, _ in known])
        over = [entry for (entry, _), waiting in zip(known, waits, strict=True) if not waiting]
        pass_on(shard, self._name, [unchanged(entry) for entry in over], None)
        consumer.done(over)
        known = [each for each, waiting in zip(known, waits, strict=True) if waiting]
        found = self._fetch([reference for _, reference in known])
        unreadable = [entry for (entry, _), payload in zip(known, found, strict=True) if payload is None]
        self._hand_off(consumer, [_Scored(entry, _fields(entry, None)) for entry in unreadable])
        return [_Unscored(*each, payload) for each, payload in zip(known, found, strict=True) if payload]

    def _fetch(self, references: Sequence[Reference]) -> list[Payload | None]:
        """Payloads; None = unscorable, since it cannot be read, or is gone.

        It is gone when this process was held up beyond its lease and the group has ended meanwhile: then the entry
        was handed off by somebody else and what is said of it here is dropped.
        """
        with suppress(UndecodableGroupError):
            return list(fetch_payloads(self._run, references, self._columns))
        found: list[Payload | None] = []
        for reference in references:
            try:
                found += fetch_payloads(self._run, [reference], self._columns)
            except UndecodableGroupError as error:
                fields = self._log_fields("payload_unreadable", reference)
                logger.warning("scorer %s: unscorable: %s", self._name, error, extra=fields)
                found.append(None)
        return found

    def _together(
        self, consumer: Consumer, waiting: Sequence[_Unscored], score: ScoreFunction
    ) -> list[_Unscored]:
        """One call for all. Those without a score afterwards."""
        try:
            scores = self._ask(waiting, score, consumer.stop)
        except ScoreError as error:
            text = "scorer %s failed on %d trajectories: %s"
            logger.warning(text, self._name, len(waiting), error, extra=self._log_fields("score_failed"))
            return list(waiting)
        scored, failed = [], []
        for each, answer in zip(waiting, scores, strict=True):
            try:
                scored.append(self._scored(each, answer))
            except ScoreError:
                failed.append(each)
        self._hand_off(consumer, scored)
        return failed

    def _alone(self, consumer: Consumer, each: _Unscored, score: ScoreFunction) -> list[_Suspect]:
        """One try at one trajectory; with the last one it is unscorable."""
        number = self._attempt(each, count=True)
        try:
            if number > self._tries:
                raise ScoreError("crash", "the process ended each time")
            (answer,) = self._ask([each], score, consumer.stop)
            scored = self._scored(each, answer)
        except ScoreError as error:
            if number < self._tries:
                delay = FIRST_DELAY_S * 2 ** (number - 1) * random.uniform(0.5, 1)
                return [_Suspect(time.monotonic() + delay, each.entry)]
            metrics.unscorable(self._name, error.kind)
            text = "scorer %s: trajectory %s is unscorable after %d tries: %s"
            fields = self._log_fields("trajectory_unscorable", each.reference)
            logger.warning(text, self._name, each.name, self._tries, error, extra=fields)
            scored = _Scored(each.entry, _fields(each.entry, None))
        self._hand_off(consumer, [scored])
        self._attempt(each, count=False)
        return []

    def _ask(self, waiting: Sequence[_Unscored], score: ScoreFunction, stop: threading.Event) -> list[Any]:
        """The function's scores. Raises ScoreError, and Stopped when the process is to end."""

        def call() -> Any:
            given = score([each.reference for each in waiting], [each.payload for each in waiting])
            return asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given

        try:
            with metrics.timed(self._name, "score"):
                answer = call_within(call, self._timeout_s, f"scorer {self._name}", stop)
        except HungError as error:
            raise ScoreError("hang", str(error)) from error
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            raise ScoreError("exception", f"{type(error).__name__}: {error}") from error
        return scores_of(answer, len(waiting))

    def _scored(self, each: _Unscored, answer: Any) -> _Scored:
        """The hand-off of a trajectory with its score filled in. Raises ScoreError if that is none."""
        entry, reference = each.entry, each.reference
        rewards = rewards_of(answer, self._name, reference)
        if rewards is None:
            return _Scored(entry, _fields(entry, None))
        reward = sum(rewards.values(), reference.reward or 0.0)
        filled = replace(reference, reward=reward, rewards={**reference.rewards, **rewards})
        return _Scored(entry, _fields(entry, filled), self._next)

    def _hand_off(self, consumer: Consumer, scored: Sequence[_Scored]) -> None:
        for target in dict.fromkeys(each.target for each in scored):
            group = [each for each in scored if each.target == target]
            shard = self._run.shard(group[0].entry.shard)
            records = [Passed(each.entry.id, each.fields) for each in group]
            passed = pass_on(shard, self._name, records, target)
            metrics.entries(self._name, "acked", passed)
            metrics.entries(self._name, "duplicate", len(group) - passed)
            consumer.done([each.entry for each in group])

    def _attempt(self, each: _Unscored, *, count: bool) -> int:
        """Count a try on the server, or forget them. How many there were."""
        args = [self._tries_field(each), "1" if count else "0"]
        tries: int = self._run.shard(each.entry.shard).call("attempt", args)
        return tries

    def _log_fields(self, event: str, reference: Reference | None = None) -> dict[str, object]:
        group = None if reference is None else reference.group_id
        return log_fields(event, run=self._run.name, role=self._name, group=group)

    def _tries_field(self, each: _Unscored) -> str:
        return f"{self._name} {each.reference.group_id} {each.reference.rollout_index}"

    def _by_tries(self, waiting: list[_Unscored]) -> list[_Unscored]:
        """Those with the fewest tries first: what ends this process again does so when the others are done."""
        if len(waiting) < 2:
            return waiting
        attempts = self._run.keys.shard(waiting[0].entry.shard).attempts
        found: Any = self._run.connection.scripts.hmget(
            attempts, [self._tries_field(each) for each in waiting]
        )
        tries = list(map(as_count, found))
        return [waiting[place] for place in sorted(range(len(waiting)), key=tries.__getitem__)]


async def _awaited(given: Any) -> Any:
    return await given


def _fields(entry: Entry, reference: Reference | None) -> list[Any]:
    """The fields of a record with the reward of this reference; None makes it unscorable."""
    fields: dict[str, Any] = dict(entry.fields)
    if reference is None:
        fields |= {"kind": "unscorable", "reward": ""}
    else:
        fields["reward"] = repr(reference.reward)
        fields["reference"] = REFERENCE.dump_json(reference, exclude_defaults=True)
    return [fields[name] for name in RECORD_FIELDS]
