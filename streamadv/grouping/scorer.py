"""Scorers: user functions that bring rewards after the push, before grouping.

A packet pushed without rewards visits the run's scorers in the order of the manifest (`scoring_streams.py`), then the
grouper. It goes on whole, once all its members are scored. Each scorer is a stage of its own: start any number of
processes for it.

A function may raise for a trajectory, return no valid score, not return, or end its process (`scores.py`). Then each
suspect trajectory is tried alone (`Tries`): side by side if the function is a coroutine function and no process
has ended. After its last try a trajectory is unscorable. While the function says that its judge is away, trajectories
wait (`away.py`). A function may be asked for whole groups (`WholeGroups`).
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
from ..messages import SummedUp, brief, check_number, log_fields, whole_number
from ..run import open_run
from ..run.consumer import Consumer, Entry
from ..run.hangs import Stopped
from ..run.manifest import RunSettings
from ..run.packets import FetchedPacket, fetch_columns
from ..settings import run_name
from ..store.connection import Connection
from ..store.retry import RETRYABLE, Outage, patiently
from ..trajectory.members import references_of
from ..trajectory.packet import payloads_of
from .away import Away, Tries
from .scores import AWAY, Score, ScoreError, ScoreFunction, ask, check_function, is_coroutine, rewards_of
from .scoring_streams import (
    PAGE,
    UnscoredTrajectory,
    WaitingMember,
    WaitingPacket,
    WholeGroups,
    are_open,
    packets_of,
    pass_on,
)

__all__ = ["Score", "ScoreFunction", "Scorer"]

logger = logging.getLogger(__name__)

LEASE_S: Final = 15.0
TIMEOUT_S: Final = 120.0
TRIES: Final = 3
#: Seconds between two lines about unscorable trajectories of the same reason.
GIVEN_UP_EVERY_S: Final = 10.0
#: Before the next try at a trajectory alone: twice as long each time, half of it by chance.
FIRST_DELAY_S: Final = 1.0


class Call(NamedTuple):
    """A call of the function; one that is made again is a suspect."""

    items: Sequence[WaitingMember]
    tries: int = 0
    """At a trajectory, or a whole group, alone, with this one; 0 = of a micro-batch."""
    waits: int = 0
    """How often the judge was away before."""
    due: float = 0.0
    """When it is made, by `clock.now`."""


class Scorer:
    """Runs a score function over the trajectories that wait for it.

    The function gets a list of `UnscoredTrajectory` and returns a score for each: a finite number, None (unscorable),
    named components, or an exception, after which that trajectory is tried again alone. The reward of a trajectory is
    the sum of what its scorers give; a None from any of them makes it unscorable.

    run: None = STREAMADV_RUN, else `default`. `name` must be among the run's `scorers`. columns: which ones the
    function reads (None = all). timeout_s: for one call of the function. tries: at a trajectory alone, before it is
    unscorable. whole_groups: each call gets the trajectories of one group, all that were pushed without a reward, when
    the last of its rollouts has ended; `batch_size` then bounds the groups that are scored side by side.
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
        whole_groups: bool = False,
        settings: RunSettings | None = None,
    ) -> None:
        batch_size, tries = whole_number("batch_size", batch_size, 1), whole_number("tries", tries, 1)
        for setting, seconds in (("timeout_s", timeout_s), ("lease_s", lease_s)):
            check_number(setting, seconds, "seconds", most=threading.TIMEOUT_MAX)
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
        self._tries = Tries(self._run, name)
        self._given_up = SummedUp(logger, "trajectories_unscorable", GIVEN_UP_EVERY_S)
        self._away = Away(self._run, name)
        self._whole = WholeGroups(self._run, name) if whole_groups else None

    def run(self, score: ScoreFunction, stop: threading.Event) -> None:
        """Score until `stop` is set. `score` may be a coroutine function. What it fails on becomes unscorable.

        Raises SettingError for a function that cannot be called with a list of trajectories.
        """
        check_function(score, self._name)
        consumer = Consumer(
            self._run, self._name, lambda keys: keys.scoring(self._name), lease_s=self._lease_s, stop=stop
        )
        suspects: list[Call] = []
        outage = Outage(self._name, self._run.name, sleep=stop.wait)
        with consumer.leases_kept(), suppress(Stopped):
            while not stop.is_set():
                self._given_up.log()
                try:
                    suspects = self._turn(consumer, score, suspects)
                    if any(call.waits for call in suspects):
                        self._away.keep_groups_open()
                    else:
                        self._away.over()
                except RETRYABLE as error:
                    consumer.start_over()
                    if self._whole is not None:
                        self._whole.clear()
                    suspects = []  # read again with everything pending
                    outage.pause_after(error)
                else:
                    outage.over()
        self._given_up.log(now=True)
        consumer.give_back()

    def _turn(self, consumer: Consumer, score: ScoreFunction, suspects: Sequence[Call]) -> list[Call]:
        """Try the suspects that are due, and score new packets. Returns the suspects there are afterwards."""
        now, in_order = clock.now(), sorted(suspects, key=lambda call: call.due)
        count = min(self._batch_size, sum(call.due <= now for call in suspects))
        due, later = in_order[:count], in_order[count:]
        entries: list[Entry] = []
        if len(later) < self._batch_size:
            entries = consumer.read(self._read_count, wait=not due)
        elif not due:  # a function that fails on everything is given it slowly
            consumer.stop.wait(later[0].due - now)
        due = [call for call in due if self._is_open(consumer, call)]
        return later + self.work(consumer, entries, score, due)

    def work(
        self,
        consumer: Consumer,
        entries: Sequence[Entry],
        score: ScoreFunction,
        suspects: Sequence[Call] = (),
    ) -> list[Call]:
        """Score packets of one shard, make the calls `suspects`, and hand packets off.

        A coroutine function is called for the suspects and a micro-batch side by side. Returns the calls that are to be
        made again.
        """
        calls, alone = self._calls(self._unscored(consumer, entries))
        side_by_side = [[*calls[:1], *suspects], *([call] for call in calls[1:])]
        if self._whole is not None:
            side_by_side = [[*calls, *suspects]]
        if not is_coroutine(score):
            side_by_side = [[call] for call in (*calls, *suspects)]
        left: list[Call] = []
        for together in side_by_side:
            if together and not consumer.stop.is_set():
                left += self._make(consumer, together, score)
        return left + self._work_alone(consumer, alone, score)

    def _calls(self, items: Sequence[WaitingMember]) -> tuple[list[Call], Sequence[Sequence[WaitingMember]]]:
        """The calls for new packets; and what is tried alone, since another process may have ended with it."""
        if self._whole is None:
            fresh = [item for item in items if not item.packet.entry.reclaimed]
            starts = range(0, len(fresh), self._batch_size)
            calls = [Call(fresh[start : start + self._batch_size]) for start in starts]
            return calls, [[item] for item in items if item.packet.entry.reclaimed]
        groups = defaultdict[str, list[WaitingMember]](list)
        for item in sorted(items, key=lambda item: item.trajectory.rollout_index):
            groups[item.packet.group_id].append(item)
        alone = [group for group in groups.values() if any(item.packet.entry.reclaimed for item in group)]
        return [Call(group, 1) for group in groups.values() if group not in alone], alone

    def _work_alone(
        self, consumer: Consumer, units: Sequence[Sequence[WaitingMember]], score: ScoreFunction
    ) -> list[Call]:
        """Score what another process may have ended with: one trajectory or group after the other, each try counted."""
        left = list[Call]()
        for unit in self._tries.fewest_first(units):
            if consumer.stop.is_set():
                break
            tries = self._tries.count(unit[0])
            if tries > self._max_tries:
                for item in unit:
                    self._give_up(item, ScoreError("crash", "the process ended each time"))
                self._pass_on_scored(consumer, unit)
                continue
            try:
                left += self._make(consumer, [Call(unit, tries)], score)
            except Stopped:
                self._tries.forget(unit[0])
                raise
        return left

    def _unscored(self, consumer: Consumer, entries: Sequence[Entry]) -> list[WaitingMember]:
        """The trajectories to be scored, of open groups, or of whole ones.

        All other packets are handed off, removed as malformed, or held back.
        """
        packets = packets_of(self._run, self._name, entries)
        genuine = {packet.entry.id for packet in packets}
        consumer.done([entry for entry in entries if entry.id not in genuine])
        if self._whole is None:
            states = are_open(self._run, [packet.entry for packet in packets])
            waiting = [packet for packet, is_open in zip(packets, states, strict=True) if is_open]
            ended = [packet for packet, is_open in zip(packets, states, strict=True) if not is_open]
        else:
            self._whole.hold(packets)
            waiting, ended, gone = self._whole.take(self._batch_size)
            consumer.done(gone)
        for start in range(0, len(ended), PAGE):  # a score no longer counts
            self._pass_on(consumer, ended[start : start + PAGE])
        stored = [packet.stored for packet in waiting]
        fetched = list(fetch_columns(self._run, stored, self._columns, header=True)) if stored else []
        items = [
            item for pair in zip(waiting, fetched, strict=True) for item in self._members_of(consumer, *pair)
        ]
        if entries and self._whole is None:
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
            self._note_unscorable(name, packet.group_id, "undecodable", str(error), len(positions))
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

    def _is_open(self, consumer: Consumer, call: Call) -> bool:
        """Whether the scores of a call still count. If not its packets are handed off as they came."""
        packets = [item.packet for item in call.items if not item.packet.is_handed_on]
        if not packets:
            return False
        (is_open,) = are_open(self._run, [packets[0].entry])
        if not is_open:
            self._pass_on(consumer, dict.fromkeys(packets))
        return is_open

    def _make(self, consumer: Consumer, calls: Sequence[Call], score: ScoreFunction) -> list[Call]:
        """Make calls, several only of a coroutine function. Returns members that are to be tried alone, or again."""
        batches = [[item.trajectory for item in call.items] for call in calls]
        with metrics.timed(self._name, "score"):
            answers = ask(score, batches, f"scorer {self._name}", self._timeout_s, consumer.stop)
        left: list[Call] = []
        for call, answer in zip(calls, answers, strict=True):
            left += self._settle(call, answer)
        self._pass_on_scored(consumer, [item for call in calls for item in call.items])
        return left

    def _settle(self, call: Call, answer: list[Any] | ScoreError) -> list[Call]:
        """Note the verdicts of a call. What has none is unscorable after its last try, else returned for another."""
        scored, failed = dict[int, Any](), dict[int, ScoreError]()
        for number, item in enumerate(call.items):
            try:
                if isinstance(answer, ScoreError):
                    raise answer
                scored[number] = rewards_of(answer[number], self._name, item.trajectory)
            except ScoreError as error:
                failed[number] = error
        away = next((each for each in failed.values() if each.kind == AWAY), None)
        if isinstance(answer, ScoreError) and not call.tries and away is None:
            text = "scorer %s failed on %d trajectories: %s"
            fields = log_fields("score_failed", run=self._run.name, role=self._name)
            logger.warning(text, self._name, len(call.items), answer, extra=fields)
        if self._whole is not None and failed:
            first = away or next(iter(failed.values()))
            if first.kind == AWAY or call.tries < self._max_tries:
                return [self._later(call, call.items, first)]
        left: list[Call] = []
        for number, item in enumerate(call.items):
            if number in scored:
                item.packet.verdicts[item.position] = scored[number]
                self._tries.forget(item)
            elif failed[number].kind == AWAY or call.tries < self._max_tries:
                left.append(self._later(call, [item], failed[number]))
            else:
                self._give_up(item, failed[number])
        return left

    def _later(self, call: Call, items: Sequence[WaitingMember], error: ScoreError) -> Call:
        """The same call for `items`, after a pause. While the judge is away no try is counted."""
        if error.kind == AWAY:
            self._tries.forget(items[0])
            pause = self._away.pause_s(error, call.waits)
            return Call(items, max(1, call.tries), call.waits + 1, clock.now() + pause)
        pause = FIRST_DELAY_S * 2 ** (call.tries - 1) * random.uniform(0.5, 1) if call.tries else 0.0
        return Call(items, call.tries + 1, due=clock.now() + pause)

    def _give_up(self, item: WaitingMember, error: ScoreError) -> None:
        self._note_unscorable(item.trajectory.name, item.packet.group_id, error.kind, str(error))
        item.packet.verdicts[item.position] = None
        item.packet.given_up.append(item)  # its tries still count if another member ends this process

    def _note_unscorable(self, name: str, group_id: str, reason: str, problem: str, count: int = 1) -> None:
        """So many trajectories of a group, the first of which is `name`, are unscorable."""

        def text(count: int) -> str:
            which = f"trajectory {name} is" if count < 2 else f"{count} trajectories, {name} first, are"
            return f"scorer {self._name}: {which} unscorable ({reason}): {problem}"

        fields: dict[str, Any] = {"run": self._run.name, "role": self._name, "group": group_id}
        logger.debug(
            "scorer %s: trajectory %s is unscorable: %s",
            *(self._name, name, problem),
            extra=log_fields("trajectory_unscorable", reason=reason, **fields),
        )
        self._given_up.note(reason, text, count, **fields)

    def _pass_on_scored(self, consumer: Consumer, items: Iterable[WaitingMember]) -> None:
        """Pass on those packets of `items` all of whose members have their verdicts."""
        packets = dict.fromkeys(item.packet for item in items)
        self._pass_on(consumer, [packet for packet in packets if packet.is_scored])

    def _pass_on(self, consumer: Consumer, packets: Iterable[WaitingPacket]) -> None:
        """Pass packets on: those that are scored, and those of groups that have ended."""
        alike, filter_by = defaultdict[Any, list[WaitingPacket]](list), self._run.manifest.filter_by
        for packet in packets:
            alike[packet.entry.shard, self._next if packet.is_wanted else None].append(packet)
        for (index, target), together in alike.items():
            entries = [packet.scored(filter_by) for packet in together]
            passed = pass_on(self._run.shards[index], self._name, entries, target)
            metrics.entries(self._name, "acked", passed)
            metrics.entries(self._name, "duplicate", len(together) - passed)
            consumer.done([packet.entry for packet in together])
            for packet in together:
                packet.is_handed_on = True
                tracing.record(tracing.SCORE, self._run.name, [packet.group_id], packet.since)
                for item in packet.given_up:
                    self._tries.forget(item)
