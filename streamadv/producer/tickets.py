"""Groups as callers ask for them, and tickets: the right to push the rollouts of an admitted one, from any process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

from pydantic import AfterValidator, TypeAdapter

from .. import doors
from ..errors import TrajectoryError
from ..messages import brief, check_number, first_problem, whole_number
from ..run.manifest import MAX_DEADLINE_S
from ..run.packets import MAX_BYTES
from ..trajectory.fields import MAX_SHORT_TEXT, GroupId, RoundName, ShortText, is_plain
from ..trajectory.schema import MAX_GROUP_SIZE, Role, Trajectory, parse_trajectory
from .extra_columns import GroupColumns

#: A group's rollouts are for training, with baselines among them, or for evaluation.
GROUP_ROLES: Final = (str(Role.TRAIN), str(Role.EVAL))
#: The rollout_index of a ticket for records that say their own. It leaves no process.
ANY_SLOT: Final = -1


@dataclass(frozen=True)
class Ticket:
    """The right to push one rollout of an admitted group, from any process: `to_json` and `from_json`."""

    group_id: GroupId
    rollout_index: int
    """Number of its slot, 0 to `slots` - 1."""
    group_size: int
    slots: int
    """Slots of the group: group_size + redundancy."""
    epoch: int
    """Fencing epoch of the trainer session under which the group was opened; 0 before there is a trainer."""
    model_version: int | None
    data_source: ShortText | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    role: str = "train"
    """Of the group: train, or eval."""
    deadline_s: float | None = None
    """Seconds from the group's opening, also if a server that has lost it opens it again; None = the run's."""
    round: RoundName | None = None
    """Of an evaluation group: the round it is part of."""
    columns: int = 0
    """Bytes of the group's own columns; 0 = it has none."""
    _watch: ClassVar[set[int] | None] = None  # no field, so that copies are equal

    def watched_by(self, watch: set[int]) -> Self:
        """This one, which puts its rollout_index into `watch` when it is handed out."""
        object.__setattr__(self, "_watch", watch)
        return self

    def to_json(self) -> str:
        """One line of JSON, for `from_json` in the process that plays the rollout."""
        self.hand_out()
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("deadline_s", "round", "columns"):
            if not values[name]:
                del values[name]
        return json.dumps(values)

    def __reduce__(self) -> tuple[Any, ...]:
        self.hand_out()
        return Ticket, tuple(getattr(self, item.name) for item in fields(self))

    def hand_out(self) -> None:
        """Say that somebody else plays this rollout, as `to_json` and pickling do."""
        if self._watch is not None:
            self._watch.add(self.rollout_index)

    @classmethod
    def from_json(cls, text: str | bytes) -> Ticket:
        """The ticket that `to_json` wrote. Raises TrajectoryError for anything else."""
        try:
            return _ticket_type().validate_json(text)
        except ValueError as error:
            raise TrajectoryError(f"ticket: {first_problem(error)}") from None


@cache
def _ticket_type() -> TypeAdapter[Ticket]:
    return TypeAdapter(Annotated[Ticket, AfterValidator(_of_some_group)])


def checked_ticket(ticket: Ticket) -> Ticket:
    """A copy. Raises TrajectoryError unless there may be such a group."""
    try:
        return _ticket_type().validate_python(
            {item.name: getattr(ticket, item.name) for item in fields(ticket)}
        )
    except ValueError as error:
        raise TrajectoryError(f"ticket: {first_problem(error)}") from None


def _of_some_group(ticket: Ticket) -> Ticket:
    """Raises ValueError for numbers that no group has: a push to more slots would wait for room without end."""
    most = 2 * MAX_GROUP_SIZE
    bounds = {
        "rollout_index": (0, most - 1),
        "group_size": (1, MAX_GROUP_SIZE),
        "slots": (1, most),
        "epoch": (0, 2**53),
        "deadline_s": (0, MAX_DEADLINE_S),
        "columns": (0, MAX_BYTES),
    }
    if ticket.role not in GROUP_ROLES:
        raise ValueError(f"role is {brief(ticket.role)}, needs one of {', '.join(GROUP_ROLES)}")
    for name, (low, high) in bounds.items():
        value = getattr(ticket, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} is {brief(value)}, needs {low}..{high}")
    return ticket


