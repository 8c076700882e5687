"""The trainer as a run has it: how far it is, and whether its ranks are alive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..run import Run
from ..run.ranks import HeardRank, heard_ranks
from ..store.replies import as_count, as_texts
from .model import Trainer, TrainerState
from .shard import ShardState


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
