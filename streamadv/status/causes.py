"""Why nothing moves in a run, by the reasons of `store/reasons.py`; and which ended groups are lost for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from ..messages import counted, seconds_text
from ..metrics import KEPT
from ..run import Run
from ..run.heartbeats import HEARD_S, PRODUCER_TIMEOUT_S
from ..run.run import by_reason
from ..store.reasons import REASONS, Reason, pasteable
from .model import Ledger, Status

#: Outcomes of lost groups, by the reason of a wait for other groups.
LOST: Final = {
    "filtered": ("zero_variance", "difficulty", "no_train_members"),
    "ended_short": ("incomplete", "expired", "cancelled"),
    "stale": ("stale",),
    "rolled_back": ("rolled_back",),
    "dead": ("dead", "malformed"),
}
#: What happens to a group after it was counted as kept.
AFTERWARDS: Final = ("stale", "rolled_back", "dead")

#: An entry older than this, with a consumer alive, shows that the stage is too slow.
STUCK_S: Final = 30.0
#: While more than this share of the groups is kept, losses do not explain why a trainer waits.
KEPT_SHARE: Final = 0.05
#: Share of max_bytes that uncommitted batches may hold, and batches without any commit, before that is told.
UNCOMMITTED_SHARE: Final = 0.5
UNCOMMITTED_BATCHES: Final = 50
#: Reasons for which producers begin no groups.
BRAKES: Final = ("max_bytes", "pacing", "archive")
#: Shards, and producers, named in one line.
MAX_SHARDS_LISTED: Final = 8
MAX_PRODUCERS_LISTED: Final = 3


def reasons_of(status: Status) -> list[Reason]:
    """Why nothing moves; [] while everything does."""
    asked = (cause for cause, only_starving in CAUSES.items() if status.starves or not only_starving)
    return [reason for cause in asked for reason in cause(status)]


@dataclass(frozen=True, slots=True)
class Losses:
    """Of the groups that ended in some time: how many came in, and how many of these are lost, by reason."""

    produced: int
    by_reason: dict[str, int]

    @classmethod
    def of(cls, outcomes: Mapping[str, int]) -> Self:
        """outcomes: counts of how groups ended in that time.

        A group that came in earlier and was lost in that time does not count: only new groups tell what will come.
        """
        kept = sum(outcomes.get(name, 0) for name in KEPT)
        lost = {reason: sum(outcomes.get(name, 0) for name in names) for reason, names in LOST.items()}
        produced = kept + lost["filtered"] + lost["ended_short"] + outcomes.get("malformed", 0)
        for reason in AFTERWARDS:
            lost[reason] = min(lost[reason], kept)
            kept -= lost[reason]
        return cls(produced, {reason: count for reason, count in lost.items() if count > 0})

    @property
    def total(self) -> int:
        return sum(self.by_reason.values())


def why_nothing_was_kept(run: Run) -> str | None:
    """What became of the trajectories of a run that has ended, and what to do about it; None if no group was lost."""
    counters = run.counters()
    reasons = Losses.of(by_reason(counters, "outcome")).by_reason
    ledger = Ledger.of(counters)
    evaluated = ledger.dropped.pop("eval", 0)
    parts = [
        f"{sum(counts.values())} of {ledger.pushed - evaluated} trajectories {what}: {counts_as_text(counts)}"
        for what, counts in (("were dropped", ledger.dropped), ("became dead letters", ledger.dead))
        if counts
    ]
    parts += [pasteable(REASONS[reason].remedy, run.name) for reason in reasons]
    return "; ".join(parts) if reasons else None


def counts_as_text(outcomes: Mapping[str, int]) -> str:
    """`name count` of each outcome, without those at 0: "stale 2, zero_variance 5"."""
    return ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()) if count > 0)


def uncommitted_reason(
    ledger: Ledger, live_bytes: int, max_bytes: int | None, named: int, trained: int, committed: int
) -> Reason | None:
    """What is wrong with a training loop that does not commit, long before nothing can be admitted.

    named: batches not committed, of which so many are trained. committed: version.
    """
    text, in_batches = "", live_bytes * ledger.in_flight // max(1, ledger.in_flight + ledger.queued)
    held = in_batches * trained // max(1, named)
    if max_bytes and trained and held > max_bytes * UNCOMMITTED_SHARE:
        batches = counted(trained, "batch is", "batches are")
        text = f"{batches} trained and not committed, and hold some {held} bytes of max_bytes {max_bytes}"
    elif not committed and trained >= UNCOMMITTED_BATCHES:
        text = f"{trained} batches are trained and none is committed, so a crash loses all"
    return Reason("uncommitted", text) if text else None


def unsaved(status: Status) -> Reason | None:
    """`uncommitted_reason` of a run, unless that is why nothing moves: `reasons_of` has it then."""
    if status.is_quiet and budget_reason(status) is not None:
        return None
    trainer = status.trainer
    return uncommitted_reason(
        status.ledger,
        status.bytes.live,
        status.admission.max_bytes,
        trainer.batches,
        trainer.uncommitted,
        trainer.committed,
    )


def ordinary_wait(status: Status) -> Reason:
    """What a trainer waits for while everything moves."""
    if status.trainer.untrained > 0:
        work = status.streams["work"]
        return Reason(
            "computing",
            f"{counted(status.trainer.untrained, 'batch is', 'batches are')} named, {work.length} of their work items "
            f"are left, {counted(work.alive, 'advantage worker is', 'advantage workers are')} alive",
        )
    in_play = sum(each.in_play for each in status.prompts)
    is_left = any(each.left + each.waiting for each in status.prompts)
    if in_play and not is_left and not status.groups.open:
        return Reason(
            "prompts_begun", f"{counted(in_play, 'prompt is', 'prompts are')} in play, none is left to begin"
        )
    moved = "never" if status.quiet_s is None else f"{status.quiet_s:.0f} s ago"
    waiting = counted(status.groups_waiting, "group waits", "groups wait")
    opened = counted(status.groups.open, "is", "are")
    return Reason(
        "groups_coming",
        f"{waiting} for a batch, {opened} open and {'lacks' if status.groups.open == 1 else 'lack'} "
        f"{counted(status.groups.lack.rollouts, 'rollout')}, something moved {moved}{_missing(status)}",
    )


def budget_reason(status: Status) -> Reason | None:
    """Why no batch can be formed though producers would push: nothing but a commit, or nothing at all, frees bytes.

    None as long as anything that was admitted may still end, or a shard admits another group.
    """
    needed = status.admission.batch_groups
    is_moving = status.groups.open or status.garbage or status.places.rollouts or status.places.scoring
    is_full = len(status.admission.full) == status.shards
    has_producer = any(producer.state == "open" for producer in status.producers)
    if is_moving or not is_full or not has_producer or needed is None or not status.starves:
        return None
    used = f"{status.bytes.live} bytes of max_bytes {status.admission.max_bytes}"
    uncommitted = status.trainer.uncommitted
    if uncommitted > 0:
        return Reason(
            "uncommitted",
            f"{uncommitted} trained but uncommitted batches hold {used}, so no group can be admitted",
        )
    return Reason(
        "batch_over_budget",
        f"{status.groups_waiting} groups hold {used}, so no other is admitted, and batch_groups is {needed}",
    )


def _server(status: Status) -> Iterator[Reason]:
    """What keeps the server from taking anything, and streams from taking more entries."""
    server = status.server
    if server.refuses_writes is not None:
        yield Reason("misconf", server.refuses_writes)
    if server.min_slaves_good_slaves == 0:
        yield Reason("noreplicas", "min-replicas-to-write is set and no replica is good")
    if server.maxmemory and (server.used_memory or 0) > server.maxmemory:
        yield Reason("maxmemory", f"{server.used_memory} bytes are used of maxmemory {server.maxmemory}")
    for name, stream in status.streams.items():
        for key in stream.ended[:MAX_SHARDS_LISTED]:
            left = counted(stream.length, "entry is", "entries are")
            yield Reason("stream_end", f"{key} has had the last possible id, {left} left in stream {name}")


def _stages(status: Status) -> Iterator[Reason]:
    for name, stream in status.streams.items():
        if not stream.length:
            continue
        stage, missing = {
            "rollouts": ("a grouper", "no_grouper"),
            "work": ("an advantage worker", "no_advantage_worker"),
        }.get(name, (f"a scorer {name.removeprefix('scoring:')}", "no_scorer"))
        age = "" if stream.oldest_age_s is None else f", the oldest for {stream.oldest_age_s:.0f} s"
        entries = f"{counted(stream.length, 'entry waits', 'entries wait')} for {stage}"
        if not stream.alive:
            dead = len(stream.workers)
            joined = f"{counted(dead, 'has', 'have')} joined, all silent" if dead else "none is there"
            yield Reason(missing, f"{entries} ({joined}){age}")
        elif name == "work" and status.failing_chain:
            yield Reason("failing_chain", f"{entries}{age}: {status.failing_chain}")
        elif status.is_quiet and (stream.oldest_age_s or 0) > STUCK_S:
            yield Reason("backlog", f"{entries} ({stream.alive} alive){age}")


def _losses(status: Status) -> Iterator[Reason]:
    ended = Counter(status.groups.since_batch)
    losses = Losses.of(ended)
    a_batch = max(1, status.admission.batch_groups or 1)
    if losses.total < a_batch or losses.total < (1 - KEPT_SHARE) * losses.produced:
        return
    for reason, count in losses.by_reason.items():
        outcomes = counts_as_text({name: ended[name] for name in LOST[reason]})
        yield Reason(
            reason,
            f"{count} of {losses.produced} groups that ended since the last batch are lost ({outcomes})",
        )


def _trainer(status: Status) -> Iterator[Reason]:
    trainer = status.trainer
    if trainer.is_alive or not (status.groups_waiting or trainer.batches):
        return
    waiting = f"{counted(status.groups_waiting, 'group waits', 'groups wait')} for a batch"
    if trainer.batches:
        waiting += f", {counted(trainer.batches, 'batch is', 'batches are')} named and not committed"
    silent = seconds_text(trainer.silent_s or 0.0)
    what = {"lost": f"the trainer is silent for {silent}, ", "left": f"the trainer has left {silent} ago, "}
    yield Reason("no_trainer", what.get(trainer.state, "") + waiting)


def _brakes(status: Status) -> Iterator[Reason]:
    """What keeps producers from beginning groups, when nothing else moves either."""
    if not status.is_quiet:
        return
    admission, used = status.admission, status.bytes
    all_full = len(admission.full) == status.shards
    if all_full and not used.live + used.reserved:
        text = (
            f"no group fits: a rollout reserves {status.place_bytes} bytes of max_bytes {admission.max_bytes}"
        )
        yield Reason("batch_over_budget", text)
    elif admission.full and (reason := budget_reason(status)):
        yield reason
    elif admission.full:
        where = "" if all_full else f", shard {_listed(admission.full)} is full"
        text = (
            f"{used.live} bytes live and {used.reserved} reserved of max_bytes {admission.max_bytes}{where}"
        )
        yield Reason("max_bytes", text)
    if admission.unarchived:
        yield Reason(
            "archive",
            f"{used.kept} bytes of ended groups are kept, shard {_listed(admission.unarchived)} has more than "
            "keep_bytes allows",
        )
    if admission.paced:
        yield Reason(
            "pacing",
            f"{admission.groups_ahead} groups begun and not trained on, {admission.groups_limit} are allowed, "
            f"shard {_listed(admission.paced)} has its share; {max(0, status.trainer.untrained)} batches are named",
        )


def _scores(status: Status) -> Iterator[Reason]:
    """Before the brakes: groups that wait for scores are what fills the budget."""
    lack = status.groups.lack
    if status.groups.open and status.is_quiet and lack.scores:
        yield Reason(
            "missing_scores",
            f"{lack.groups_without_scores} of {_open_groups(status)} lack the rewards of {lack.scores} rollouts"
            f"{_oldest(status)}",
        )


def _open_groups(status: Status) -> str:
    open_groups, looked_at = status.groups.open, status.groups.lack.groups
    some = f" (of the {looked_at} that are due first)" if looked_at < open_groups else ""
    return f"{open_groups} open groups{some}"


def _oldest(status: Status) -> str:
    oldest_s = status.groups.lack.oldest_s
    return "" if oldest_s is None else f", the oldest is open for {oldest_s:.0f} s"


def _groups(status: Status) -> Iterator[Reason]:
    if not status.groups.open or not status.is_quiet:
        return
    lack = status.groups.lack
    in_streams = status.places.rollouts + status.places.scoring  # pushed, and taken by no process yet
    if lack.rollouts > in_streams:
        which = "" if in_streams else f"{lack.groups_without_rollouts} of "
        waiting = f", {in_streams} others wait for a process" if in_streams else ""
        yield Reason(
            "incomplete_groups",
            f"{which}{_open_groups(status)} lack {lack.rollouts - in_streams} of {lack.places} rollouts"
            f"{waiting}, {_quiet(status)}{_oldest(status)}{_missing(status)}",
        )


def _producers(status: Status) -> Iterator[Reason]:
    states = Counter(producer.state for producer in status.producers)
    open_groups = status.groups.open
    if not states["open"]:
        lack, places = status.groups.lack, status.places
        # Otherwise what the open groups lack is on its way, so that no producer can bring more.
        lacks = lack.rollouts > places.rollouts + places.scoring or lack.scores
        if not states["finished"] or (open_groups and (states["lost"] or lacks)):
            yield Reason(
                "no_producer",
                f"no producer is alive ({states['finished']} finished, {states['lost']} lost), "
                f"{counted(open_groups, 'group is', 'groups are')} open",
            )
        return
    is_braked = status.admission.full or status.admission.paced or status.admission.unarchived
    if status.is_quiet and not open_groups and not is_braked and status.quiet_s is not None:
        yield Reason(
            "producers_idle",
            f"{counted(states['open'], 'producer is', 'producers are')} alive, no group is open, {_quiet(status)}"
            f"{_missing(status)}",
        )


def _prompts(status: Status) -> Iterator[Reason]:
    """The trainer waits although all producers have finished: for prompts of which it cannot end without."""
    left = Counter[str]()
    for each in status.prompts:
        left[each.name] += each.left + each.waiting
    states = {producer.state for producer in status.producers}
    has_finished = "finished" in states and "open" not in states
    is_moving = status.groups.open or status.groups_waiting or status.trainer.state != "waits"
    if left.total() and has_finished and not is_moving:
        names = ", ".join(+left)
        yield Reason("prompts_left", f"of prompts {names} {left.total()} are left, and nobody plays them")


#: The order of asking. True: asked only while a trainer would have to wait for groups.
CAUSES: Final[dict[Callable[[Status], Iterator[Reason]], bool]] = {
    _server: False,
    _stages: False,
    _losses: True,
    _trainer: False,
    _scores: True,
    _brakes: False,
    _groups: True,
    _producers: True,
    _prompts: True,
}


def _quiet(status: Status) -> str:
    quiet_s = status.quiet_s
    return "nothing was ever pushed" if quiet_s is None else f"nothing moved for {quiet_s:.0f} s"


def _missing(status: Status) -> str:
    """The producers that have missed a heartbeat and are not lost yet."""
    silent = [
        producer for producer in status.producers if producer.state == "open" and producer.silent_s > HEARD_S
    ]
    if not silent:
        return ""
    names = ", ".join(f"{each.name} for {each.silent_s:.0f} s" for each in silent[:MAX_PRODUCERS_LISTED])
    others = " and others" if len(silent) > MAX_PRODUCERS_LISTED else ""
    return f", no heartbeat of producer {names}{others} (lost after {PRODUCER_TIMEOUT_S:.0f} s)"


def _listed(shards: list[int]) -> str:
    return ", ".join(map(str, shards[:MAX_SHARDS_LISTED])) + (
        " and others" if len(shards) > MAX_SHARDS_LISTED else ""
    )
