"""Reads the status of a run: each shard, the run's activity, its trainer and its server; added up.

It sends plain commands only: a user who may only look has no right to run scripts. It computes which shards refuse
another group outside the scripts that decide it (`lua/lib/admit.lua`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from redis.exceptions import ResponseError

from ..errors import SettingError, StreamadvError
from ..grouping.groups_log import parse_groups
from ..grouping.housekeeping import loss_of
from ..messages import one_line
from ..run import Run, find_run
from ..run.consumer import NOBODY
from ..run.heartbeats import PRODUCER_STATE, PRODUCER_TIMEOUT_S, heard_ranks
from ..run.run import QUEUED, by_reason, byte_budget
from ..store.connection import Connection
from ..store.keys import ENTRY_ID, LAST_ID, RUNS, EntryId, ShardKeys
from ..store.replies import as_count, as_int, as_mapping, as_texts, or_nothing, replies_of
from ..store.retry import RETRYABLE, NotNowError
from ..trajectory.members import Members
from .evaluations import newest, read_evaluations
from .model import (
    Admission,
    Bytes,
    Groups,
    Lack,
    Ledger,
    Places,
    ProducerState,
    Server,
    Staleness,
    Status,
    Stream,
    Trainer,
    TrainerState,
    Worker,
)
from .prompts import read_progress
from .shard import OWNER, ShardState, problems_of, read_shards, streams_of

#: Seconds after which a consumer that has not asked for work is taken for dead.
CONSUMER_TIMEOUT_S: Final = 30.0
#: Open groups that are looked at in all shards together: those that are due first.
OPEN_LOOKED_AT: Final = 256
#: Ages in seconds above which open groups are counted.
OLDER_THAN_S: Final = (10, 60, 600, 3600)
GROUP_FIELDS: Final = ("head", "slots")
#: A last id so far ahead of the server's clock tells nothing: a foreign process has chosen it.
FUTURE_MS: Final = 60_000
#: Field `head` of the hash of an open group, see `lua/lib/group.lua`.
HEAD: Final = re.compile(rb"[a-z]+ (?P<size>[0-9]{1,15}) [0-9]+ (?P<opened_ms>[0-9]{1,15}) ")
SLOT_MAP: Final = re.compile(rb"[.pusx]+")
#: Groups at the head of each shard's log whose staleness is read.
LOG_LOOKED_AT: Final = 64


@dataclass(frozen=True, slots=True)
class Activity:
    """What moves in a run."""

    workers: dict[str, list[Worker]]  # of each stream
    ended: dict[str, list[str]]  # keys of streams that take no more entries, by the name of the stream
    quiet_s: float | None  # since something entered a stream; None = never
    lack: Lack


def read_activity(run: Run, now_ms: int) -> Activity:
    """One pipeline for all shards, and one for their open groups."""
    pipe: Any = run.connection.scripts.pipeline(transaction=False)
    looked_at = max(1, OPEN_LOOKED_AT // len(run.keys.salts))
    for keys in run.keys.shards:
        pipe.zrange(keys.open, 0, looked_at - 1)
        pipe.xinfo_stream(keys.groups)
        pipe.xinfo_stream(keys.results)
        for stream in streams_of(run, keys).values():
            pipe.xinfo_stream(stream.key)
            pipe.xinfo_consumers(stream.key, stream.group)
    reply = map(or_nothing, pipe.execute(raise_on_error=False))
    open_groups: list[tuple[ShardKeys, list[bytes]]] = []
    last_ms = [0]
    consumers: dict[str, list[dict[str, Any]]] = {}
    ended: dict[str, list[str]] = {}
    for keys in run.keys.shards:
        open_groups.append((keys, next(reply)))
        streams, infos = streams_of(run, keys), [next(reply), next(reply)]
        for name in streams:
            infos.append(next(reply))
            consumers.setdefault(name, []).extend(as_mapping(consumer) for consumer in next(reply))
        last_ids = [as_mapping(info)["last-generated-id"].decode() if info else "0-0" for info in infos]
        last_ms += [EntryId.of(last_id).ms for last_id in last_ids]
        for (name, stream), last_id in zip(streams.items(), last_ids[2:], strict=True):
            if last_id == LAST_ID:
                ended.setdefault(name, []).append(stream.key)
    moved_ms = max(ms for ms in last_ms if ms <= now_ms + FUTURE_MS)
    return Activity(
        workers={name: _workers(found) for name, found in consumers.items()},
        ended=ended,
        quiet_s=max(0, now_ms - moved_ms) / 1000 if moved_ms else None,
        lack=_read_lack(run, open_groups, now_ms),
    )


def _workers(consumers: Sequence[Mapping[str, Any]]) -> list[Worker]:
    """The consumers of one stream in all shards, by name: a process reads the stream of every shard."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for consumer in consumers:
        by_name.setdefault(consumer["name"].decode(errors="backslashreplace"), []).append(consumer)
    workers = []
    for name, parts in sorted(by_name.items()):
        silent_s = min(part["idle"] for part in parts) / 1000
        is_alive = silent_s < CONSUMER_TIMEOUT_S
        if name != NOBODY:
            workers.append(Worker(name, is_alive, silent_s, sum(part["pending"] for part in parts)))
    return workers