class GroupSpec(NamedTuple):
    """What all rollouts of a group share."""

    group_id: str
    size: int
    slots: int
    data_source: str | None = None
    deadline_s: float | None = None  # from its opening; None = the run's group_deadline_s
    role: str = Role.TRAIN
    round: str | None = None
    columns: int = 0  # bytes of its own columns
    metadata: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, ticket: Ticket) -> GroupSpec:
        """The group of a ticket."""
        shared = (ticket.group_id, ticket.group_size, ticket.slots, ticket.data_source)
        return cls(*shared, ticket.deadline_s, ticket.role, ticket.round, ticket.columns)


class PushResult(NamedTuple):
    """What became of the records of one push, one code each.

    'pushed'; 'duplicate' (the slot had ended before, nothing changed); 'surplus' or 'late' (the group had ended:
    complete without it, or expired). `indices`: the rollout_index of each that was 'pushed'; of `cancel` the slots that
    it has cancelled.
    """

    codes: list[str]
    indices: Sequence[int] = ()

    def count(self, code: str) -> int:
        return self.codes.count(code)


def new_group_id() -> str:
    """A UUIDv7 (RFC 9562): unique across restarts, ordered by time."""
    value = (int(doors.wall() * 1000) & (1 << 48) - 1) << 80 | int.from_bytes(doors.random_bytes(10))
    text = f"{value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


# What a caller asks for

MAX_METADATA_BYTES: Final = 1 << 16
_PLAIN_ID: Final = re.compile(r"[!-|~]{1,200}")


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
    """What all rollouts of a group share. redundancy: the run's.

    Raises TrajectoryError for whatever a push to the group would raise it for, SettingError for a wrong deadline_s or
    timeout.
    """
    size = whole_number("group_size", request.size, 1, MAX_GROUP_SIZE, error=TrajectoryError)
    if request.redundancy is not None:
        redundancy = request.redundancy
    elif request.role == Role.EVAL:
        # Every rollout of an evaluation counts, unless the caller wants spare ones.
        redundancy = 0
    redundancy = whole_number("redundancy", redundancy, 0, MAX_GROUP_SIZE, error=TrajectoryError)
    if request.role not in GROUP_ROLES:
        raise TrajectoryError(f"group: role is {brief(request.role)}, needs one of {', '.join(GROUP_ROLES)}")
    group_id = new_group_id() if request.group_id is None else request.group_id
    source, metadata = request.data_source, {} if request.metadata is None else request.metadata
    is_plain_id = (
        type(group_id) is str and _PLAIN_ID.fullmatch(group_id) is not None and request.round is None
    )
    is_source = type(source) is str and len(source) <= MAX_SHORT_TEXT and source.isascii()
    if (
        is_plain_id
        and (source is None or is_source)
        and type(metadata) is dict
        and (not metadata or is_plain(metadata, depth=1))
    ):
        metadata = dict(metadata)
    else:
        told = {"group_id": group_id, "data_source": source, "metadata": metadata, "round": request.round}
        rest = {"role": request.role, "group_size": size, "rollout_index": 0, "status": "failed"}
        shared = parse_trajectory({**told, **rest}, "group")
        group_id, source, metadata = shared.group_id, shared.data_source, shared.metadata
    if metadata and len(json.dumps(metadata)) > MAX_METADATA_BYTES:
        raise TrajectoryError(f"group: metadata: more than {MAX_METADATA_BYTES} bytes: use an extra column")
    check_number("deadline_s", request.deadline_s, "seconds", most=MAX_DEADLINE_S, or_none=True)
    check_number("timeout", request.timeout, "seconds", zero=True, or_none=True)
    slots, role = size + redundancy, str(request.role)
    deadline_s = None if request.deadline_s is None else float(request.deadline_s)
    columns = request.columns.size if isinstance(request.columns, GroupColumns) else 0
    return GroupSpec(group_id, size, slots, source, deadline_s, role, request.round, columns, metadata)


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
