"""How processes wait: a `Wait` paces one loop of attempts, reports the reason, and says when to give up.

`Blocked` reports the reason, in the log and as a metric. Each `Wait` has one; loops that wait for the same thing may
share one. Producers, workers, the trainer, commands, `streamadv status` and the watchdog name a wait by the one list of
REASONS. `status/causes.py` finds some of them in what a run stores. The waiting process itself meets the others: a
server that does not answer, a refused push.
"""

from __future__ import annotations

import logging
import math
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .. import clock, doors, metrics
from ..forks import renewed_at_fork
from ..messages import log_fields

logger = logging.getLogger(__name__)

#: Seconds after which a wait is reported, and between two reports. An attempt takes up to 5 s: so within 30 s.
REPORT_S: Final = 25.0
#: Seconds before a wait counts in the metric: shorter waits are part of a pipeline that runs.
BLOCKED_S: Final = 1.0
#: Seconds without an attempt after which a wait was given up. An attempt at a server that hangs takes 20 s.
ATTEMPT_S: Final = 30.0

_live: weakref.WeakSet[Blocked] = weakref.WeakSet()
_lock = renewed_at_fork(threading.Lock())


class Blocked:
    """Says why somebody waits, from the first `because` until `over`: after `first_s` seconds, then every REPORT_S.

    who, what: the subject and the state in the log, e.g. "trainer" and "no batch". run: of whoever waits; None for one
    that knows a server only. Any thread may call.
    """

    def __init__(self, who: str, what: str, run: str | None, first_s: float = REPORT_S) -> None:
        self._subject = (run, who, what)
        self._line = f"{who}: {what}" if run is None else f"run {run}: {who}: {what}"
        self._first_s = first_s
        self._names: frozenset[str] = frozenset()
        self._since = self._report_due = math.inf
        self._reported = self._last = -math.inf

    def because(self, *reasons: Reason) -> None:
        """Call before each attempt, with the reasons that hold now."""
        now = clock.now()
        with _lock:
            if now >= self._last + ATTEMPT_S:  # a new wait, or the one before was given up
                # One who waits again and again says so as seldom as one who waits for long.
                self._since, self._report_due = now, max(now + self._first_s, self._reported + REPORT_S)
            _live.add(self)
            self._last, self._names = now, frozenset(reason.name for reason in reasons)
            if now < self._report_due:
                return
            self._report_due = now + REPORT_S
            same = [other for other in _live if other._subject == self._subject and other is not self]
            if any(other._reported > now - REPORT_S for other in same):
                return  # another thread or task of this process waits for the same
            self._reported = now
        waited = f" for {self.seconds:.0f} s" if self.seconds >= 1 else ""
        run, who, _ = self._subject
        fields = log_fields("waiting", run=run, role=who, reason=", ".join(sorted(self._names)))
        logger.warning("%s%s: %s", self._line, waited, listed(reasons, run), extra=fields)

    def over(self) -> None:
        """The wait has ended, which is told if the wait was: the next `because` begins another one."""
        with _lock:
            _live.discard(self)
            since, self._since, self._last = self._since, math.inf, -math.inf
            if self._reported < since:
                return
        run, who, _ = self._subject
        fields = log_fields("waited", run=run, role=who)
        logger.info("%s: goes on after %.0f s", self._line, clock.now() - since, extra=fields)

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last `because` of this wait; 0 when it is over."""
        return max(0.0, self._last - self._since)


class Wait:
    """One loop of attempts: pauses between them, and is `expired` after `timeout` seconds (None = never).

    The n-th pause is uniform in [0, min(cap, base * 2**n)] seconds (full jitter), and ends with the timeout at the
    latest. blocked: says why. sleep: takes seconds; give `Event.wait` to end a pause early.
    """

    def __init__(
        self,
        blocked: Blocked,
        *,
        timeout: float | None = None,
        base: float = 0.05,
        cap: float = 2.0,
        sleep: Callable[[float], object] = doors.sleep,
    ) -> None:
        self.timeout = timeout
        self._blocked = blocked
        self._base, self._cap, self._sleep = base, cap, sleep
        self._attempts = 0
        self.progress()

    def because(self, *reasons: Reason) -> None:
        """Call after a failed attempt, with the reasons that hold now."""
        self._blocked.because(*reasons)

    def delay(self) -> float:
        """Count one more failed attempt. Returns the seconds to the next one, for those who sleep themselves."""
        limit = min(self._cap, self._base * 2.0 ** min(self._attempts, 64))
        self._attempts += 1
        return min(limit * random.random(), max(0.0, self._end - clock.now()))

    def pause(self) -> None:
        """Sleep until the next attempt is due."""
        self._sleep(self.delay())

    def progress(self) -> None:
        """Something came, though not what is waited for: the timeout begins anew."""
        self._end = math.inf if self.timeout is None else clock.now() + self.timeout

    def over(self) -> None:
        """An attempt succeeded: pauses, and the wait itself, begin anew with the next failure."""
        self._attempts = 0
        self._blocked.over()

    @property
    def expired(self) -> bool:
        """Whether it is time to give up."""
        return clock.now() >= self._end


def _blockers() -> Iterator[tuple[str, str]]:
    """Who is blocked in this process now, for longer than a moment, and for which reason."""
    with _lock:
        waits = list(_live)
    for blocked in waits:
        shown_from = blocked._since + min(blocked._first_s, BLOCKED_S)
        if shown_from <= clock.now() < blocked._last + ATTEMPT_S:
            for name in blocked._names:
                yield blocked._subject[1], name


metrics.blocked_as(_blockers)


class Kind(NamedTuple):
    """One entry of the list, as docs/reference/reasons.md shows it."""

    meaning: str
    remedy: str


REASONS: Final[dict[str, Kind]] = {
    # What a run lacks.
    "no_producer": Kind(
        "no producer has joined the run, or none is alive", "start one, with the same URL and run"
    ),
    "producers_idle": Kind(
        "producers are alive and neither begin groups nor push", "look at what the rollout processes wait for"
    ),
    "incomplete_groups": Kind(
        "open groups lack rollouts and nothing is pushed",
        "push what is missing, or fail() or cancel() what will not come; else they end at group_deadline_s",
    ),
    "missing_scores": Kind(
        "open groups lack rewards",
        "push with a reward, bring it by producer.score(), or give the run scorers; null = unscorable",
    ),
    "no_grouper": Kind("no grouper asks for pushed packets", "start `streamadv worker grouper`"),
    "no_scorer": Kind("no process of a scorer asks for its packets", "start the scorer of that name"),
    "no_advantage_worker": Kind(
        "no advantage worker asks for the work of named batches", "start `streamadv worker advantage`"
    ),
    "unknown_estimator": Kind(
        "an advantage worker was given a batch whose chain it does not know, and leaves it to others",
        "start it with --import MODULE, or install the package that brings the estimator",
    ),
    "failing_chain": Kind(
        "the chain fails on every group of a batch, so the fault is not in the data; advantage workers try again",
        "start the trainer with another chain, which takes over what was not delivered, or correct the estimator and "
        "restart its workers",
    ),
    "backlog": Kind(
        "a stage is at work, and slower than what comes", "start more of its processes, or look at their logs"
    ),
    "no_trainer": Kind(
        "no trainer has taken the run (pacing is by bytes alone then), or the one that had it is silent or has left",
        "start the trainer",
    ),
    "no_weights": Kind(
        "no trainer has said where the weights of a version lie",
        "start the trainer, which says so by queue.open(weights=URI) or queue.trained(batch, weights=URI)",
    ),
    "unmarked": Kind(
        "a trainer that marks batches itself has not marked those it has got",
        "call queue.trained(batch) after each update, or raise prefetch to read further ahead",
    ),
    "other_rank": Kind(
        "another rank of the job has not done its part yet", "look at that rank; all need the same job id"
    ),
    # What happens to all that comes.
    "filtered": Kind(
        "every group is filtered away", "the tasks are too easy or too hard, or turn the filter off"
    ),
    "stale": Kind(
        "every group is too old for the batch it could be in",
        "raise drop_after or max_staleness, or push the model_version that a rollout was played with",
    ),
    "rolled_back": Kind(
        "every group is of versions behind the checkpoint that was loaded",
        "restart the rollouts, or load with keep_rolled_back=True",
    ),
    "dead": Kind(
        "every group becomes a dead letter", "see `streamadv dead list` for what is wrong with them"
    ),
    "ended_short": Kind(
        "every group ends without enough usable rollouts (expired, failed or cancelled)",
        "raise group_deadline_s, look at why rollouts fail, or set partial_min_usable",
    ),
    # Admission.
    "pacing": Kind(
        "producers are as far ahead as max_staleness allows",
        "wait for the trainer, or raise max_staleness; `streamadv status` says whether a trainer is alive",
    ),
    "max_bytes": Kind(
        "live and reserved bytes fill max_bytes",
        "wait for commits, or raise max_bytes",
    ),
    "batch_over_budget": Kind(
        "max_bytes holds fewer groups than a batch needs",
        "raise max_bytes, lower batch_groups, or set min_groups",
    ),
    "uncommitted": Kind(
        "batches are trained on and not committed: many since the run began, or so many that they fill max_bytes",
        "save a checkpoint every few batches, `with queue.checkpoint(folder) as path: ...`, or raise max_bytes",
    ),
    "archive": Kind(
        "groups that the archive has not got yet fill keep_bytes, in a run with the setting archive",
        "start `streamadv archive --to FOLDER`, look at why it is slow, or raise keep_bytes",
    ),
    "lost_groups_first": Kind(
        "a server came back without groups, which are admitted before new ones", "wait, or raise max_bytes"
    ),
    "unannounced": Kind(
        "the server does not let producers read what the trainer announces, so they ask for admission every 2 s",
        "give them the rights that `streamadv config acl` prints",
    ),
    "prompts_begun": Kind(
        "all prompts are begun, and some have not ended: a trained one ends when a checkpoint with it is saved",
        "wait for the trainer; after its loop it has to save one more, `with queue.checkpoint(folder) as path: ...`",
    ),
    "prompts_left": Kind(
        "prompts are left, and the producers that loop over them wait for others, were left in the middle, or had "
        "finished before an older checkpoint brought prompts back",
        "start a producer if none is there; else go on with the loop or close its iterator, and give each loop a "
        "thread or task of its own",
    ),
    # The server.
    "server_away": Kind("nothing answers at the URL", "start the server or correct the URL"),
    "name_resolution": Kind("the host name of the URL is not known", "correct the URL or the name service"),
    "server_hangs": Kind(
        "the server takes the connection and does not reply in time", "look at the server and its machine"
    ),
    "server_loading": Kind("the server reads its data after a start", "wait"),
    "server_busy": Kind("somebody's script keeps the server busy", "wait, or end it: SECURITY.md says how"),
    "failover": Kind("another server takes over, or a slot moves", "wait; look at Sentinels or the cluster"),
    "stream_end": Kind(
        "somebody has given a stream its last possible id, so that it takes no more entries",
        "what is in it is taken; once it is empty (`redis-cli XLEN KEY` says 0) delete it: `redis-cli DEL KEY`",
    ),
    "misconf": Kind(
        "the server refuses writes, since it cannot save its data", "make room on its disk and see its log"
    ),
    "noreplicas": Kind(
        "the server refuses writes, since replicas are missing", "start them, or lower min-replicas-to-write"
    ),
    "maxmemory": Kind(
        "the server is above its maxmemory and refuses pushes", "wait for commits, or raise maxmemory"
    ),
    # The ordinary course of things.
    "groups_coming": Kind("the groups of a batch are being produced", "wait; more producers shorten it"),
    "computing": Kind("the work of a batch is being computed", "wait; more advantage workers shorten it"),
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why somebody waits: one of REASONS, with the figures of this moment."""

    name: str
    text: str

    def remedy(self, run: str | None) -> str:
        """What to do about it, see `pasteable`."""
        return pasteable(REASONS[self.name].remedy, run)

    def line(self, run: str | None) -> str:
        """What blocks and what to do about it. run: None where no run is known yet."""
        return f"{self.text}: {self.remedy(run)} [{self.name}]"


_COMMAND: Final = re.compile(r"`(streamadv [^`]*)`")


def pasteable(text: str, run: str | None) -> str:
    """`text`, with the run's name in each of its commands."""
    return text if run is None else _COMMAND.sub(rf"`\1 --run {run}`", text)


def listed(reasons: Sequence[Reason], run: str | None) -> str:
    """Reasons on one line."""
    return "; ".join(reason.line(run) for reason in reasons)
