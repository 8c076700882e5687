"""Figures of a run beside its ledger, by which `causes.py` judges why nothing moves. Plain commands, no scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from ..errors import SettingError
from ..run import Run
from ..run.budget import byte_budget
from ..store.keys import ShardKeys
from ..store.replies import as_count, as_mapping, as_whole, or_nothing, replies_of
from ..store.retry import RETRYABLE, NotNowError

if TYPE_CHECKING:
    from .ledger import ShardState

#: A consumer that has not asked for work for longer is taken for dead.
CONSUMER_TIMEOUT_S: Final = 30.0
#: Open groups that are looked at, in all shards together: those that are due first.
OPEN_LOOKED_AT: Final = 256
GROUP_FIELDS: Final = ("opened_ms", "size", "slots", "usable", "unscored", "unusable")


def read_facts(
    run: Run, shards: Sequence[ShardState], streams: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """What `status` adds to its figures; `streams`: name -> kind of key, consumer group."""
    now_ms = run.now_ms()
    alive, moved_ms, opened = _movement(run, streams)
    server = _server(run)
    return {
        "now_ms": now_ms,
        "alive": alive,
        "quiet_s": max(0, now_ms - moved_ms) / 1000 if moved_ms else None,
        "lack": _open_groups(run, opened, now_ms),
        "since_batch": dict(_since_batch(shards)),
        "admission": _admission(run, shards, server),
        "server": server,
    }


def _movement(
    run: Run, streams: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, int], int, list[tuple[ShardKeys, list[bytes]]]]:
    """Consumers alive of each stream, when something last entered one (ms, 0 = never), open groups of each shard."""
    pipe: Any = run.connection.scripts.pipeline(transaction=False)
    looked_at = max(1, OPEN_LOOKED_AT // len(run.keys.salts))
    for keys in run.keys.shards:
        pipe.zrange(keys.open, 0, looked_at - 1)
        pipe.xinfo_stream(keys.groups)
        pipe.xinfo_stream(keys.results)
        for kind, group in streams.values():
            key = keys.scoring(group) if kind == "scoring" else getattr(keys, kind)
            pipe.xinfo_stream(key)
            pipe.xinfo_consumers(key, group)
    replies = iter(pipe.execute(raise_on_error=False))
    alive, moved, opened = Counter[str](), [0], []
    for keys in run.keys.shards:
        opened.append((keys, or_nothing(next(replies))))
        moved += [_last_ms(or_nothing(next(replies))) for _ in range(2)]
        for name in streams:
            moved.append(_last_ms(or_nothing(next(replies))))
            silent = [as_mapping(each)["idle"] for each in or_nothing(next(replies))]
            alive[name] = max(alive[name], sum(ms < CONSUMER_TIMEOUT_S * 1000 for ms in silent))
    return {name: alive[name] for name in streams}, max(moved), opened


def _last_ms(stream: Any) -> int:
    return int(as_mapping(stream)["last-generated-id"].partition(b"-")[0]) if stream else 0


def _open_groups(run: Run, opened: Sequence[tuple[ShardKeys, list[bytes]]], now_ms: int) -> dict[str, Any]:
    """What the open groups that are due first lack."""
    pipe: Any = run.connection.scripts.pipeline(transaction=False)
    for keys, ids in opened:
        for group_id in ids:
            pipe.hmget(keys.group("").encode() + group_id, GROUP_FIELDS)
    found = Counter[str]()
    since = []
    for opened_ms, size, places, usable, unscored, unusable in _numbers(replies_of(pipe)):
        missing = max(0, min(places - usable - unscored - unusable, size - usable - unscored))
        found.update(groups=1, places=places, rollouts=missing, scores=unscored)
        found.update(groups_without_rollouts=int(missing > 0), groups_without_scores=int(unscored > 0))
        since.append(opened_ms)
    names = ("groups", "places", "rollouts", "scores", "groups_without_rollouts", "groups_without_scores")
    oldest = {"oldest_s": max(0, now_ms - min(since)) / 1000 if since else None}
    return {name: found[name] for name in names} | oldest


def _numbers(rows: Sequence[Any]) -> Iterator[list[int]]:
    for row in rows:
        numbers = [as_whole(value or b"0") for value in row or ()]
        if numbers and None not in numbers:  # else somebody has written into the group: the grouper ends it
            yield [number or 0 for number in numbers]


def _since_batch(shards: Sequence[ShardState]) -> Counter[str]:
    """How groups have ended since the last batch was named; of a shard, since the last one with groups of it."""
    ended = Counter[str]()
    for state in shards:
        ended.update(state.by_reason("outcome"))
        for pair in state.trainer.get("ended_before_batch", "").split():
            name, _, count = pair.partition("=")
            ended[name] -= as_count(count)
    return +ended


def _admission(run: Run, shards: Sequence[ShardState], server: Mapping[str, Any]) -> dict[str, Any]:
    """Which shards refuse another group, of the size that groups have had, and for what. See `lua/lib/admit.lua`."""
    manifest = run.manifest
    try:
        budget = byte_budget(manifest.max_bytes, server) // len(shards)
    except SettingError:  # producers are told
        budget = (manifest.max_bytes or 0) // len(shards)
    batch_groups, max_staleness = manifest.batch_groups, manifest.max_staleness
    ahead, full = [], []
    for number, state in enumerate(shards):
        if state.trainer.get("batch_groups", "").isdecimal():
            batch_groups = int(state.trainer["batch_groups"])
            max_staleness = as_whole(state.trainer.get("max_staleness"))
        open_groups = max(0, state.groups_open - max(0, state.count("groups_abandoned")))
        ahead.append(open_groups + state.groups_logged - as_count(state.trainer.get("held")))
        size = (state.count("grouped") + state.count("in_flight")) // max(1, state.groups_logged)
        reserve = max(1, size) * state.place_bytes
        if state.count("live_bytes") + state.reserved_bytes + reserve > budget:
            full.append(number)
    limit = None if batch_groups is None or max_staleness is None else (max_staleness + 1) * batch_groups
    paced = (
        []
        if limit is None or sum(ahead) < limit
        else [number for number, mine in enumerate(ahead) if mine >= limit // len(shards)]
    )
    return {
        "max_bytes": budget * len(shards),
        "full": full,
        "paced": paced,
        "groups_ahead": sum(ahead),
        "groups_limit": limit,
        "batch_groups": batch_groups,
    }


def _server(run: Run) -> dict[str, Any]:
    """Memory of the server, in bytes, and why it refuses writes, if it does; less where it does not tell."""
    scripts = run.connection.scripts
    found: dict[str, Any] = {"refuses_writes": None}
    try:
        scripts.ping()
    except NotNowError as error:
        found["refuses_writes"] = str(error)
    try:
        info: Any = scripts.info()
    except ResponseError as error:  # not permitted, or not known to this server
        if isinstance(error, RETRYABLE):
            raise
        return found
    if all(isinstance(value, dict) for value in info.values()):  # of each node of a cluster
        info = min(info.values(), key=lambda node: node.get("maxmemory", 0), default={})
    names = ("used_memory", "maxmemory", "total_system_memory", "min_slaves_good_slaves")
    return found | {name: info[name] for name in names if name in info}
