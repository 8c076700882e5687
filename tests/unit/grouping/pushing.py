"""The push script called as producers call it, for one or several groups at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from streamadv.producer.requests import GroupPush, Push
from streamadv.run import Run
from streamadv.store.exchange import Payloads
from streamadv.store.scripts import ScriptCall, run_script, run_transaction
from streamadv.trajectory.schema import Trajectory
from tests.support import packets_of

MB: Final = 1 << 20
#: max_trajectory_bytes, max_bytes, shards, groups elsewhere, max_staleness, batch_groups, producer, may be new.
LIMITS: Final[tuple[Any, ...]] = ("test", f"{MB} {1 << 40} 1 - - - 1")


def transaction_of(
    run: Run,
    groups: Sequence[Sequence[Trajectory]],
    slots: int | None = None,
    limits: tuple[Any, ...] = LIMITS,
) -> tuple[Payloads, ScriptCall]:
    pushes = []
    for trajectories in groups:
        first = trajectories[0]
        spec = (first.group_id, f"train {first.group_size} {slots or first.group_size} 3600000 ")
        pushes.append(GroupPush(spec, 0, packets_of(trajectories, MB)))
    scorer = next(iter(run.manifest.scorers), "")
    return Push(run.keys.home, scorer, limits, pushes).transaction()


def push_together(
    run: Run, *groups: Sequence[Trajectory], slots: int | None = None, limits: tuple[Any, ...] = LIMITS
) -> list[list[str]]:
    """Push trajectories of several groups in one call. Returns a reply for each group: codes in their order."""
    return _replies(groups, run_transaction(run.connection, *transaction_of(run, groups, slots, limits)))


def push_without_payloads(
    run: Run, *groups: Sequence[Trajectory], slots: int | None = None
) -> list[list[str]]:
    """The same after the server has stood still for so long that the payloads have gone."""
    _, call = transaction_of(run, groups, slots)
    return _replies(groups, run_script(run.connection.push, call))


def _replies(groups: Sequence[Sequence[Trajectory]], replies: Any) -> list[list[str]]:
    texts = [[part.decode() if isinstance(part, bytes) else str(part) for part in reply] for reply in replies]
    return [
        ["ok", *in_order(trajectories, codes)] if state == "ok" else [state, *codes]
        for trajectories, (state, *codes) in zip(groups, texts, strict=True)
    ]


def in_order(trajectories: Sequence[Trajectory], codes: Sequence[str]) -> list[str]:
    """Codes of packets' members in the order of the trajectories."""
    positions = [position for packet in packets_of(trajectories, MB) for position in packet.positions]
    codes = codes or ["pushed"] * len(positions)  # no word of any: all are
    return [code for _, code in sorted(zip(positions, codes, strict=True))]
