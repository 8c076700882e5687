"""The push script called as producers call it, for one or several groups at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from streamadv.producer.encode import GroupPush, push_call
from streamadv.producer.requests import Transaction
from streamadv.run import Run
from streamadv.store.calls import run_script, run_transaction
from streamadv.trajectory.packet_encoding import encode_packets
from streamadv.trajectory.schema import Trajectory

MB: Final = 1 << 20
#: max_trajectory_bytes, max_bytes, shards, groups elsewhere, max_staleness, batch_groups, producer.
LIMITS: Final = (MB, 1 << 40, 1, "", "", "", "test")


def transaction_of(
    run: Run, groups: Sequence[Sequence[Trajectory]], slots: int | None = None, limits: Sequence[Any] = LIMITS
) -> Transaction:
    pushes = []
    for trajectories in groups:
        first = trajectories[0]
        spec = [first.group_id, first.group_size, slots or first.group_size, "", 3_600_000]
        pushes.append(GroupPush(spec, 0, encode_packets(trajectories, MB)))
    return push_call(run.manifest, run.keys.home, pushes, limits)


def push_together(
    run: Run, *groups: Sequence[Trajectory], slots: int | None = None, limits: Sequence[Any] = LIMITS
) -> list[list[str]]:
    """Push trajectories of several groups in one call. Returns a reply for each group, as text."""
    call = transaction_of(run, groups, slots, limits)
    return _texts(run_transaction(run.connection, call.payloads, call.call))


def push_without_payloads(
    run: Run, *groups: Sequence[Trajectory], slots: int | None = None
) -> list[list[str]]:
    """The same after the server has stood still for so long that the payloads have gone."""
    return _texts(run_script(run.connection.push, transaction_of(run, groups, slots).call))


def _texts(replies: Any) -> list[list[str]]:
    return [[part.decode() if isinstance(part, bytes) else str(part) for part in reply] for reply in replies]