def read_producers(run: Run, now_ms: int) -> list[ProducerState]:
    """The producers of a run by name. One look cannot see a heartbeat change, so times of the server are compared."""
    heartbeats = as_texts(run.connection.scripts.hgetall(run.keys.home.producers))
    producers = []
    for name, heartbeat in sorted(heartbeats.items()):
        if not PRODUCER_STATE.fullmatch(heartbeat):
            continue  # rank 0 removes it
        heartbeat_ms, word, *rest = heartbeat.split(" ")
        if word == "gone":
            continue
        silent_s = max(0, now_ms - int(heartbeat_ms)) / 1000
        state = "lost" if word != "finished" and silent_s > PRODUCER_TIMEOUT_S else word
        plays = map(int, filter(str.isdecimal, rest[1:]))
        producers.append(ProducerState(name, state, round(silent_s, 1), *plays))
    return producers


def read_staleness(run: Run, version: int) -> Staleness:
    """Staleness at this version of the first groups of each log that are not trained on: they are named, or wait."""
    pipe: Any = run.connection.scripts.pipeline(transaction=False)
    for keys in run.keys.shards:
        pipe.hgetall(keys.owners)
    for keys, owners in zip(run.keys.shards, pipe.execute(), strict=True):
        # Entries that are in batches below this version: they stay there until they are committed.
        trained = [
            entry
            for entry, owner in as_texts(owners).items()
            if ENTRY_ID.fullmatch(entry) and OWNER.fullmatch(owner) and int(owner.partition("-")[0]) < version
        ]
        last = max(trained, key=EntryId.of, default=None)
        pipe.xrange(keys.groups, min="-" if last is None else f"({last}", count=LOG_LOOKED_AT)
    entries = [(shard, *entry) for shard, page in enumerate(pipe.execute()) for entry in page]
    groups = parse_groups(run.keys, entries)
    values = Members.concat([group.members for group in groups]).staleness(version)
    values = values[~np.isnan(values)]
    return Staleness(float(values.mean()), int(values.max())) if len(values) else Staleness(None, None)


def who_is_elsewhere(connection: Connection, served: str) -> Iterator[str]:
    """A line for each other run in which somebody is alive. served: the run that has workers."""
    names: Any = connection.scripts.hkeys(RUNS)
    for name in sorted(each.decode(errors="replace") for each in names):
        with suppress(StreamadvError):  # a run of another release, or no run at all
            if name == served:
                continue
            run = find_run(connection, name)
            now_ms, session = run.now_ms(), as_texts(run.connection.scripts.hgetall(run.keys.home.session))
            who = ["producer"] * any(producer.is_alive for producer in read_producers(run, now_ms))
            who += ["trainer"] * any(rank.is_alive for rank in heard_ranks(session, now_ms).values())
            if who:
                yield (
                    f"{' and '.join(who)} {'are' if who[1:] else 'is'} in run {name}, workers in {served}: leave run= "
                    f"out of the programs, which then take STREAMADV_RUN, or use `streamadv up --run {name}`"
                )


