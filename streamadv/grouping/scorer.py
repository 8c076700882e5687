"""Scorers: user functions that bring rewards after the push, before grouping.

A packet pushed without rewards visits the run's scorers in the order of the manifest (`scoring_streams.py`), then the
grouper. It goes on whole, once all its members are scored. Each scorer is a stage of its own: start any number of
processes for it.

A function may raise for a trajectory, return no valid score, not return, or end its process (`scores.py`). Then each
suspect trajectory is tried alone (`tries.py`): side by side if the function is a coroutine function and no process
has ended. After its last try a trajectory is unscorable.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from .. import clock, metrics, tracing
from ..errors import SettingError, WireError
from ..messages import brief, log_fields
from ..run import open_run
from ..run.consumer import Consumer, Entry
from ..run.hangs import Stopped
from ..run.manifest import RunSettings
from ..run.payloads import FetchedPacket, fetch_columns
from ..settings import run_name
from ..store.connection import Connection
from ..store.retry import RETRYABLE, Outage, patiently
from ..trajectory.payload import payloads_of
from ..trajectory.reference import references_of
from .given_up import GivenUp
from .scores import Score, ScoreError, ScoreFunction, ask, check_function, is_coroutine, rewards_of
from .scoring_streams import (
    HandOff,
    WaitingMember,
    WaitingPacket,
    are_open,
    packets_of,
    pass_on,
    unchanged,
)
from .tries import Tries
from .unscored import UnscoredTrajectory

__all__ = ["Score", "ScoreFunction", "Scorer"]

logger = logging.getLogger(__name__)

LEASE_S: Final = 15.0
TIMEOUT_S: Final = 120.0
TRIES: Final = 3
#: Before the next try at a trajectory alone: twice as long each time, half of it by chance.
FIRST_DELAY_S: Final = 1.0


class Suspect(NamedTuple):
    """A trajectory that is tried alone when it is `due` by `clock.now`."""

    due: float
    item: WaitingMember
    tries: int = 0
    """At it alone, so far."""


class Call(NamedTuple):
    """A call of the function."""

    items: Sequence[WaitingMember]
    tries: int = 0
    """At a trajectory alone, with this one; 0 = of a micro-batch."""


class Scorer:
    """Runs a score function over the trajectories that wait for it.

    The function gets a list of `UnscoredTrajectory` and returns a score for each: a finite number, None (unscorable),
    named components, or an exception, after which that trajectory is tried again alone. The reward of a trajectory is
    the sum of what its scorers give; a None from any of them makes it unscorable.

    run: None = STREAMADV_RUN, else `default`. `name` must be among the run's `scorers`. columns: which ones the
    function reads (None = all). timeout_s: for one call of the function. tries: at a trajectory alone, before it is
    unscorable.
    """

    def __init__(
        self,
        connection: str | Connection,
        run: str | None,
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
            if type(value) is not int or value < 1:
                raise SettingError(f"{setting} is {brief(value)}, needs a whole number, 1 or more")
        for setting, seconds in (("timeout_s", timeout_s), ("lease_s", lease_s)):
            if not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX:
                raise SettingError(f"{setting} is {brief(seconds)}, needs seconds above 0")
        if isinstance(columns, str):
            raise SettingError(f"columns is {brief(columns)}, needs a list of names: [{brief(columns)}]")
        run = run_name(run)
        connection = Connection.of(connection)
        connection.wait_until_ready()
        self._run = patiently(lambda: open_run(connection, run, settings), f"scorer {name}", run)
        order = self._run.manifest.scorers
        if name not in order:
            raise SettingError(
                f"scorer {name!r} is not one of run {run} ({', '.join(order) or 'none'}): "
                "give one of these as its name, or name it when the run is created (scorers)"
            )
        self._name = name
        self._next = next(iter(order[order.index(name) + 1 :]), None)
        self._columns = columns
        self._lease_s = lease_s
        self._batch_size = batch_size
        self._read_count = batch_size  # packets of one read
        self._timeout_s = timeout_s
        self._max_tries = tries
        self._tries = Tries(name)
        self._given_up = GivenUp(run, name)

    def run(self, score: ScoreFunction, stop: threading.Event) -> None:
        """Score until `stop` is set. `score` may be a coroutine function. What it fails on becomes unscorable.

        Raises SettingError for a function that cannot be called with a list of trajectories.
        """
        check_function(score, self._name)
        consumer = Consumer(
            self._run, self._name, lambda keys: keys.scoring(self._name), lease_s=self._lease_s, stop=stop
        )
        suspects: list[Suspect] = []
        outage = Outage(self._name, self._run.name, sleep=stop.wait)
        with consumer.leases_kept(), suppress(Stopped):
            while not stop.is_set():
                self._given_up.log()
                try:
                    suspects = self._turn(consumer, score, suspects)
                except RETRYABLE as error:
                    consumer.start_over()
                    suspects = []  # read again with everything pending
                    outage.pause_after(error)
                else:
                    outage.over()
        self._given_up.log(now=True)
        consumer.give_back()

    def _turn(self, consumer: Consumer, score: ScoreFunction, suspects: Sequence[Suspect]) -> list[Suspect]:
        """Try the suspects that are due, and score new packets. Returns the suspects there are afterwards."""
        now, in_order = clock.now(), sorted(suspects, key=lambda suspect: suspect.due)
        count = min(self._batch_size, sum(suspect.due <= now for suspect in suspects))
        due, later = in_order[:count], in_order[count:]
        entries: list[Entry] = []
        if len(later) < self._batch_size:
            entries = consumer.read(self._read_count, wait=not due)
        elif not due:  # a function that fails on everything is given it slowly
            consumer.stop.wait(later[0].due - now)
        due = [suspect for suspect in due if self._is_open(consumer, suspect.item.packet)]
        if entries and entries[0].reclaimed:
            later += self.work(consumer, [], score, due)
            return later + self._work_alone(consumer, entries, score)
        return later + self.work(consumer, entries, score, due)

    def work(
        self,
        consumer: Consumer,
        entries: Sequence[Entry],
        score: ScoreFunction,
        suspects: Sequence[Suspect] = (),
    ) -> list[Suspect]:
        """Score packets of one shard, try each of `suspects`, and hand packets off. Returns members without a score.

        A coroutine function is called for the suspects and a micro-batch side by side.
        """
        items = self._unscored(consumer, entries)
        starts = range(0, len(items), self._batch_size)
        batches = [Call(items[start : start + self._batch_size]) for start in starts]
        singles = [Call([suspect.item], suspect.tries + 1) for suspect in suspects]
        side_by_side = [[*batches[:1], *singles], *([batch] for batch in batches[1:])]
        if not is_coroutine(score):
            side_by_side = [[call] for call in batches + singles]
        left: list[Suspect] = []
        for calls in side_by_side:
            if calls and not consumer.stop.is_set():
                left += self._make(consumer, calls, score)
        return left

    def _work_alone(
        self, consumer: Consumer, entries: Sequence[Entry], score: ScoreFunction
    ) -> list[Suspect]:
        """Score packets with which another process may have ended: member by member, each try counted before."""
        shard, left = self._run.shard(entries[0].shard), list[Suspect]()
        for item in self._tries.fewest_first(shard, self._unscored(consumer, entries)):
            if consumer.stop.is_set():
                break
            tries = self._tries.count(shard, item)
            if tries > self._max_tries:
                self._give_up(item, ScoreError("crash", "the process ended each time"))
                self._pass_on(consumer, [item.packet])
                continue
            try:
                left += self._make(consumer, [Call([item], tries)], score)
            except Stopped:
                self._tries.forget(shard, item)
                raise
        return left

    def _unscored(self, consumer: Consumer, entries: Sequence[Entry]) -> list[WaitingMember]:
        """The trajectories to be scored. All other packets are handed off, or removed as malformed."""
        if not entries:
            return []
        shard = self._run.shard(entries[0].shard)
        packets = packets_of(self._run, shard, self._name, entries)
        genuine = {packet.entry.id for packet in packets}
        consumer.done([entry for entry in entries if entry.id not in genuine])
        states = are_open(shard, [packet.group_id for packet in packets])
        waiting = [packet for packet, is_open in zip(packets, states, strict=True) if is_open]
        # A score no longer counts: the group has ended.
        ended = [packet for packet, is_open in zip(packets, states, strict=True) if not is_open]
        self._hand_off(consumer, [(packet, unchanged(packet.entry)) for packet in ended])
        stored = [packet.stored for packet in waiting]
        fetched = list(fetch_columns(self._run, stored, self._columns, header=True))
        items = [
            item for pair in zip(waiting, fetched, strict=True) for item in self._members_of(consumer, *pair)
        ]
        # Other processes score too: as many packets the next time as have the members of one micro-batch.
        self._read_count = max(1, self._batch_size * len(entries) // max(len(items), len(entries)))
        return items

    def _members_of(
        self, consumer: Consumer, packet: WaitingPacket, fetched: FetchedPacket
    ) -> list[WaitingMember]:
        """The usable members of a packet; all are unscorable if it cannot be read or is gone.

        It is gone when this process was held up beyond its lease and the group has ended meanwhile. Then somebody
        else has handed the entry off, and the hand-off of this process changes nothing.
        """
        positions = packet.usable
        try:
            if fetched.problem is not None:
                raise WireError(fetched.problem)
            payloads = payloads_of(packet.stored, fetched.columns, fetched.header)
            sources = [payloads[position].header.data_source for position in positions]
        except WireError as error:
            name = f"{packet.group_id}/{packet.lines[positions[0]].rollout_index}" if positions else ""
            self._given_up.note(name, packet.group_id, "undecodable", str(error), len(positions))
            for position in positions:
                packet.verdicts[position] = None
        if packet.is_scored:
            self._pass_on(consumer, [packet])
            return []
        owners = [(packet.group_id, source) for source in sources]
        references = references_of(packet.stored.members.select(positions), owners)
        return [
            WaitingMember(packet, position, UnscoredTrajectory(reference, payloads[position]))
            for position, reference in zip(positions, references, strict=True)
        ]

    def _is_open(self, consumer: Consumer, packet: WaitingPacket) -> bool:
        """Whether a score of the packet still counts. If not it is handed off as it came."""
        if packet.is_handed_on:
            return False
        (is_open,) = are_open(self._run.shard(packet.entry.shard), [packet.group_id])
        if not is_open:
            self._hand_off(consumer, [(packet, unchanged(packet.entry))])
        return is_open

    def _make(self, consumer: Consumer, calls: Sequence[Call], score: ScoreFunction) -> list[Suspect]:
        """Make calls, several only of a coroutine function. Returns members that are to be tried alone, or again."""
        batches = [[item.trajectory for item in call.items] for call in calls]
        with metrics.timed(self._name, "score"):
            answers = ask(score, batches, f"scorer {self._name}", self._timeout_s, consumer.stop)
        left: list[Suspect] = []
        for call, answer in zip(calls, answers, strict=True):
            left += self._settle(call, answer)
        self._pass_on(consumer, dict.fromkeys(item.packet for call in calls for item in call.items))
        return left

    def _settle(self, call: Call, answer: list[Any] | ScoreError) -> list[Suspect]:
        """Note the verdicts of a call. A member without one is unscorable after its last try, else it is returned."""
        if isinstance(answer, ScoreError) and not call.tries:
            text = "scorer %s failed on %d trajectories: %s"
            fields = log_fields("score_failed", run=self._run.name, role=self._name)
            logger.warning(text, self._name, len(call.items), answer, extra=fields)
        left: list[Suspect] = []
        for number, item in enumerate(call.items):
            try:
                if isinstance(answer, ScoreError):
                    raise answer
                item.packet.verdicts[item.position] = rewards_of(answer[number], self._name, item.trajectory)
            except ScoreError as error:
                if call.tries >= self._max_tries:
                    self._give_up(item, error)
                    continue
                pause = FIRST_DELAY_S * 2 ** (call.tries - 1) * random.uniform(0.5, 1) if call.tries else 0.0
                left.append(Suspect(clock.now() + pause, item, call.tries))
            else:
                self._tries.forget(self._run.shard(item.packet.entry.shard), item)
        return left

    def _give_up(self, item: WaitingMember, error: ScoreError) -> None:
        self._given_up.note(item.trajectory.name, item.packet.group_id, error.kind, str(error))
        item.packet.verdicts[item.position] = None
        item.packet.given_up.append(item)  # its tries still count if another member ends this process

    def _pass_on(self, consumer: Consumer, packets: Iterable[WaitingPacket]) -> None:
        """Hand those packets on all of whose members have their verdicts."""
        filter_by, by_shard = self._run.manifest.filter_by, defaultdict[int, list[Any]](list)
        for packet in packets:
            if packet.is_scored:
                by_shard[packet.entry.shard].append((packet, packet.hand_off(self._next, filter_by)))
        for pairs in by_shard.values():
            self._hand_off(consumer, pairs)

    def _hand_off(self, consumer: Consumer, packets: Sequence[tuple[WaitingPacket, HandOff]]) -> None:
        """Pass packets of one shard on."""
        if not packets:
            return
        shard = self._run.shard(packets[0][0].entry.shard)
        passed = pass_on(shard, self._name, [hand_off for _, hand_off in packets])
        metrics.entries(self._name, "acked", passed)
        metrics.entries(self._name, "duplicate", len(packets) - passed)
        consumer.done([packet.entry for packet, _ in packets])
        for packet, _ in packets:
            packet.is_handed_on = True
            tracing.record(tracing.SCORE, self._run.name, tracing.traces_of([packet]), packet.since)
            for item in packet.given_up:
                self._tries.forget(shard, item)
