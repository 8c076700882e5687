"""Checks records of a push: by hand, because pydantic takes several times as long.

Unusual records, and every wrong one, are left to the full check, which alone words the errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite
from typing import Any, Final

import numpy as np

from ..errors import TrajectoryError
from ..messages import brief
from ..trajectory.columns import (
    COLUMN_NAME,
    KNOWN_COLUMNS,
    OUTPUT_COLUMNS,
    REQUIRED_COLUMNS,
    SHORT_COLUMN,
    check_values,
    unchecked_array,
)
from ..trajectory.fields import MAX_SHORT_TEXT, MAX_VERSION, check_names, is_plain
from ..trajectory.members import Checked, CheckedRow, StepSpan
from ..trajectory.schema import (
    MAX_REWARDS,
    MAX_ROWS,
    MAX_STEPS,
    Column,
    Role,
    Status,
    Step,
    Trajectory,
    extra_column,
    parse_trajectory,
)
from .tickets import ANY_SLOT, Ticket

_STATUSES: Final = frozenset(Status)
_ROLES: Final = frozenset(Role)
#: What the pipeline says of a trajectory; of the other fields, a ticket says the group's.
_OUTPUTS: Final = frozenset(("batch", "staleness", "outcome", "reason", *OUTPUT_COLUMNS))
_FIELDS: Final = frozenset(
    (
        *("rollout_index", "reward", "reward_later", "rewards", "status", "role", "model_version"),
        *("data_source", "metadata", "steps", "rows", "agent"),
    )
)
_ROW_FIELDS: Final = frozenset(("agent", "reward"))
_STEP_FIELDS: Final = frozenset(Step.model_fields)
_REQUIRED: Final = frozenset(REQUIRED_COLUMNS)
_NUMBERS: Final = (float, int, np.floating, np.integer)
#: Fields of a record that None says something of; any other that is None is as not given.
_MAY_BE_NONE: Final = frozenset(("reward", "model_version"))


class _Unclear(ValueError):
    """The full check has to look at it."""


def read_by_hand(records: Sequence[Any], ticket: Ticket) -> list[Checked] | None:
    """What `check_records` would make of the records; None if it has to look at them.

    ticket: as `begin` or `checked_ticket` makes it.
    """
    if type(records) not in (list, tuple):
        return None
    try:
        found = [_read(record, ticket) for record in records]
        rows = [row.columns for one in found for row in one.rows]
        for name in {name: None for row in rows for name in row}:
            arrays = [row[name] for row in rows if name in row]
            if len(arrays) > 1 and sum(array.nbytes for array in arrays) <= SHORT_COLUMN:
                arrays = [np.concatenate(arrays)]  # a check costs more than what it looks at
            for array in arrays:
                check_values(name, array)
    except (ValueError, TypeError, OverflowError):
        return None
    return found if len({one.rollout_index for one in found}) == len(found) else None


def _read(record: Any, ticket: Ticket) -> Checked:
    if type(record) is not dict:
        raise _Unclear
    get, rows = record.get, _rows(record)
    index, reward, later = get("rollout_index"), get("reward"), get("reward_later")
    index = ticket.rollout_index if index is None else _whole(index)
    scored = "reward" in record
    later = False if later is None else later
    status, role, source = get("status"), get("role"), get("data_source")
    status = Status.COMPLETED if status is None else status
    role = ticket.role if role is None else role
    metadata, named, steps = get("metadata"), get("rewards"), get("steps")
    if metadata is None:
        metadata = ticket.metadata
    elif type(metadata) is dict:
        metadata = {**ticket.metadata, **metadata}
    if (
        not 0 <= index < ticket.slots
        or type(later) is not bool
        or (later and scored)
        or not (isinstance(status, str) and status in _STATUSES)
        or not (isinstance(role, str) and role in _ROLES)
        or (role == Role.EVAL) != (ticket.role == Role.EVAL)
        or type(metadata) is not dict
        or not (not metadata or is_plain(metadata))
        or not (rows or status not in (Status.COMPLETED, Status.TRUNCATED))
    ):
        raise _Unclear
    return Checked(
        ticket.group_id,
        ticket.group_size,
        index,
        rows,
        None if reward is None else _number(reward),
        scored,
        later,
        {} if named is None else _named(named),
        status,
        role,
        _version(record.get("model_version", ticket.model_version)),
        ticket.data_source if source is None else _text(source),
        metadata,
        () if steps is None else _steps(steps, [len(row.columns["input_ids"]) for row in rows]),
    )


@lru_cache(256)
def _columns_of(names: tuple[Any, ...], fields: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the names in a record or a row: known columns, in the order of writing, and what is none of its `fields`."""
    if not all(type(name) is str and name not in _OUTPUTS for name in names):
        raise _Unclear
    others = [name for name in names if name not in KNOWN_COLUMNS and name not in fields]
    return tuple([name for name in KNOWN_COLUMNS if name in names]), tuple(others)


