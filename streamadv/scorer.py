"""Scorers: user functions that bring rewards after the push, before grouping.

A trajectory pushed without a reward visits the run's scorers in the order the manifest names them, then goes on
to the grouper. Each is a stage of its own: start any number of processes for it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from . import metrics
from .connection import Connection
from .errors import SettingError, UndecodableGroupError, WireError
from .malformed import record_problem, reject_entry
from .manifest import RunSettings
from .outages import RETRYABLE, Backoff, patiently, retried
from .payloads import fetch_payloads
from .problems import first_problem
from .run import open_run
from .streams import Consumer, Entry
from .wire import REFERENCE, Payload, Reference

logger = logging.getLogger(__name__)

LEASE_S: Final = 15.0

#: A reward, None (unscorable), or named components which are summed up.
Score = float | None | Mapping[str, float]
#: Scores a micro-batch: references (identity, lengths, rewards so far) and payloads (header, columns).
ScoreFunction = Callable[[Sequence[Reference], Sequence[Payload]], Sequence[Score]]


class Scorer:
    """Runs a score function over the trajectories that wait for it.

    `name` must be among the run's `scorers`. columns: which ones the function reads (None = all). The reward of a
    trajectory is the sum of what its scorers give; a None from any of them makes it unscorable.
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
        settings: RunSettings | None = None,
    ) -> None:
        connection = Connection(connection) if isinstance(connection, str) else connection
        connection.wait_until_ready()
        self._run = patiently(lambda: open_run(connection, run, settings), f"scorer {name}")
        scorers = self._run.manifest.scorers
        if name not in scorers:
            raise SettingError(
                f"scorer {name!r} is not one of run {run} ({', '.join(scorers) or 'none'}): "
                f"create the run with RunSettings(scorers=[{name!r}])"
            )
        self._name = name
        self._columns = columns
        self._lease_s = lease_s
        self._batch_size = batch_size

    def run(self, score: ScoreFunction, stop: threading.Event) -> None:
        """Score until `stop` is set. An error of the function ends it; what it had taken comes again."""
        consumer = Consumer(
            self._run, self._name, lambda keys: keys.scoring(self._name), lease_s=self._lease_s, stop=stop
        )
        backoff = Backoff(sleep=stop.wait)
        while not stop.is_set():
            entries = consumer.read(self._batch_size)
            if not entries:
                continue
            try:
                self._hand_off(entries, score)
                consumer.done(entries)
            except RETRYABLE as error:
                retried(self._name, error, backoff)
                consumer.recover()
                backoff.wait()
            else:
                backoff.reset()
        consumer.give_back()

    def _hand_off(self, entries: Sequence[Entry], score: ScoreFunction) -> None:
        entries, references = self._records(entries)
        if not entries:
            return
        found = self._fetch(references)
        asked = [reference for reference, payload in zip(references, found, strict=True) if payload]
        with metrics.timed(self._name, "score"):
            given = score(asked, [payload for payload in found if payload]) if asked else []
        if len(given) != len(asked):
            raise SettingError(f"scorer {self._name} gave {len(given)} scores for {len(asked)} trajectories")
        answers = iter(given)
        scores = [next(answers) if payload else None for payload in found]
        keys = self._run.keys.shard(entries[0].shard)
        order = self._run.manifest.scorers
        position = order.index(self._name) + 1
        last = position == len(order)
        target = keys.rollouts if last else keys.scoring(order[position])
        args: list[Any] = [self._name, "1" if last else "0"]
        for entry, reference, answer in zip(entries, references, scores, strict=True):
            args += [entry.id, *_scored(entry, reference, self._name, answer)]
        names = [keys.void, keys.scoring(self._name), target, keys.ledger, *map(keys.scoring, order)]
        passed = self._run.call("scored", names, args)
        metrics.entries(self._name, "acked", passed)
        metrics.entries(self._name, "duplicate", len(entries) - passed)

    def _records(self, entries: Sequence[Entry]) -> tuple[list[Entry], list[Reference]]:
        """Entries that are records, with their references; others are removed."""
        kept, references = [], []
        for entry in entries:
            problem = record_problem(self._run, entry.shard, entry.fields)
            if problem is None:
                try:
                    references.append(REFERENCE.validate_json(entry.fields["reference"]))
                    kept.append(entry)
                    continue
                except ValidationError as error:
                    problem = f"reference: {first_problem(error)}"
            stream = self._run.keys.shard(entry.shard).scoring(self._name)
            reject_entry(self._run, entry, stream, problem, self._name)
        return kept, references

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
                logger.warning("scorer %s: left out: %s", self._name, error)
                found.append(None)
        return found


def _scored(entry: Entry, reference: Reference, name: str, given: Score) -> list[Any]:
    """The entry's fields with the score filled in."""
    kind, reward = entry.fields["kind"].decode(), reference.reward
    if given is None:
        kind, reward = "unscorable", None
    elif kind == "usable":
        components = dict(given) if isinstance(given, Mapping) else {name: float(given)}
        for component, value in components.items():
            if not math.isfinite(value):
                raise WireError(
                    f"scorer {name} gave {component} {value} for {reference.group_id}/{reference.rollout_index}: "
                    f"give a finite number, or None for unscorable"
                )
        reward = (reward or 0.0) + sum(components.values())
        reference = replace(reference, reward=reward, rewards={**reference.rewards, **components})
    fields = entry.fields
    filled = ["" if reward is None else repr(reward), fields["bytes"], fields["key"], fields["role"]]
    return [
        fields["group_id"],
        fields["index"],
        kind,
        *filled,
        REFERENCE.dump_json(reference, exclude_defaults=True),
    ]
