"""Reads the status of a run: each shard, the run's activity, its trainer and its server; added up.

It computes which shards refuse another group outside the scripts that decide it (`lua/lib/admit.lua`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.exceptions import ResponseError

from ..errors import SettingError
from ..grouping.housekeeping import loss_of
from ..messages import one_line
from ..run import Run
from ..run.heartbeats import HeardRank, heard_ranks
from ..run.run import QUEUED, by_reason, byte_budget
from ..store.replies import as_count, as_int, as_texts
from ..store.retry import RETRYABLE, NotNowError
from .activity import Activity, read_activity, read_producers, read_staleness
from .evaluations import newest, read_evaluations
from .model import Admission, Bytes, Groups, Ledger, Places, Server, Status, Stream, Trainer, TrainerState
from .prompts import read_progress
from .shard import ShardState, problems_of, read_shards

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
    return Groups(
        open=sum(shard.groups_open for shard in shards),
        logged=sum(shard.groups_logged for shard in shards),
        abandoned=counters["groups_abandoned"],
        remembered=sum(shard.groups_remembered for shard in shards),
        outcomes=by_reason(counters, "outcome"),
        short=loss_of(counters),
        since_batch=_since_batch(shards),
        lack=activity.lack,
    )


def _since_batch(shards: Sequence[ShardState]) -> dict[str, int]:
    """Outcomes of groups since the last batch was named; of a shard, since the last one with groups of it."""
    ended = Counter[str]()
    for shard in shards:
        ended.update(by_reason(shard.counters, "outcome"))
        for pair in shard.trainer.get("ended_before_batch", "").split():
            outcome, _, count = pair.partition("=")
            ended[outcome] -= as_count(count)
    return dict(+ended)


def _stream(name: str, shards: Sequence[ShardState], activity: Activity) -> Stream:
    streams = [shard.streams[name] for shard in shards]
    ages_s = [stream.oldest_age_s for stream in streams if stream.oldest_age_s is not None]
    return Stream(
        length=sum(stream.length for stream in streams),
        pending=sum(stream.pending for stream in streams),
        lag=sum(stream.lag for stream in streams),
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
    batch_s = None
    if first is not None and first.report.batch_s is not None:
        batch_s = round(first.report.batch_s + first.silent_s, 1)
    return Trainer(
        epoch=as_count(session.get("epoch")),
        version=as_count(session["version"]) if "version" in session else None,
        committed=as_count(session.get("committed")),
        batches=scripts.hlen(home.batches),
        finished=home_shard.trainer.get("finished") == "1",
        state=_state(session, first),
        silent_s=None if first is None else round(first.silent_s, 1),
        world_size=None if report is None else report.world_size,
        ranks_alive=sum(rank.is_alive for rank in ranks.values()),
        batch=None if report is None else report.batch,
        batch_s=batch_s,
        job=one_line(session.get("job", "")),
    )


def _state(session: Mapping[str, Any], first: HeardRank | None) -> TrainerState:
    """What rank 0 does."""
    if "version" not in session:
        return "none"
    if first is None:
        return "waits"  # it has just taken the run
    if first.is_alive or first.report.doing == "left":
        return first.report.doing
    return "ended" if session.get("end") else "lost"


def admission_of(run: Run, shards: Sequence[ShardState], server: Server) -> Admission:
    """The judgement of all shards about a group of the size that groups have had."""
    manifest = run.manifest
    try:
        budget = byte_budget(manifest.max_bytes, server.to_json()) // len(shards)
    except SettingError:  # producers raise it
        budget = (manifest.max_bytes or 0) // len(shards)
    batch_groups, max_staleness = manifest.batch_groups, manifest.max_staleness
    for shard in shards:
        if shard.trainer.get("batch_groups", "").isdecimal():
            batch_groups = int(shard.trainer["batch_groups"])
            max_staleness = as_int(shard.trainer.get("max_staleness"))
    ahead = [_groups_ahead(shard) for shard in shards]
    limit = None if batch_groups is None or max_staleness is None else (max_staleness + 1) * batch_groups
    is_paced = limit is not None and sum(ahead) >= limit
    return Admission(
        max_bytes=budget * len(shards),
        full=[number for number, shard in enumerate(shards) if _is_full(shard, budget)],
        paced=[
            number
            for number, groups in enumerate(ahead)
            if is_paced and groups >= (limit or 0) // len(shards)
        ],
        unarchived=[number for number, shard in enumerate(shards) if _waits_for_archive(shard)],
        groups_ahead=sum(ahead),
        groups_limit=limit,
        batch_groups=batch_groups,
    )


def _groups_ahead(shard: ShardState) -> int:
    """Groups begun and not trained on."""
    uncounted = max(0, shard.count("groups_abandoned")) + max(0, shard.count("groups_eval"))
    open_groups = max(0, shard.groups_open - uncounted)
    return open_groups + shard.groups_logged - as_count(shard.trainer.get("held"))


def _is_full(shard: ShardState, budget: int) -> bool:
    trajectories = shard.ledger.in_flight + shard.count("grouped")
    group_size = max(1, trajectories // max(1, shard.groups_logged))
    reservation = shard.reservation
    return shard.count("live_bytes") + reservation.total_bytes + group_size * reservation.slot_bytes > budget


def _waits_for_archive(shard: ShardState) -> bool:
    limit, _, rest = shard.trainer.get("keep", "").partition(" ")
    return rest.endswith(" archive") and shard.count("kept_bytes") > as_count(limit)


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
