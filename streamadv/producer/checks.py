"""Checks what callers of a producer pass, before anything is sent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, NamedTuple

from ..errors import SettingError, TrajectoryError
from ..messages import brief
from ..run.manifest import MAX_DEADLINE_S
from ..trajectory.checked import Checked
from ..trajectory.columns import OUTPUT_COLUMNS
from ..trajectory.fields import MAX_SHORT_TEXT, is_plain
from ..trajectory.schema import MAX_GROUP_SIZE, Role, Trajectory, parse_trajectory
from .extra_columns import GroupColumns
from .tickets import ANY_SLOT, GROUP_ROLES, GroupSpec, Ticket, new_group_id

MAX_METADATA_BYTES: Final = 1 << 16
_PLAIN_ID: Final = re.compile(r"[!-|~]{1,200}")
#: Fields of a record that None says something of; any other that is None is as not given.
MAY_BE_NONE: Final = frozenset(("reward", "model_version"))


class GroupRequest(NamedTuple):
    """The arguments of `begin_group`, as given."""

    size: int
    group_id: str | None
    data_source: str | None
    metadata: Mapping[str, Any] | None
    deadline_s: float | None
    redundancy: int | None
    timeout: float | None
    role: str = Role.TRAIN
    round: str | None = None
    columns: Any = None  # as given, or the GroupColumns made of them


def check_group(request: GroupRequest, redundancy: int) -> GroupSpec:
    """What all rollouts of a group share.

    Raises TrajectoryError for whatever a push to the group would raise it for, SettingError for a wrong deadline_s or
    timeout.
    """
    for name, value, low in (("group_size", request.size, 1), ("redundancy", redundancy, 0)):
        if not (isinstance(value, int) and low <= value <= MAX_GROUP_SIZE) or isinstance(value, bool):
            raise TrajectoryError(
                f"{name} is {brief(value)}, needs a whole number in {low}..{MAX_GROUP_SIZE}"
            )
    if request.role not in GROUP_ROLES:
        raise TrajectoryError(f"group: role is {brief(request.role)}, needs one of {', '.join(GROUP_ROLES)}")
    group_id = new_group_id() if request.group_id is None else request.group_id
    source, metadata = request.data_source, {} if request.metadata is None else request.metadata
    is_plain_one = is_plain_group(group_id, source) and request.round is None
    if is_plain_one and type(metadata) is dict and is_plain(metadata, depth=1):
        metadata = dict(metadata)
    else:
        fields = {"group_id": group_id, "data_source": source, "metadata": metadata}
        fields |= {"role": request.role, "round": request.round}
        shared = parse_trajectory(
            {**fields, "group_size": request.size, "rollout_index": 0, "status": "failed"}, "group"
        )
        group_id, source, metadata = shared.group_id, shared.data_source, shared.metadata
    if metadata and len(json.dumps(metadata)) > MAX_METADATA_BYTES:
        raise TrajectoryError(f"group: metadata: more than {MAX_METADATA_BYTES} bytes: use an extra column")
    check_deadline(request.deadline_s)
    check_seconds("timeout", request.timeout, zero=True)
    slots, role = request.size + redundancy, str(request.role)
    deadline_s = None if request.deadline_s is None else float(request.deadline_s)
    columns = request.columns.size if isinstance(request.columns, GroupColumns) else 0
    return GroupSpec(
        group_id, request.size, slots, source, deadline_s, role, request.round, columns, metadata
    )


def is_plain_group(group_id: Any, data_source: Any) -> bool:
    """Whether these need no further checks."""
    is_plain_id = type(group_id) is str and _PLAIN_ID.fullmatch(group_id) is not None
    is_source = type(data_source) is str and len(data_source) <= MAX_SHORT_TEXT and data_source.isascii()
    return is_plain_id and (data_source is None or is_source)


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


def check_deadline(deadline_s: float | None) -> None:
    """Raises SettingError unless it is None or seconds above 0, at most MAX_DEADLINE_S."""
    check_seconds("deadline_s", deadline_s, MAX_DEADLINE_S)


def check_seconds(name: str, value: float | None, limit: float = math.inf, *, zero: bool = False) -> None:
    """Raises SettingError unless `value` is None or seconds above 0 (`zero`: or 0), at most `limit`."""
    if value is None:
        return
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not (0 < value <= limit or (zero and value == 0)):
        most = "" if limit == math.inf else f", at most {limit}"
        raise SettingError(
            f"{name} is {brief(value)}, needs seconds {'from' if zero else 'above'} 0 on{most}"
        )


def check_records(records: Sequence[Trajectory | Mapping[str, Any]], ticket: Ticket) -> list[Trajectory]:
    """Records of the ticket's group as trajectories; fields that the ticket knows are filled in.

    Raises TrajectoryError for a wrong field, and for one that contradicts the ticket or another record.
    """
    trajectories: list[Trajectory] = []
    position_of: dict[int, int] = {}  # rollout index -> position
    for position, record in enumerate(records):
        trajectory = _with_ticket(record, ticket, f"group {ticket.group_id}, record {position}")
        if (trajectory.group_id, trajectory.group_size) != (ticket.group_id, ticket.group_size):
            raise TrajectoryError(
                f"record {position} belongs to group {trajectory.group_id} of {trajectory.group_size}, "
                f"not {ticket.group_id} of {ticket.group_size}"
            )
        if trajectory.round not in (None, ticket.round):
            raise TrajectoryError(
                f"record {position}: round is {brief(trajectory.round)}, group {ticket.group_id} was begun with "
                f"{brief(ticket.round)}: give it to producer.group"
            )
        index = trajectory.rollout_index
        if index >= ticket.slots:
            raise TrajectoryError(
                f"rollout_index is {index}, group {ticket.group_id} has {ticket.slots} slots "
                f"(0 to {ticket.slots - 1})"
            )
        first = position_of.setdefault(index, position)
        if first != position:
            raise TrajectoryError(
                f"records {first} and {position} of group {ticket.group_id} both have "
                f"rollout_index {index}: name another in each"
            )
        trajectories.append(trajectory)
    return trajectories


def check_roles(trajectories: Sequence[Checked], role: str | None = None) -> str:
    """The role of the group that trajectories may be in together; role: the one it has, None = not known.

    Raises TrajectoryError for eval beside train or baseline.
    """
    role = role or (Role.EVAL if trajectories[0].role == Role.EVAL else Role.TRAIN)
    for trajectory in trajectories:
        if (trajectory.role == Role.EVAL) != (role == Role.EVAL):
            raise TrajectoryError(
                f"role is {trajectory.role} in trajectory {trajectory.group_id}/{trajectory.rollout_index}, its group "
                f"has role {role}: evaluate in groups of their own, begun with role='eval'"
            )
    return role


def _with_ticket(record: Trajectory | Mapping[str, Any], ticket: Ticket, where: str) -> Trajectory:
    """A record as a trajectory, with what the ticket knows and the record does not say.

    Raises TrajectoryError for one that does not say its place where the ticket is of any slot.
    """
    if not isinstance(record, Mapping):
        trajectory, given = parse_trajectory(record, where), record.model_fields_set
        known: dict[str, Any] = {}
        if "model_version" not in given and ticket.model_version is not None:
            known["model_version"] = ticket.model_version
        if "role" not in given and ticket.role != Role.TRAIN:
            known["role"] = Role(ticket.role)
        return trajectory.model_copy(update=known) if known else trajectory
    record = {name: value for name, value in record.items() if value is not None or name in MAY_BE_NONE}
    if ticket.rollout_index == ANY_SLOT and "rollout_index" not in record:
        raise TrajectoryError(f"{where}: rollout_index is missing, needs one of 0 to {ticket.slots - 1}")
    defaults: dict[str, Any] = {
        "group_id": ticket.group_id,
        "group_size": ticket.group_size,
        "rollout_index": ticket.rollout_index,
        "role": ticket.role,
    }
    if ticket.model_version is not None:
        defaults["model_version"] = ticket.model_version
    if ticket.data_source is not None:
        defaults["data_source"] = ticket.data_source
    metadata = record.get("metadata", {})
    if isinstance(metadata, Mapping):
        metadata = {**ticket.metadata, **metadata}
    trajectory = parse_trajectory({**defaults, **record, "metadata": metadata}, where)
    for row in trajectory.rows[:1]:  # all have the same columns
        if computed := [name for name in OUTPUT_COLUMNS if name in row.columns]:
            raise TrajectoryError(
                f"{where}: {computed[0]} is what the chain computes, nobody pushes it: leave it out or rename it"
            )
    return trajectory


def check_one_group(trajectories: Sequence[Trajectory]) -> None:
    """Raises TrajectoryError unless all are trajectories of one group and size."""
    for position, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            raise TrajectoryError(f"record {position} is {brief(trajectory)}, needs to be a Trajectory")
    first = trajectories[0]
    for trajectory in trajectories:
        if (trajectory.group_id, trajectory.group_size) != (first.group_id, first.group_size):
            raise TrajectoryError(
                f"group {trajectory.group_id} of {trajectory.group_size} is pushed together with group "
                f"{first.group_id} of {first.group_size}: push one group at a time"
            )
