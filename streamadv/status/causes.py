"""Why nothing moves in a run: the reasons of `store/reasons.py` that its status shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from ..store.reasons import Reason
from ..units import counted, seconds_text
from .losses import LOST, Losses, counts_as_text
from .model import Status, Stream

#: An entry older than this, with a consumer alive, shows that the stage is too slow.
STUCK_S: Final = 30.0
#: While more than this share of the groups is kept, losses do not explain why a trainer waits.
KEPT_SHARE: Final = 0.05
#: Reasons for which producers begin no groups.
BRAKES: Final = ("max_bytes", "pacing")
#: Shards named in one line.
MAX_SHARDS_LISTED: Final = 8


def reasons_of(status: Status) -> list[Reason]:
    """Why nothing moves; [] while everything does."""
    reasons = [*_server(status), *_stages(status)]
    if not status.starves:
        return [*reasons, *_brakes(status)]
    return [*reasons, *_losses(status), *_brakes(status), *_groups(status), *_producers(status)]


def ordinary_wait(status: Status) -> Reason:
    """What a trainer waits for while everything moves."""
    if status.trainer.untrained > 0:
        work = status.streams["work"]
        return Reason(
            "computing",
            f"{counted(status.trainer.untrained, 'batch is', 'batches are')} named, {work.length} of their work items "
            f"are left, {counted(work.alive, 'advantage worker is', 'advantage workers are')} alive",
        )
    moved = "never" if status.quiet_s is None else f"{status.quiet_s:.0f} s ago"
    waiting = counted(status.groups_waiting, "group waits", "groups wait")
    opened = counted(status.groups.open, "is", "are")
    return Reason(
        "groups_coming",
        f"{waiting} for a batch, {opened} open and {'lacks' if status.groups.open == 1 else 'lack'} "
        f"{counted(status.groups.lack.rollouts, 'rollout')}, something moved {moved}",
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
    server = status.server
    if server.refuses_writes is not None:
        yield Reason("misconf", server.refuses_writes)
    if server.min_slaves_good_slaves == 0:
        yield Reason("noreplicas", "min-replicas-to-write is set and no replica is good")
    if server.maxmemory and (server.used_memory or 0) > server.maxmemory:
        yield Reason("maxmemory", f"{server.used_memory} bytes are used of maxmemory {server.maxmemory}")


def _stages(status: Status) -> Iterator[Reason]:
    for name, stream in status.streams.items():
        failure = status.failing_chain if name == "work" else None
        if stream.length and (reason := _stage(name, stream, status.is_quiet, failure)):
            yield reason


def _stage(name: str, stream: Stream, is_quiet: bool, failure: str | None) -> Reason | None:
    scorer = name.removeprefix("scoring:")
    stage, missing = {
        "rollouts": ("a grouper", "no_grouper"),
        "work": ("an advantage worker", "no_advantage_worker"),
    }.get(name, (f"a scorer {scorer}", "no_scorer"))
    age = "" if stream.oldest_age_s is None else f", the oldest for {stream.oldest_age_s:.0f} s"
    entries = f"{counted(stream.length, 'entry waits', 'entries wait')} for {stage}"
    if not stream.alive:
        dead = len(stream.workers)
        joined = f"{counted(dead, 'has', 'have')} joined, all silent" if dead else "none is there"
        return Reason(missing, f"{entries} ({joined}){age}")
    if failure:
        return Reason("failing_chain", f"{entries}{age}: {failure}")
    if is_quiet and (stream.oldest_age_s or 0) > STUCK_S:
        return Reason("backlog", f"{entries} ({stream.alive} alive){age}")
    return None


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
    yield from _trainer(status)
    if not status.is_quiet:
        return
    admission, used = status.admission, status.bytes
    if admission.full:
        all_full = len(admission.full) == status.shards
        where = "" if all_full else f", shard {_listed(admission.full)} is full"
        reason = budget_reason(status)
        if all_full and not used.live + used.reserved:
            text = f"no group fits: a rollout reserves {status.place_bytes} bytes of max_bytes {admission.max_bytes}"
            reason = Reason("batch_over_budget", text)
        yield reason or Reason(
            "max_bytes",
            f"{used.live} bytes live and {used.reserved} reserved of max_bytes {admission.max_bytes}{where}",
        )
    if admission.paced:
        yield Reason(
            "pacing",
            f"{admission.groups_ahead} groups begun and not trained on, {admission.groups_limit} are allowed, "
            f"shard {_listed(admission.paced)} has its share; {max(0, status.trainer.untrained)} batches are named",
        )


def _groups(status: Status) -> Iterator[Reason]:
    open_groups, lack = status.groups.open, status.groups.lack
    if not open_groups or not status.is_quiet:
        return
    some = f" (of the {lack.groups} that are due first)" if lack.groups < open_groups else ""
    oldest = "" if lack.oldest_s is None else f", the oldest is open for {lack.oldest_s:.0f} s"
    in_streams = status.places.rollouts + status.places.scoring  # pushed, and taken by no process yet
    if lack.rollouts > in_streams:
        which = "" if in_streams else f"{lack.groups_without_rollouts} of "
        waiting = f", {in_streams} others wait for a process" if in_streams else ""
        yield Reason(
            "incomplete_groups",
            f"{which}{open_groups} open groups{some} lack {lack.rollouts - in_streams} of {lack.places} rollouts"
            f"{waiting}, {_quiet(status)}{oldest}",
        )
    if lack.scores:
        yield Reason(
            "missing_scores",
            f"{lack.groups_without_scores} of {open_groups} open groups{some} lack the rewards of "
            f"{lack.scores} rollouts{oldest}",
        )


def _producers(status: Status) -> Iterator[Reason]:
    states = Counter(producer.state for producer in status.producers)
    open_groups = status.groups.open
    if not states["open"]:
        if not states["finished"] or (open_groups and (states["lost"] or not _has_all_pushed(status))):
            yield Reason(
                "no_producer",
                f"no producer is alive ({states['finished']} finished, {states['lost']} lost), "
                f"{counted(open_groups, 'group is', 'groups are')} open",
            )
        return
    is_braked = status.admission.full or status.admission.paced
    if status.is_quiet and not open_groups and not is_braked and status.quiet_s is not None:
        yield Reason(
            "producers_idle",
            f"{counted(states['open'], 'producer is', 'producers are')} alive, no group is open, {_quiet(status)}",
        )


def _has_all_pushed(status: Status) -> bool:
    """Whether what the open groups lack is on its way, so that no producer can bring more."""
    lack, places = status.groups.lack, status.places
    return lack.rollouts <= places.rollouts + places.scoring and not lack.scores


def _quiet(status: Status) -> str:
    quiet_s = status.quiet_s
    return "nothing was ever pushed" if quiet_s is None else f"nothing moved for {quiet_s:.0f} s"


def _listed(shards: list[int]) -> str:
    return ", ".join(map(str, shards[:MAX_SHARDS_LISTED])) + (
        " and others" if len(shards) > MAX_SHARDS_LISTED else ""
    )
