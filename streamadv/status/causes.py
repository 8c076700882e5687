"""What a run lacks, read from its status: the reasons of `reasons.REASONS` that stand in its structures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .. import metrics
from ..store.reasons import Reason

Status = Mapping[str, Any]

#: A pipeline in which nothing has entered a stream for so long stands still.
QUIET_S: Final = 10.0
#: What is alive and leaves an entry for longer is too slow.
STUCK_S: Final = 30.0
#: While more groups than this share stay, those that are lost are not why a trainer waits.
KEPT_SHARE: Final = 0.05

#: Outcomes of groups that are of no use, by the reason of the wait for others.
LOST: Final = {
    "filtered": ("zero_variance", "difficulty", "no_train_members"),
    "ended_short": ("incomplete", "expired", "cancelled"),
    "stale": ("stale",),
    "rolled_back": ("rolled_back",),
    "dead": ("dead", "malformed"),
}
#: What befalls a group after it was counted as kept.
AFTERWARDS: Final = ("stale", "rolled_back", "dead")


def reasons_of(status: Status) -> list[Reason]:
    """Why nothing moves; [] while everything does."""
    reasons = [*_server(status), *_stages(status)]
    if not starves(status):
        return [*reasons, *_brakes(status)]
    return [*reasons, *_losses(status), *_brakes(status), *_groups(status), *_producers(status)]


def starves(status: Status) -> bool:
    """Whether a trainer that asks for a batch now has to wait for groups."""
    return untrained(status) <= 0 and waiting_groups(status) < (status["admission"]["batch_groups"] or 1)


def untrained(status: Status) -> int:
    """Batches that are named and not yet trained on."""
    return int(status["trainer"]["batches"]) - uncommitted(status)


def uncommitted(status: Status) -> int:
    """Batches that are trained on and not yet committed."""
    return int(status["trainer"]["version"] or 0) - int(status["trainer"]["committed"])


def waiting_groups(status: Status) -> int:
    """Groups that are in no batch yet, as far as their trajectories tell."""
    grouped, in_flight = status["places"]["grouped"], status["ledger"]["in_flight"]
    logged: int = status["groups"]["logged"]
    return int(logged * grouped / max(1, grouped + in_flight) + 0.5)


def ordinary(status: Status) -> Reason:
    """What is waited for while everything moves."""
    if untrained(status) > 0:
        work = status["streams"]["work"]
        return Reason(
            "computing",
            f"{untrained(status)} batches are named, {work['length']} of their work items are left, "
            f"{work['alive']} advantage workers are alive",
        )
    groups = status["groups"]
    quiet = "never" if status["quiet_s"] is None else f"{status['quiet_s']:.0f} s ago"
    return Reason(
        "groups_coming",
        f"{waiting_groups(status)} groups wait for their batch, {groups['open']} are open and lack "
        f"{groups['lack']['rollouts']} rollouts, something moved {quiet}",
    )


def is_quiet(status: Status) -> bool:
    """Whether nothing has entered a stream for a while."""
    return status["quiet_s"] is None or status["quiet_s"] >= QUIET_S


def lost_since(ended: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Of groups that have ended as counted in `ended`: the lost ones by reason, and the number of all.

    A group that waited before and was lost now is not counted: only what came in this time tells what will come.
    """
    kept = sum(ended.get(name, 0) for name in metrics.KEPT)
    lost = {reason: sum(ended.get(name, 0) for name in names) for reason, names in LOST.items()}
    produced = kept + lost["filtered"] + lost["ended_short"] + ended.get("malformed", 0)
    for reason in AFTERWARDS:
        lost[reason] = min(lost[reason], kept)
        kept -= lost[reason]
    return {reason: count for reason, count in lost.items() if count > 0}, produced


def told(ended: Mapping[str, int]) -> str:
    """Outcomes with their counts."""
    return ", ".join(f"{name} {count}" for name, count in sorted(ended.items()) if count > 0)


def _server(status: Status) -> Iterator[Reason]:
    server = status["server"]
    if server["refuses_writes"] is not None:
        yield Reason("misconf", server["refuses_writes"])
    if server.get("min_slaves_good_slaves") == 0:
        yield Reason("noreplicas", "min-replicas-to-write is set and no replica is good")
    used, limit = server.get("used_memory", 0), server.get("maxmemory", 0)
    if limit and used > limit:
        yield Reason("maxmemory", f"{used} bytes are used of maxmemory {limit}")


def _stages(status: Status) -> Iterator[Reason]:
    for name, stream in status["streams"].items():
        if not stream["length"]:
            continue
        scorer = name.removeprefix("scoring:")
        stage, missing = {
            "rollouts": ("a grouper", "no_grouper"),
            "work": ("an advantage worker", "no_advantage_worker"),
        }.get(name, (f"a scorer {scorer}", "no_scorer"))
        age = f", the oldest for {stream['oldest_age_s']:.0f} s" if stream["oldest_age_s"] is not None else ""
        entries = f"{stream['length']} entries wait for {stage}"
        if not stream["alive"]:
            silent = (
                f"{stream['consumers']} have joined, all silent" if stream["consumers"] else "none has joined"
            )
            yield Reason(missing, f"{entries} ({silent}){age}")
        elif (stream["oldest_age_s"] or 0) > STUCK_S and is_quiet(status):
            yield Reason("backlog", f"{entries} ({stream['alive']} alive){age}")


