"""Reading the status of a run: each shard, what moves in the run, its trainer and its server; added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..grouping.short_groups import loss_of
from ..messages import one_line
from ..run import Run
from ..store.replies import as_count
from .activity import Activity, read_activity, read_producers, read_staleness
from .admission import admission_of, read_server
from .check import problems_of
from .evaluations import newest, read_evaluations
from .model import QUEUED, Bytes, Groups, Ledger, Places, Status, Stream, by_reason
from .shard import ShardState, read_shards
from .trainer import read_trainer


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
        server=server,
        quiet_s=activity.quiet_s,
        failing_chain=_failing_chain(shards),
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
        lag_known=True,
        consumers=sum(stream.consumers for stream in streams),
        oldest_age_s=max(ages_s, default=None),
        alive=sum(worker.alive for worker in activity.workers[name]),
        workers=activity.workers[name],
    )


def _failing_chain(shards: Sequence[ShardState]) -> str | None:
    notes = (one_line(shard.trainer["failing"]) for shard in shards if "failing" in shard.trainer)
    return next(notes, None)
