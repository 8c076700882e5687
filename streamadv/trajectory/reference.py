"""The reference: one trajectory as the streams know it, JSON with the scalars that stages need without its columns.

A producer writes it beside the payload. The grouper, the scorers, the trainer and the advantage workers read it, so
that grouping, planning and outcome estimators never touch a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter
from pydantic_core import to_json

from .columns import HEADER, KNOWN_COLUMNS, MAX_COLUMNS, REQUIRED_COLUMNS
from .fields import ShortText
from .schema import MAX_ROWS, MAX_STEPS, Role, Status, Trajectory

MAX_ROW_TOKENS: Final = 1 << 27

#: Fewest stored bytes of a token: the two columns that every row has.
MIN_TOKEN_BYTES: Final = sum(KNOWN_COLUMNS[name].itemsize for name in REQUIRED_COLUMNS)

Length = Annotated[int, Field(ge=0, le=MAX_ROW_TOKENS)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class StepSpan(NamedTuple):
    """A `schema.Step` as the compact list that stands in references and payload headers."""

    row: Count
    start: Count
    end: Count
    reward: FiniteFloat
    state_key: ShortText | None


@dataclass(frozen=True, slots=True)
class Reference:
    """One trajectory as the streams know it. Satisfies `algorithms.packed.Packable`.

    A slotted dataclass of tuples and not a pydantic model: a trainer keeps thousands of references alive, and Python's
    garbage collector visits every tracked object again and again. Payloads keep their header encoded for this reason.
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    group_id: str
    rollout_index: int
    key: str  # of the payload
    size: Annotated[int, Field(ge=0, le=1 << 40)]  # payload bytes
    row_lengths: Annotated[tuple[Length, ...], Field(max_length=MAX_ROWS)]  # tokens
    row_trainable: Annotated[tuple[Length, ...], Field(max_length=MAX_ROWS)]  # tokens with response_mask 1
    status: Status = Status.COMPLETED
    reward: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] = field(default_factory=dict)
    role: Role = Role.TRAIN
    versions: tuple[Count, Count] | None = None  # oldest and newest over trainable tokens
    epoch: int = 0  # the trainer's fencing epoch when the group began
    data_source: str | None = None
    steps: Annotated[tuple[StepSpan, ...], Field(max_length=MAX_STEPS)] = ()
    columns: Annotated[tuple[str, ...], Field(max_length=2 * MAX_COLUMNS)] = ()  # stored ones, sorted

    @property
    def is_baseline(self) -> bool:
        return self.role is Role.BASELINE

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    def staleness(self, k: int) -> int | None:
        """`k` minus the oldest version over trainable tokens, at least 0; None without a version."""
        return None if self.versions is None else max(0, k - self.versions[0])


#: Reads and writes references. Raises pydantic's ValidationError.
REFERENCE: Final = TypeAdapter(Reference)


def encode_reference(trajectory: Trajectory, fields: Mapping[Any, Any], size: int) -> bytes:
    """The JSON of a reference to a payload of `fields` and `size` bytes, without `key` and `epoch`.

    Those two differ from send to send: `sent_reference` adds them.
    """
    reference = scalars(trajectory)
    versions = trajectory.version_span
    if versions is not None:
        reference["versions"] = versions
    reference["size"] = size
    reference["row_lengths"] = [len(row) for row in trajectory.rows]
    reference["row_trainable"] = [int(np.count_nonzero(row.response_mask)) for row in trajectory.rows]
    reference["columns"] = sorted(fields.keys() - {HEADER})
    return to_json(reference)


def sent_reference(reference: bytes, key: str, epoch: int) -> bytes:
    """An encoded reference, completed by its payload's key and the fencing epoch under which its group began."""
    return b'%b,"key":%b,"epoch":%d}' % (reference[:-1], to_json(key), epoch)


def scalars(trajectory: Trajectory) -> dict[str, Any]:
    """The fields that reference and payload header share. Not validated again, because `trajectory` is valid."""
    fields: dict[str, Any] = {
        "group_id": trajectory.group_id,
        "rollout_index": trajectory.rollout_index,
        "status": trajectory.status,
    }
    if trajectory.reward is not None:
        fields["reward"] = trajectory.reward
    if trajectory.rewards:
        fields["rewards"] = trajectory.rewards
    if trajectory.role is not Role.TRAIN:
        fields["role"] = trajectory.role
    if trajectory.data_source is not None:
        fields["data_source"] = trajectory.data_source
    if trajectory.steps:
        fields["steps"] = tuple(
            StepSpan(step.row, step.start, step.end, step.reward, step.state_key) for step in trajectory.steps
        )
    return fields


def reference_problem(reference: Reference) -> str | None:
    """Why a reference cannot be true, or None. Readers check it first, because they allocate memory by its numbers."""
    lengths, trainable = reference.row_lengths, reference.row_trainable
    if not lengths or min(lengths) == 0 or len(lengths) != len(trainable):
        return f"row_lengths and row_trainable are {len(lengths)} and {len(trainable)} rows, needs tokens in each"
    if any(ones > length for ones, length in zip(trainable, lengths, strict=True)):
        return "row_trainable is above row_lengths"
    if sum(lengths) * MIN_TOKEN_BYTES > reference.size:
        return f"row_lengths are {sum(lengths)} tokens, its payload has {reference.size} bytes"
    for step in reference.steps:
        if not (0 <= step.row < len(lengths) and 0 <= step.start < step.end <= lengths[step.row]):
            return f"steps has the span {step.start}..{step.end} of row {step.row}, which has no such tokens"
    if reference.versions is not None and reference.versions[0] > reference.versions[1]:
        return f"versions {list(reference.versions)} end before they start"
    return None