def _losses(status: Status) -> Iterator[Reason]:
    ended: Counter[str] = Counter(status["groups"]["since_batch"])
    lost, produced = lost_since(ended)
    total = sum(lost.values())
    if total < max(1, status["admission"]["batch_groups"] or 1) or total < (1 - KEPT_SHARE) * produced:
        return
    for reason, count in lost.items():
        outcomes = {name: ended[name] for name in LOST[reason]}
        yield Reason(
            reason,
            f"{count} of {produced} groups that ended since the last batch are lost ({told(outcomes)})",
        )


def _brakes(status: Status) -> Iterator[Reason]:
    """What keeps producers from beginning groups, when nothing else moves either."""
    if status["trainer"]["version"] is None and waiting_groups(status):
        yield Reason("no_trainer", f"{waiting_groups(status)} groups wait for a batch")
    admission, live, reserved = status["admission"], status["bytes"]["live"], status["bytes"]["reserved"]
    if not is_quiet(status):
        return
    shards = range(status["shards"])
    if admission["full"]:
        used = f"{live} bytes live and {reserved} reserved of max_bytes {admission['max_bytes']}"
        where = (
            "" if len(admission["full"]) == len(shards) else f", shard {_numbers(admission['full'])} is full"
        )
        if budget := budget_reason(status):
            yield budget
        else:
            yield Reason("max_bytes", used + where)
    if admission["paced"]:
        yield Reason(
            "pacing",
            f"{admission['groups_ahead']} groups begun and not trained on, {admission['groups_limit']} are allowed, "
            f"shard {_numbers(admission['paced'])} has its share; {max(0, untrained(status))} batches are named",
        )


def budget_reason(status: Status, needed: int | None = None) -> Reason | None:
    """Why no batch can be formed though producers would push: bytes that nothing but a commit, or nothing, frees.

    Judged when all that was admitted has ended and every shard refuses another group. needed: groups of a batch.
    """
    admission, groups = status["admission"], status["groups"]
    needed = needed or admission["batch_groups"]
    moving = (
        groups["open"] or status["garbage"] or status["places"]["rollouts"] or status["places"]["scoring"]
    )
    alive = any(producer["state"] == "open" for producer in status["producers"])
    if moving or not alive or needed is None or len(admission["full"]) < status["shards"]:
        return None
    if untrained(status) > 0 or waiting_groups(status) >= needed:
        return None
    live, budget = status["bytes"]["live"], admission["max_bytes"]
    if uncommitted(status) > 0:
        return Reason(
            "uncommitted",
            f"{uncommitted(status)} trained but uncommitted batches hold {live} bytes of max_bytes {budget}, so no "
            f"group can be admitted",
        )
    return Reason(
        "batch_over_budget",
        f"{waiting_groups(status)} groups hold {live} bytes of max_bytes {budget}, so no other is admitted, and "
        f"batch_groups is {needed}",
    )


def _groups(status: Status) -> Iterator[Reason]:
    groups, lack = status["groups"], status["groups"]["lack"]
    if not groups["open"] or not is_quiet(status):
        return
    some = f" (of the {lack['groups']} that are due first)" if lack["groups"] < groups["open"] else ""
    oldest = "" if lack["oldest_s"] is None else f", the oldest is open for {lack['oldest_s']:.0f} s"
    on_their_way = (
        status["places"]["rollouts"] + status["places"]["scoring"]
    )  # pushed, and taken by nobody yet
    if lack["rollouts"] > on_their_way:
        which = "" if on_their_way else f"{lack['groups_without_rollouts']} of "
        others = f", {on_their_way} others wait for a process" if on_their_way else ""
        yield Reason(
            "incomplete_groups",
            f"{which}{groups['open']} open groups{some} lack {lack['rollouts'] - on_their_way} of "
            f"{lack['places']} rollouts{others}, {_quiet(status)}{oldest}",
        )
    if lack["scores"]:
        yield Reason(
            "missing_scores",
            f"{lack['groups_without_scores']} of {groups['open']} open groups{some} lack the rewards of "
            f"{lack['scores']} rollouts{oldest}",
        )


def _producers(status: Status) -> Iterator[Reason]:
    states = Counter(producer["state"] for producer in status["producers"])
    open_groups = status["groups"]["open"]
    if not states["open"]:
        if open_groups or not states["finished"]:
            yield Reason(
                "no_producer",
                f"no producer is alive ({states['finished']} finished, {states['lost']} lost), "
                f"{open_groups} groups are open",
            )
        return
    held = status["admission"]["full"] or status["admission"]["paced"]
    if is_quiet(status) and not open_groups and not held and status["quiet_s"] is not None:
        yield Reason(
            "producers_idle", f"{states['open']} producers are alive, no group is open, {_quiet(status)}"
        )


def _quiet(status: Status) -> str:
    return (
        "nothing was ever pushed"
        if status["quiet_s"] is None
        else f"nothing moved for {status['quiet_s']:.0f} s"
    )


def _numbers(shards: list[int]) -> str:
    return ", ".join(map(str, shards[:8])) + (" and others" if len(shards) > 8 else "")