def _read_lack(run: Run, open_groups: Sequence[tuple[ShardKeys, list[bytes]]], now_ms: int) -> Lack:
    pipe: Any = run.connection.scripts.pipeline(transaction=False)
    for keys, group_ids in open_groups:
        for group_id in group_ids:
            pipe.hmget(keys.group("").encode() + group_id, GROUP_FIELDS)
    total, by_missing = Counter[str](), dict.fromkeys(("none", "one", "some", "all"), 0)
    ages_s = []
    for row in replies_of(pipe):
        head, slots = (field or b"" for field in row or (None, None))
        match = HEAD.match(head)
        if not match or not SLOT_MAP.fullmatch(slots):
            continue  # it has ended since, or foreign data has overwritten it
        size = int(match["size"])
        unscored, usable = slots.count(b"s"), slots.count(b"u")
        missing = max(0, min(slots.count(b".") + slots.count(b"p"), size - usable - unscored))
        total.update(groups=1, slots=len(slots), rollouts=missing, scores=unscored)
        total.update(without_rollouts=int(missing > 0), without_scores=int(unscored > 0))
        kind = "one" if missing == 1 else "some"
        kind = "none" if missing == 0 else "all" if missing >= size else kind
        by_missing[kind] += 1
        ages_s.append(max(0, now_ms - int(match["opened_ms"])) / 1000)
    return Lack(
        groups=total["groups"],
        places=total["slots"],
        rollouts=total["rollouts"],
        scores=total["scores"],
        groups_without_rollouts=total["without_rollouts"],
        groups_without_scores=total["without_scores"],
        groups_missing=by_missing,
        groups_older=[sum(age_s > limit for age_s in ages_s) for limit in OLDER_THAN_S],
        oldest_s=max(ages_s, default=None),
    )


INFO_FIELDS: Final = (
    *("used_memory", "maxmemory", "total_system_memory", "min_slaves_good_slaves"),
    *("maxmemory_policy", "aof_enabled"),
)


def read_status(run: Run) -> Status:
    """The whole run. Shards are read page by page: each balances by itself."""
    shards = read_shards(run)
    now_ms = run.now_ms()
    counters = Counter[str]()
    for shard in shards:
        counters.update(shard.counters)
    activity = read_activity(run, now_ms)
    server = read_server(run)
    trainer = read_trainer(run, shards[0], now_ms)
    return Status(
        run=run.name,
        shards=len(shards),
        ledger=Ledger.of(counters),
        problems=[
            f"shard {number}: {problem}"
            for number, shard in enumerate(shards)
            for problem in problems_of(shard)
        ],
        places=Places(**{name: counters[name] for name in QUEUED}),
        duplicates=counters["duplicates"],
        malformed=counters["malformed"],
        groups=_groups(shards, counters, activity),
        bytes=Bytes(
            live=counters["live_bytes"],
            reserved=sum(shard.reservation.total_bytes for shard in shards),
            dead=counters["dead_bytes"],
            kept=counters["kept_bytes"],
        ),
        place_bytes=max(shard.reservation.slot_bytes for shard in shards),
        garbage=sum(shard.garbage for shard in shards),
        results=sum(shard.results for shard in shards),
        streams={name: _stream(name, shards, activity) for name in shards[0].streams},
        trainer=trainer,
        staleness=read_staleness(run, trainer.version or 0),
        producers=read_producers(run, now_ms),
        admission=admission_of(run, shards, server),
        evaluations=newest(read_evaluations(run)),
        prompts=read_progress(run, now_ms),
        server=server,
        quiet_s=activity.quiet_s,
        failing_chain=next((one_line(s.trainer["failing"]) for s in shards if "failing" in s.trainer), None),
    )


def _groups(shards: Sequence[ShardState], counters: Mapping[str, int], activity: Activity) -> Groups:
    since_batch = Counter[str]()  # of a shard, since the last batch with groups of it
    for shard in shards:
        since_batch.update(by_reason(shard.counters, "outcome"))
        for pair in shard.trainer.get("ended_before_batch", "").split():
            outcome, _, count = pair.partition("=")
            since_batch[outcome] -= as_count(count)
    return Groups(
        open=sum(shard.groups_open for shard in shards),
        logged=sum(shard.groups_logged for shard in shards),
        abandoned=counters["groups_abandoned"],
        remembered=sum(shard.groups_remembered for shard in shards),
        outcomes=by_reason(counters, "outcome"),
        short=loss_of(counters),
        since_batch=dict(+since_batch),
        lack=activity.lack,
    )


def _stream(name: str, shards: Sequence[ShardState], activity: Activity) -> Stream:
    streams = [shard.streams[name] for shard in shards]
    ages_s = [stream.oldest_age_s for stream in streams if stream.oldest_age_s is not None]
    return Stream(
        length=sum(stream.length for stream in streams),
        pending=sum(stream.pending for stream in streams),
        # The server's own figure goes wrong where entries are deleted as they are handed off.
        lag=sum(max(0, stream.length - stream.pending) for stream in streams),
        consumers=sum(stream.consumers for stream in streams),
        oldest_age_s=max(ages_s, default=None),
        alive=sum(worker.alive for worker in activity.workers[name]),
        workers=activity.workers[name],
        ended=activity.ended.get(name, []),
    )


