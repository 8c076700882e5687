"""Tickets of an admitted group, and the records pushed under them."""

from __future__ import annotations

import json
import math
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Real
from typing import Any, Final, NamedTuple, Self

from pydantic import TypeAdapter

from ..errors import SettingError, TrajectoryError
from ..messages import brief, first_problem
from ..trajectory.schema import MAX_GROUP_SIZE, Trajectory, parse_trajectory

MAX_METADATA_BYTES: Final = 1 << 16


class _Watched:
    """Something whose owner wants to know when it leaves the process; no field, so that copies are equal."""

    __slots__ = ("_watch",)
    _watch: set[int]

    def watched_by(self, watch: set[int]) -> Self:
        """This one, which puts its rollout_index into `watch` when it is handed out."""
        object.__setattr__(self, "_watch", watch)
        return self


@dataclass(frozen=True, slots=True)
class Ticket(_Watched):
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
        self.hand_out()
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)})

    def __reduce__(self) -> tuple[Any, ...]:
        self.hand_out()
        return Ticket, tuple(getattr(self, each.name) for each in fields(self))

    def hand_out(self) -> None:
        """Say that somebody else plays this rollout, as `to_json` and pickling do."""
        watch: set[int] | None = getattr(self, "_watch", None)
        if watch is not None:
            watch.add(self.rollout_index)

    @classmethod
    def from_json(cls, text: str | bytes) -> Ticket:
        """The ticket that `to_json` wrote. Raises TrajectoryError for anything else."""
        try:
            return _ticket_type().validate_json(text)
        except ValueError as error:
            raise TrajectoryError(f"ticket: {first_problem(error)}") from error


@cache
def _ticket_type() -> TypeAdapter[Ticket]:
    return TypeAdapter(Ticket)


class PushResult(NamedTuple):
    """What became of the records of one push, one code each.

    'pushed'; 'duplicate' (that place was taken before, nothing changed); 'surplus' or 'late' (the group had
    ended: complete without it, or expired). `indices`: the rollout_index of each that was 'pushed'; for `cancel`
    the places that it has cancelled.
    """

    codes: list[str]
    indices: Sequence[int] = ()

    def count(self, code: str) -> int:
        return self.codes.count(code)


def new_group_id() -> str:
    """A UUIDv7 (RFC 9562): unique across restarts, ordered by time."""
    value = (int(time.time() * 1000) & (1 << 48) - 1) << 80 | secrets.randbits(80)
    return str(uuid.UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62))


def check_group(
    group_id: str, size: int, redundancy: int, data_source: str | None, metadata: Mapping[str, Any] | None
) -> Trajectory:
    """What all rollouts of a group share, as a trajectory of it that holds nothing else.

    Raises TrajectoryError for whatever a push to the group would raise it for.
    """
    for name, value, low in (("group_size", size, 1), ("redundancy", redundancy, 0)):
        if not (isinstance(value, int) and low <= value <= MAX_GROUP_SIZE) or isinstance(value, bool):
            raise TrajectoryError(
                f"{name} is {brief(value)}, needs a whole number in {low}..{MAX_GROUP_SIZE}"
            )
    shared = parse_trajectory(
        {
            "group_id": group_id,
            "group_size": size,
            "rollout_index": 0,
            "status": "failed",
            "data_source": data_source,
            "metadata": {} if metadata is None else metadata,
        },
        "group",
    )
    if shared.metadata and len(json.dumps(shared.metadata)) > MAX_METADATA_BYTES:
        raise TrajectoryError(f"group: metadata: more than {MAX_METADATA_BYTES} bytes: use an extra column")
    return shared


def check_score(
    group_id: str, rollout_index: int, reward: float | None, rewards: Mapping[str, float] | None
) -> Trajectory:
    """A reward that comes later, as a trajectory that holds nothing else. Raises TrajectoryError as its push would."""
    return parse_trajectory(
        {
            "group_id": group_id,
            "group_size": MAX_GROUP_SIZE,
            "rollout_index": rollout_index,
            "status": "failed",
            "reward": reward,
            "rewards": {} if rewards is None else rewards,
        },
        f"score of {brief(group_id)}/{brief(rollout_index)}",
    )


def check_seconds(
    name: str, value: float | None, limit: float = math.inf, *, zero: bool = False
) -> float | None:
    """`value` if it is None or a number of seconds above 0 (`zero`: or 0), at most `limit`. Raises SettingError."""
    if value is None:
        return None
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not (0 < value <= limit or (zero and value == 0)):
        most = "" if limit == math.inf else f", at most {limit}"
        raise SettingError(
            f"{name} is {brief(value)}, needs seconds {'from' if zero else 'above'} 0 on{most}"
        )
    return float(value)


def prepare(records: Sequence[Trajectory | Mapping[str, Any]], ticket: Ticket) -> list[Trajectory]:
    """Records of one group as trajectories: what the ticket knows is filled in, what it contradicts is refused."""
    prepared: list[Trajectory] = []
    first: dict[int, int] = {}  # rollout index -> position
    for position, record in enumerate(records):
        where = f"group {ticket.group_id}, record {position}"
        if not isinstance(record, Mapping):
            trajectory = parse_trajectory(record, where)
            if "model_version" not in record.model_fields_set and ticket.model_version is not None:
                trajectory = record.model_copy(update={"model_version": ticket.model_version})
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
            metadata = record.get("metadata", {})
            if isinstance(metadata, Mapping):
                metadata = {**ticket.metadata, **metadata}
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
