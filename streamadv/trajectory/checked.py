"""A trajectory as the encoder takes it: checked fields, from a validated `Trajectory` or from a plain record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from .columns import KNOWN_COLUMNS, Array
from .schema import Column, Role, Row, Status, Step, Trajectory


class StepSpan(NamedTuple):
    """A `schema.Step`, compact."""

    row: int
    start: int
    end: int
    reward: float
    state_key: str | None

    @classmethod
    def of(cls, step: Step) -> Self:
        return cls(step.row, step.start, step.end, step.reward, step.state_key)


class CheckedRow(NamedTuple):
    """A `schema.Row` without what the pipeline computes: what an earlier run computed is not stored."""

    columns: Mapping[str, Array]  # known ones, in the order of writing
    extras: Mapping[str, Column] = {}
    agent: str | None = None
    reward: float | None = None

    @classmethod
    def of(cls, row: Row) -> Self:
        fields = row.__dict__  # attribute access goes through pydantic
        columns = {name: array for name in KNOWN_COLUMNS if (array := fields[name]) is not None}
        return cls(columns, row.extras, fields["agent"], fields["reward"])


class Checked(NamedTuple):
    """The fields of a `schema.Trajectory` that is pushed."""

    group_id: str
    group_size: int
    rollout_index: int
    rows: Sequence[CheckedRow]
    reward: float | None = None
    scored: bool = False  # see `Trajectory.scored`
    reward_later: bool = False
    rewards: Mapping[str, float] = {}
    status: str = Status.COMPLETED
    role: str = Role.TRAIN
    model_version: int | tuple[int, int] | None = None
    data_source: str | None = None
    metadata: Mapping[str, Any] = {}
    steps: Sequence[StepSpan] = ()

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        fields = {name: value for name, value in trajectory.__dict__.items() if name in cls._fields}
        fields["rows"] = [CheckedRow.of(row) for row in trajectory.rows]
        fields["steps"] = [StepSpan.of(step) for step in trajectory.steps]
        return cls(**fields, scored=trajectory.scored)

    @property
    def kind(self) -> str:
        """usable, or why the slot ends without a trajectory: failed, aborted, unscorable."""
        if self.status not in (Status.COMPLETED, Status.TRUNCATED):
            return str(self.status)
        return "unscorable" if self.reward is None and self.scored else "usable"
