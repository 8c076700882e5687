"""Whether the promises held: compares a run that is over with what its producers were told and its trainer saved."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ..prompts.spec import identity
from ..prompts.stored import Stored, read, read_sets
from ..run import Run, find_run
from ..run.heartbeats import HEARTBEAT_S
from ..status import problems_of, read_shards
from ..status.audit import audit
from ..status.model import Ledger
from ..status.seen import read_groups_at
from ..store.connection import Connection
from .archiver import Record
from .excuses import is_excused, may_be_dropped, may_be_over, was_lost_twice, was_open_again, whole_groups
from .inspection import SHARD, problems_of_groups
from .pipeline import Pipeline
from .plan import Choices, cut_down
from .scene import RUN, Place, Violation
from .strands import Stuck
from .world import AGAIN_S, KINDS, URL, World

#: Why whole groups are dropped.
GROUP_REASONS: Final = (
    "expired",
    "incomplete",
    "zero_variance",
    "no_train_members",
    "eval",
    "stale",
    "rolled_back",
)
#: Times that the structures are compared with the ledger, while processes still end.
LOOKS: Final = 5
#: Streams that a run leaves empty.
STREAMS: Final = (b":rollouts", b":groups", b":work", b":results", b":scoring:judge")


def judge(pipeline: Pipeline) -> None:
    """Raises Violation for a promise that did not hold. The run is over, and nothing fails any more."""
    if pipeline.end_is_lost:
        return
    world, found = pipeline.world, list[str]()
    process = world.start("judge.1", lambda: found.extend(_found(pipeline)))
    world.run(lambda: not process.strands)
    if process.errors:
        raise process.errors[0]
    if found:
        raise Violation("; ".join(found))


def _found(pipeline: Pipeline) -> Iterator[str]:
    run = find_run(Connection(URL), RUN)
    weights = pipeline.checkpoint[0] if pipeline.checkpoint else []
    for shard in read_shards(run):
        yield from (f"accounting: {text}" for text in problems_of(shard))
    for _ in range(LOOKS):  # a grouper may still be at its last round
        deep = audit(run).problems
        if not any("the run was at work meanwhile" in text for text in deep):
            break
    yield from (f"accounting (deep): {text}" for text in deep)
    counters = run.counters()
    ledger = Ledger.of(counters)
    may_stay = _was_lost_at_the_end(pipeline) or _was_stopped(pipeline)
    if (ledger.queued or ledger.in_flight) and not may_stay:
        yield f"P3: after the end {ledger.queued} trajectories are queued, {ledger.in_flight} in flight"
    twice = [place for place, count in Counter(weights).items() if count > 1]
    if twice and not _may_train_twice(pipeline):
        yield f"P1: {twice[:4]} are in the weights twice"
    yield from _missing(pipeline, set(weights))
    if pipeline.scene.prompts:
        yield from _prompts(pipeline, run, weights)
    # What nobody has pushed again is in the weights, and the server has at most the rest of its group, as untrained.
    unknown = sum(
        is_excused(pipeline, pipeline.acknowledged.get(place, []))
        or may_be_over(pipeline, pipeline.groups[place[0]])
        or was_open_again(pipeline, pipeline.groups[place[0]])
        for place in weights
    )
    if may_stay:  # what came back after the end waits for a trainer that takes the run later
        unknown += ledger.queued + ledger.in_flight
    if not (_may_count_otherwise(pipeline) or 0 <= len(weights) - ledger.trained <= unknown):
        yield f"P1: the ledger says {ledger.trained} trained, the checkpoint has {len(weights)}"
    if unknown_ended := _ended_unknown(pipeline):
        yield f"P3: groups have ended that nobody was given: {unknown_ended[:4]}"
    yield from _begun_after_the_end(pipeline)
    yield from _kept_otherwise(pipeline, run, counters)
    if pipeline.scene.archive:
        yield from _archive(pipeline, run)
    if malformed := counters.get("malformed", 0):
        yield f"accounting: {malformed} entries are malformed, and only the run has written"
    store = pipeline.world.server.store
    yield from (f"accounting: {text}" for text in problems_of_groups(pipeline.world.server))
    session, trainer = (store.data.get(SHARD + name, {}) for name in (b"session", b"trainer"))
    may_be_told_otherwise = may_stay or _may_hear_of_both(pipeline)
    if session.get(b"version") != trainer.get(b"version") and not may_be_told_otherwise:
        yield f"P9: the run has version {session.get(b'version')}, producers hear {trainer.get(b'version')}"
    if (held := trainer.get(b"held", b"0")) != b"0" and not may_stay:
        yield f"P9: {held.decode()} groups are held as trained and not committed, and none is left"
    for key, value in sorted(store.data.items()):
        if key.endswith(STREAMS) and value.ids and not may_stay:
            yield f"accounting: {len(value.ids)} entries are left in {key.decode()}"
        elif key.endswith((b":batches", b":applied")) and not may_stay:
            yield f"accounting: {sorted(value)} are left in {key.decode()}"
        elif key.endswith(b":garbage"):
            yield f"accounting: {len(value)} payloads are left in {key.decode()}"


def _may_train_twice(pipeline: Pipeline) -> bool:
    """Who begins without the state of a checkpoint does not know what it has trained on, if the server loses it."""
    return pipeline.was_stateless and bool(pipeline.world.lost)


def _was_lost_at_the_end(pipeline: Pipeline) -> bool:
    """Whether the server lost something after the trainer's last look: a trainer that takes the run later finds it.

    A request that ended the run may have been repeated until the server was back.
    """
    return any(_back(pipeline, at) + AGAIN_S >= pipeline.closing_at for at, _ in pipeline.world.lost)


def _back(pipeline: Pipeline, since: float) -> float:
    """When the server answered for longer than a request is repeated."""
    for first, last in sorted(pipeline.world.outages):
        if since <= last and first <= since + AGAIN_S:
            since = max(since, min(last, pipeline.scene.calm_s))
    return since


def _was_stopped(pipeline: Pipeline) -> bool:
    """Whether the trainer has ended the run before its time."""
    return pipeline.stopped_at < math.inf


def _begun_after_the_end(pipeline: Pipeline) -> Iterator[str]:
    """Once the trainer has ended the run, no training group is begun."""
    for place in sorted(pipeline.acknowledged):
        group = pipeline.groups[place[0]]
        is_late = group.begun > pipeline.stopped_at and group.role == "train"
        if is_late and not pipeline.world.lost:
            yield f"P9: group {group.id} was begun after the trainer had ended the run"


def _ended_unknown(pipeline: Pipeline) -> list[str]:
    """Groups with a tombstone that no producer has begun to play, where each has left and was heard."""
    if pipeline.world.lost or any(life.process.dead or life.is_unheard for life in pipeline.lives):
        return []
    # The deadline of one begun ahead was over before its turn, or before its producer withdrew it, with a heartbeat.
    kept_away = [pair for life in pipeline.lives for pair in life.process.disturbances]
    longest = max((last - first for first, last in (*kept_away, *pipeline.world.outages)), default=0.0)
    if pipeline.played_late or max(longest, HEARTBEAT_S) > pipeline.scene.deadline_s:
        return []
    tombstones = pipeline.world.server.store.data.get(SHARD + b"ended", {})
    return [name.decode() for name in tombstones if name.decode() not in pipeline.groups]


def _kept_otherwise(pipeline: Pipeline, run: Run, counters: Counter[str]) -> Iterator[str]:
    """Groups that were trained on or dropped and are not kept, or that are kept twice: the run keeps all of them."""
    kept, groups, lacking = Counter[str](), Counter[str](), 0
    for group_id, outcome, count, _ in _seen(pipeline, run):
        groups[group_id] += outcome == "trained"
        kept[outcome] += count
        if outcome != "trained" and group_id in pipeline.groups:
            lacking += pipeline.groups[group_id].size - count
    ended = {"trained": counters["trained"] + counters["dropped:baseline"] + counters["dropped:oversize"]}
    ended |= {reason: counters[f"dropped:{reason}"] for reason in GROUP_REASONS}
    has_archive = pipeline.scene.archive
    # Above maxmemory nothing is kept, and the oldest go.
    may_lack = pipeline.world.was_full and not has_archive
    # The files have what the server has lost, and maybe as it ended first.
    if has_archive and pipeline.world.lost:
        if sum(kept[reason] for reason in ended) + lacking < sum(ended.values()):
            yield f"archive: {dict(kept)} of {ended}"
        return
    for reason, count in ended.items():
        if kept[reason] > count or (kept[reason] < count and not may_lack):
            yield f"kept: {kept[reason]} trajectories of {count} {reason}"
    twice = [group_id for group_id, count in groups.items() if count > 1]
    if twice and not pipeline.world.lost:
        yield f"kept: {twice[:4]} were trained on twice"


def _seen(pipeline: Pipeline, run: Run) -> list[Record]:
    """Groups that have ended: of the archive, and those that it does not have and the run keeps."""
    there = {record.group_id for record in pipeline.archived}
    kept = [
        Record(group.group_id, group.outcome, group.count - len(group.left_out), "")
        for group in read_groups_at(run, "kept")
        if group.group_id not in there
    ]
    return [*pipeline.archived, *kept]


def _archive(pipeline: Pipeline, run: Run) -> Iterator[str]:
    """The files have each group once, all up to the mark, and at the end all there are."""
    counts = Counter(record.group_id for record in pipeline.archived)
    # Another archiver does not know what its predecessor's server had lost.
    has_forgotten = any(
        process.name.startswith("archiver") and process.ended > at
        for at, _ in pipeline.world.lost
        for process in pipeline.world.processes
        if process.dead
    )
    twice = [group_id for group_id, count in counts.items() if count > 1]
    if twice and not has_forgotten:
        yield f"archive: {twice[:4]} are in the files twice"
    if absent := [group.group_id for group in read_groups_at(run, "kept") if group.group_id not in counts]:
        yield f"archive: {absent[:4]} are not in the files"


def _prompts(pipeline: Pipeline, run: Run, weights: Sequence[Place]) -> Iterator[str]:
    """P11: each prompt of each epoch has ended once."""
    places = [(identity(group_id), index) for group_id, index in weights if group_id != identity(group_id)]
    twice = [place for place, count in Counter(places).items() if count > 1]
    if twice and not _may_train_twice(pipeline):
        yield f"P11: {twice[:4]} are in the weights twice"
    sets = {prompts.name: read(run, prompts) for prompts in read_sets(run)}
    # A job that commits each batch begins anew from an older checkpoint.
    if pipeline.scene.each_batch and pipeline.jobs > 1 and pipeline.world.lost:
        return
    # What the server loses after that comes back to nobody.
    if any(lost >= over for lost, _ in pipeline.world.lost for over in pipeline.prompts_over):
        return
    for each in pipeline.prompts:
        name = each.set.name
        trained = {prompt for prompt, _ in places if prompt.startswith(f"prompt:{name}:")}
        if name in sets:
            yield from _prompts_of(pipeline, len(each), sets[name], len(trained))
        else:
            yield f"P11: the run has no prompts {name}"


def _prompts_of(pipeline: Pipeline, count: int, stored: Stored, trained: int) -> Iterator[str]:
    """As `_prompts`, of one set of so many prompts, of which so many are in the weights."""
    if not stored.is_over:
        yield f"P11: after the end {len(stored.entries)} prompts are begun, of {stored.following} {stored.entries}"
    ends = Counter[str]()
    for counter, number in stored.counters.items():
        ends[counter.partition(":")[0].partition(" ")[0]] += number
    lost = sum(number for counter, number in stored.counters.items() if ":lost " in counter)
    if lost and not pipeline.world.lost:
        yield f"P11: {lost} prompts have ended as lost, and no server has lost anything"
    given_up = ends["given_up"] + ends["filtered"] + ends["skipped"]
    # After a loss a group that is in the weights may be pushed again in part, and expire.
    missing = count - trained - given_up
    if missing > 0 or (missing and not pipeline.world.lost):
        yield f"P11: of {count} prompts {trained} are in the weights, {dict(stored.counters)}"
    if not (pipeline.world.lost or pipeline.scene.each_batch) and ends["trained"] != trained:
        yield f"P11: {trained} prompts are in the weights, the run says {dict(stored.counters)}"


def _may_hear_of_both(pipeline: Pipeline) -> bool:
    """Whether an older job may go on for a while, since a server has lost that there is a newer one, or its epoch."""
    return bool(pipeline.scene.successor_s and pipeline.jobs > 1 and pipeline.world.lost)


def _may_count_otherwise(pipeline: Pipeline) -> bool:
    """Whether a job may have trained on what is not in the checkpoint, and the ledger counts it."""
    if _may_hear_of_both(pipeline):
        return True
    lost_at = min((at for at, _ in pipeline.world.lost), default=math.inf)
    each_batch = pipeline.scene.each_batch
    return any(each_batch or end > lost_at for end in pipeline.job_ends)


def _missing(pipeline: Pipeline, weights: set[Place]) -> Iterator[str]:
    """What was acknowledged and is nowhere, and whole groups that were not trained on."""
    ended: set[Place] = set()
    for kind in (b"ended", b"ended_before"):
        tombstones: dict[bytes, bytes] = pipeline.world.server.store.data.get(SHARD + kind, {})
        for group_id, text in tombstones.items():
            digits = text.decode()[1:]
            ended |= {(group_id.decode(), index) for index, digit in enumerate(digits) if digit == "1"}
    whole = [] if _was_stopped(pipeline) else whole_groups(pipeline)
    # A batch counts as trained when the next one is asked for, whatever was saved.
    if pipeline.scene.each_batch:
        weights = weights | set(pipeline.trained)
    for place, acknowledged in sorted(pipeline.acknowledged.items()):
        if not (
            place in weights
            or place in ended
            or was_lost_twice(pipeline, place)
            or is_excused(pipeline, acknowledged)
        ):
            yield f"P2: {place} was acknowledged and is gone"
    for group in whole:
        trained = sum(place[0] == group.id for place in weights)
        if trained < group.size and not (
            may_be_dropped(pipeline, group) or any(was_lost_twice(pipeline, place) for place in group.places)
        ):
            yield f"P2: all of {group.id} was acknowledged, and {trained} of {group.size} are in the weights"


def run_schedule(
    seed: int | str = 0, *, choices: Choices | None = None, without: Sequence[str] = ()
) -> tuple[World, str | None]:
    """One schedule, from a seed or from its choices: its world, and which promise it broke.

    without: kinds of faults that the seed does not draw.
    """
    world = World(seed, choices=choices, faults=[kind for kind in KINDS if kind not in without])
    with world:
        try:
            pipeline = Pipeline(world)
            pipeline.play()
            judge(pipeline)
        except (Violation, Stuck) as violation:
            return world, str(violation)
    return world, None


def run_seed(without: Sequence[str], seed: int) -> tuple[str | None, Choices]:
    """In a process of a pool: which promise the schedule of this seed broke, and its choices if it did."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    world, broken = run_schedule(seed, without=without)
    return broken, {} if broken is None else world.choices


def shortest(choices: Choices, broken: str, tries: int = 300) -> Choices:
    """The fewest choices found that break the same promise."""
    kind = _kind(broken)

    def fails(some: Choices) -> bool:
        text = run_schedule(choices=some)[1]
        return text is not None and _kind(text) == kind

    plain = {
        label: chosen
        for label, chosen in choices.items()
        if not (isinstance(chosen, list) and chosen[0] in ("slow", "late"))
    }
    return cut_down(plain if fails(plain) else choices, fails, tries)


def _kind(text: str) -> str:
    """What a violation says, without names and numbers."""
    return re.sub(r"[\d.]+|\'[^\']*\'|producer \S+", "#", text)[:30]
