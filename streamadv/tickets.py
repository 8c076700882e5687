"""Tickets of an admitted group, and the records pushed under them."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from .errors import TrajectoryError
from .schema import Trajectory, parse_trajectory


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to push one rollout of an admitted group, from any process: `to_json` and `from_json`."""

    group_id: str
    rollout_index: int
    group_size: int
    places: int
    epoch: int
    model_version: int | None
    data_source: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON, for `from_json` in whichever process plays the rollout."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Ticket:
        return cls(**json.loads(text))


class PushResult(NamedTuple):
    """What became of the records of one push, one code each.

    'pushed'; 'duplicate' (that place was taken before, nothing changed); 'surplus' or 'late' (the group had
    ended: complete without it, or expired).
    """

    codes: list[str]

    def count(self, code: str) -> int:
        return self.codes.count(code)


def new_group_id() -> str:
    """A UUIDv7 (RFC 9562): unique across restarts, ordered by time."""
    value = (int(time.time() * 1000) & (1 << 48) - 1) << 80 | secrets.randbits(80)
    return str(uuid.UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62))


def prepare(records: Sequence[Trajectory | Mapping[str, Any]], ticket: Ticket) -> list[Trajectory]:
    """Records of one group as trajectories: what the ticket knows is filled in, what it contradicts is refused."""
    prepared: list[Trajectory] = []
    first: dict[int, int] = {}  # rollout index -> position
    for position, record in enumerate(records):
        if isinstance(record, Trajectory):
            trajectory = record
        else:
            known = {
                "group_id": ticket.group_id,
                "group_size": ticket.group_size,
                "rollout_index": ticket.rollout_index,
            }
            if ticket.model_version is not None:
                known["model_version"] = ticket.model_version
            if ticket.data_source is not None:
                known["data_source"] = ticket.data_source
            metadata = {**ticket.metadata, **record.get("metadata", {})}
            where = f"group {ticket.group_id}, record {position}"
            trajectory = parse_trajectory({**known, **record, "metadata": metadata}, where)
        if (trajectory.group_id, trajectory.group_size) != (ticket.group_id, ticket.group_size):
            raise TrajectoryError(
                f"record {position} belongs to group {trajectory.group_id} of {trajectory.group_size}, "
                f"not {ticket.group_id} of {ticket.group_size}"
            )
        if trajectory.rollout_index >= ticket.places:
            raise TrajectoryError(
                f"rollout_index is {trajectory.rollout_index}, group {ticket.group_id} has {ticket.places} places"
            )
        if first.setdefault(trajectory.rollout_index, position) != position:
            raise TrajectoryError(
                f"records {first[trajectory.rollout_index]} and {position} of group {ticket.group_id} both have "
                f"rollout_index {trajectory.rollout_index}: name another in each"
            )
        prepared.append(trajectory)
    return prepared
