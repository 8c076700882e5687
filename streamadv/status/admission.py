"""Which shards refuse another group, computed outside the scripts that decide it (`lua/lib/admit.lua`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redis.exceptions import ResponseError

from ..errors import SettingError
from ..run import Run
from ..run.budget import byte_budget
from ..store.replies import as_count, as_whole
from ..store.retry import RETRYABLE, NotNowError
from .model import Admission, Server
from .shard import ShardState

INFO_FIELDS: Final = (
    *("used_memory", "maxmemory", "total_system_memory", "min_slaves_good_slaves"),
    *("maxmemory_policy", "aof_enabled"),
)


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
            max_staleness = as_whole(shard.trainer.get("max_staleness"))
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