def _rows(record: Mapping[str, Any]) -> list[CheckedRow]:
    """Those in its field `rows`, or the record itself if it has columns."""
    known, others = _columns_of(tuple(record), _FIELDS)
    has_columns = record.get("agent") is not None or any(
        record[name] is not None for name in (*known, *others)
    )
    given, fields = record.get("rows"), _ROW_FIELDS
    if given in (None, []):
        given, fields = [record] if has_columns else [], _FIELDS
    elif has_columns or type(given) is not list or len(given) > MAX_ROWS:
        raise _Unclear
    rows = []
    for data in given:
        if type(data) is not dict:
            raise _Unclear
        known, others = _columns_of(tuple(data), fields)
        columns = {name: unchecked_array(name, value) for name in known if (value := data[name]) is not None}
        if not columns.keys() >= _REQUIRED or len(set(map(len, columns.values()))) > 1:
            raise _Unclear
        extras: dict[str, Column] = {}
        agent = data.get("agent")
        reward = None if data is record else data.get("reward")  # that of a record is the trajectory's
        if others:
            names = [name for name in others if data[name] is not None]
            check_names(names)
            if not all(map(COLUMN_NAME.fullmatch, names)):
                raise _Unclear
            extras = {name: extra_column(name, data[name], len(columns["input_ids"])) for name in names}
        agent = None if agent is None else _text(agent)
        reward = None if reward is None else _number(reward)
        rows.append(CheckedRow(columns, extras, agent, reward))
    if len({frozenset((*row.columns, *row.extras)) for row in rows}) > 1:
        raise _Unclear
    return rows


def _steps(steps: Any, lengths: Sequence[int]) -> list[StepSpan]:
    """lengths: tokens of the rows."""
    if type(steps) not in (list, tuple) or len(steps) > MAX_STEPS:
        raise _Unclear
    spans = []
    for step in steps:
        if type(step) is Step:
            span = StepSpan.of(step)
        elif type(step) is dict and step.keys() <= _STEP_FIELDS:
            get, key = step.get, step.get("state_key")
            key = None if key is None else _text(key)
            row, start, end = _whole(get("row", 0)), _whole(get("start")), _whole(get("end"))
            span = StepSpan(row, start, end, _number(get("reward", 0.0)), key)
        else:
            raise _Unclear
        if not (0 <= span.row < len(lengths) and 0 <= span.start < span.end <= lengths[span.row]):
            raise _Unclear
        spans.append(span)
    return spans


def _named(rewards: Any) -> dict[str, float]:
    if type(rewards) is not dict or len(rewards) > MAX_REWARDS:
        raise _Unclear
    return {_text(name): _number(value) for name, value in rewards.items()}


def _version(version: Any) -> int | tuple[int, int] | None:
    if version is None:
        return None
    oldest, newest = map(_whole, version if type(version) in (list, tuple) else (version, version))
    if not 0 <= oldest <= newest < MAX_VERSION:
        raise _Unclear
    return (oldest, newest) if type(version) in (list, tuple) else oldest


def _number(value: Any) -> float:
    if isinstance(value, _NUMBERS) and isfinite(value):
        return float(value)
    raise _Unclear


def _whole(value: Any) -> int:
    if type(value) is int or isinstance(value, np.integer):
        return int(value)
    raise _Unclear


def _text(value: Any) -> str:
    """Raises UnicodeEncodeError for half of a surrogate pair."""
    if type(value) is str and len(value) <= MAX_SHORT_TEXT and (value.isascii() or value.encode()):
        return value
    raise _Unclear


# The full check


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
    check_roles(trajectories, ticket.role)
    return trajectories


def check_roles(trajectories: Sequence[Trajectory], role: str | None = None) -> str:
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
    record = {name: value for name, value in record.items() if value is not None or name in _MAY_BE_NONE}
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
    first = trajectories[0]
    for position, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            raise TrajectoryError(f"record {position} is {brief(trajectory)}, needs to be a Trajectory")
        if (trajectory.group_id, trajectory.group_size) != (first.group_id, first.group_size):
            raise TrajectoryError(
                f"group {trajectory.group_id} of {trajectory.group_size} is pushed together with group "
                f"{first.group_id} of {first.group_size}: push one group at a time"
            )
