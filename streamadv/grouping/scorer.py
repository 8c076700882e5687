"""Scorers: user functions that bring rewards after the push, before grouping.

A trajectory pushed without a reward visits the run's scorers in the order the manifest names them, then goes on to the
grouper (`scoring_streams.py`). Each scorer is a stage of its own: start any number of processes for it.

A function may fail on a trajectory, give what is no score, not return, or end its process (`scores.py`). Then each
trajectory of the micro-batch is tried alone (`tries.py`); after its last try it is unscorable.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .. import clock, metrics
from ..errors import SettingError, UndecodableGroupError
from ..messages import log_fields
from ..run import open_run
from ..run.consumer import Consumer, Entry
from ..run.hangs import Stopped
from ..run.manifest import RunSettings
from ..run.payloads import fetch_payloads
from ..store.connection import Connection
from ..store.retry import RETRYABLE, Outage, patiently
from ..trajectory.payload import Payload
from ..trajectory.reference import Reference
from .scores import Score, ScoreError, ScoreFunction, ask, check_function, rewards_of
from .scoring_streams import (
    HandOff,
    pass_on,
    references_of,
    scored_record,
    unchanged_record,
    unscorable_record,
    waits_for_score,
)
from .tries import Tries, UnscoredTrajectory

__all__ = ["Score", "ScoreFunction", "Scorer"]

logger = logging.getLogger(__name__)

LEASE_S: Final = 15.0
TIMEOUT_S: Final = 120.0
TRIES: Final = 3
#: Before the next try at a trajectory alone: twice as long each time, half of it by chance.
FIRST_DELAY_S: Final = 1.0


class Suspect(NamedTuple):
    """A trajectory that has failed alone, and is tried again when it is `due` by `clock.now`."""

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
        self._max_tries = tries
        self._tries = Tries(name)

    def run(self, score: ScoreFunction, stop: threading.Event) -> None:
        """Score until `stop` is set. `score` may be a coroutine function. What it fails on becomes unscorable.

        Raises SettingError for a function that cannot be called with references and payloads.
        """
        check_function(score, self._name)
        consumer = Consumer(
            self._run, self._name, lambda keys: keys.scoring(self._name), lease_s=self._lease_s, stop=stop
        )
        suspects: list[Suspect] = []
        outage = Outage(self._name, sleep=stop.wait)
        with consumer.leases_kept(), suppress(Stopped):
            while not stop.is_set():
                try:
                    suspects = self._turn(consumer, score, suspects)
                except RETRYABLE as error:
                    consumer.start_over()
                    suspects = []  # read again with everything pending
                    outage.pause_after(error)
                else:
                    outage.over()
        consumer.give_back()

    def _turn(self, consumer: Consumer, score: ScoreFunction, suspects: Sequence[Suspect]) -> list[Suspect]:
        """Try the suspects that are due, then score new entries. Returns the suspects there are afterwards."""
        now = clock.now()
        later = [suspect for suspect in suspects if suspect.due > now]
        for suspect in suspects:
            if suspect.due <= now:
                later += self.work(consumer, [suspect.entry], score, alone=True)
        if len(later) >= self._batch_size:  # a function that fails on everything is given it slowly
            consumer.stop.wait(min(suspect.due for suspect in later) - now)
        elif entries := consumer.read(self._batch_size):
            later += self.work(consumer, entries, score, alone=entries[0].reclaimed)
        return later

    def work(
        self, consumer: Consumer, entries: Sequence[Entry], score: ScoreFunction, *, alone: bool = False
    ) -> list[Suspect]:
        """Score entries of one shard and hand them off. Returns those that are to be tried again, alone."""
        items = self._unscored(consumer, entries)
        if alone:
            items = self._tries.fewest_first(self._run.shard(entries[0].shard), items)
        elif items:
            items = self._score_together(consumer, items, score)
        suspects: list[Suspect] = []
        for item in items:
            if consumer.stop.is_set():
                break
            suspects += self._score_alone(consumer, item, score)
        return suspects

    def _unscored(self, consumer: Consumer, entries: Sequence[Entry]) -> list[UnscoredTrajectory]:
        """The trajectories to be scored. All other entries are handed off, or removed as malformed."""
        shard = self._run.shard(entries[0].shard)
        references = references_of(self._run, shard, self._name, entries)
        consumer.done([entry for entry in entries if entry.id not in references])
        entries = [entry for entry in entries if entry.id in references]
        waits = waits_for_score(shard, entries)
        # A score no longer counts: the group has ended, or another scorer found the trajectory unscorable.
        ended = [entry for entry, is_waiting in zip(entries, waits, strict=True) if not is_waiting]
        pass_on(shard, self._name, [unchanged_record(entry) for entry in ended])
        consumer.done(ended)
        entries = [entry for entry, is_waiting in zip(entries, waits, strict=True) if is_waiting]
        payloads = self._fetch([references[entry.id] for entry in entries])
        unreadable = [entry for entry, payload in zip(entries, payloads, strict=True) if payload is None]
        self._hand_off(consumer, [unscorable_record(entry) for entry in unreadable])
        return [
            UnscoredTrajectory(entry, references[entry.id], payload)
            for entry, payload in zip(entries, payloads, strict=True)
            if payload
        ]

    def _fetch(self, references: Sequence[Reference]) -> list[Payload | None]:
        """Payloads; None = unscorable, because it cannot be read or is gone.

        It is gone when this process was held up beyond its lease and the group has ended meanwhile. Then somebody
        else has handed the entry off, and the hand-off of this process changes nothing.
        """
        with suppress(UndecodableGroupError):
            return list(fetch_payloads(self._run, references, self._columns))
        payloads: list[Payload | None] = []
        for reference in references:
            try:
                payloads += fetch_payloads(self._run, [reference], self._columns)
            except UndecodableGroupError as error:
                fields = self._log_fields("payload_unreadable", reference)
                logger.warning("scorer %s: unscorable: %s", self._name, error, extra=fields)
                payloads.append(None)
        return payloads

    def _score_together(
        self, consumer: Consumer, items: Sequence[UnscoredTrajectory], score: ScoreFunction
    ) -> list[UnscoredTrajectory]:
        """One call of the function for all. Returns those that have no score afterwards."""
        try:
            answers = self._ask(items, score, consumer.stop)
        except ScoreError as error:
            text = "scorer %s failed on %d trajectories: %s"
            logger.warning(text, self._name, len(items), error, extra=self._log_fields("score_failed"))
            return list(items)
        records, failed = [], []
        for item, answer in zip(items, answers, strict=True):
            try:
                records.append(self._rewarded(item, answer))
            except ScoreError:
                failed.append(item)
        self._hand_off(consumer, records)
        return failed

    def _score_alone(
        self, consumer: Consumer, item: UnscoredTrajectory, score: ScoreFunction
    ) -> list[Suspect]:
        """One try at one trajectory; with the last one it is unscorable."""
        shard = self._run.shard(item.entry.shard)
        tries = self._tries.count(shard, item)
        try:
            if tries > self._max_tries:
                raise ScoreError("crash", "the process ended each time")
            (answer,) = self._ask([item], score, consumer.stop)
            record = self._rewarded(item, answer)
        except ScoreError as error:
            if tries < self._max_tries:
                delay = FIRST_DELAY_S * 2 ** (tries - 1) * random.uniform(0.5, 1)
                return [Suspect(clock.now() + delay, item.entry)]
            metrics.unscorable(self._name, error.kind)
            text = "scorer %s: trajectory %s is unscorable after %d tries: %s"
            fields = self._log_fields("trajectory_unscorable", item.reference)
            logger.warning(text, self._name, item.name, self._max_tries, error, extra=fields)
            record = unscorable_record(item.entry)
        self._hand_off(consumer, [record])
        self._tries.forget(shard, item)
        return []

    def _ask(
        self, items: Sequence[UnscoredTrajectory], score: ScoreFunction, stop: threading.Event
    ) -> list[Any]:
        references, payloads = [item.reference for item in items], [item.payload for item in items]
        with metrics.timed(self._name, "score"):
            return ask(score, references, payloads, f"scorer {self._name}", self._timeout_s, stop)

    def _rewarded(self, item: UnscoredTrajectory, answer: Any) -> HandOff:
        """The record of a trajectory with its score filled in. Raises ScoreError if `answer` is none."""
        rewards = rewards_of(answer, self._name, item.reference)
        if rewards is None:
            return unscorable_record(item.entry)
        reward = sum(rewards.values(), item.reference.reward or 0.0)
        rewards = {**item.reference.rewards, **rewards}
        return scored_record(item.entry, replace(item.reference, reward=reward, rewards=rewards), self._next)

    def _hand_off(self, consumer: Consumer, records: Sequence[HandOff]) -> None:
        """Pass records of one shard on."""
        if not records:
            return
        passed = pass_on(self._run.shard(records[0].entry.shard), self._name, records)
        metrics.entries(self._name, "acked", passed)
        metrics.entries(self._name, "duplicate", len(records) - passed)
        consumer.done([record.entry for record in records])

    def _log_fields(self, event: str, reference: Reference | None = None) -> dict[str, object]:
        group = None if reference is None else reference.group_id
        return log_fields(event, run=self._run.name, role=self._name, group=group)