def read_trainer(run: Run, home_shard: ShardState, now_ms: int) -> Trainer:
    """What the session hash and the home shard say. now_ms: by the server's clock."""
    home, scripts = run.keys.home, run.connection.scripts
    session: dict[str, Any] = as_texts(scripts.hgetall(home.session))
    ranks = heard_ranks(session, now_ms)
    first = ranks.get(0)
    report = None if first is None else first.report
    # Until it is heard: it has just begun.
    state: TrainerState = "none" if "version" not in session else "waits"
    batch_s = None
    if first is not None and report is not None:
        if "version" in session:
            is_sure = first.is_alive or report.doing == "left"
            state = report.doing if is_sure else "ended" if session.get("end") else "lost"
        if report.batch_s is not None:
            batch_s = round(report.batch_s + first.silent_s, 1)
    return Trainer(
        epoch=as_count(session.get("epoch")),
        version=as_count(session["version"]) if "version" in session else None,
        committed=as_count(session.get("committed")),
        batches=scripts.hlen(home.batches),
        finished=home_shard.trainer.get("finished") == "1",
        state=state,
        silent_s=None if first is None else round(first.silent_s, 1),
        world_size=None if report is None else report.world_size,
        ranks_alive=sum(rank.is_alive for rank in ranks.values()),
        batch=None if report is None else report.batch,
        batch_s=batch_s,
        job=one_line(session.get("job", "")),
    )


def admission_of(run: Run, shards: Sequence[ShardState], server: Server) -> Admission:
    """The judgement of all shards about a group of the size that groups have had."""
    manifest = run.manifest
    try:
        budget = byte_budget(manifest.max_bytes, server.to_json()) // len(shards)
    except SettingError:  # producers raise it
        budget = (manifest.max_bytes or 0) // len(shards)
    batch_groups, max_staleness = manifest.batch_groups, manifest.max_staleness
    ahead, full, unarchived = list[int](), list[int](), list[int]()
    for number, shard in enumerate(shards):
        counters, trainer, reservation = shard.counters, shard.trainer, shard.reservation
        if trainer.get("batch_groups", "").isdecimal():
            batch_groups = int(trainer["batch_groups"])
            max_staleness = as_int(trainer.get("max_staleness"))
        # Groups begun and not trained on.
        uncounted = max(0, counters["groups_abandoned"]) + max(0, counters["groups_eval"])
        open_groups = max(0, shard.groups_open - uncounted)
        ahead.append(open_groups + shard.groups_logged - as_count(trainer.get("held")))
        trajectories = counters["in_flight"] + counters["grouped"]
        group_size = max(1, trajectories // max(1, shard.groups_logged))
        if counters["live_bytes"] + reservation.total_bytes + group_size * reservation.slot_bytes > budget:
            full.append(number)
        keep_bytes, _, rest = trainer.get("keep", "").partition(" ")
        if rest.endswith(" archive") and counters["kept_bytes"] > as_count(keep_bytes):
            unarchived.append(number)
    limit = None if batch_groups is None or max_staleness is None else (max_staleness + 1) * batch_groups
    is_paced = limit is not None and sum(ahead) >= limit
    share = (limit or 0) // len(shards)
    return Admission(
        max_bytes=budget * len(shards),
        full=full,
        paced=[number for number, groups in enumerate(ahead) if is_paced and groups >= share],
        unarchived=unarchived,
        groups_ahead=sum(ahead),
        groups_limit=limit,
        batch_groups=batch_groups,
    )


def read_server(run: Run) -> Server:
    """Memory of the server, why it refuses writes, if it does, and whether it may lose data."""
    scripts = run.connection.scripts
    refusal = None
    try:
        scripts.ping()
    except NotNowError as error:
        refusal = str(error)
    try:
        info: Any = scripts.info()
    except ResponseError as error:  # the user may not ask, or the server does not know INFO
        if isinstance(error, RETRYABLE):
            raise
        return Server(refusal)
    if all(isinstance(node, dict) for node in info.values()):  # a cluster: of each node
        info = min(info.values(), key=lambda node: node.get("maxmemory", 0), default={})
    return Server(refusal, **{name: info[name] for name in INFO_FIELDS if name in info})
